"""The command line: options and variables made from the configs, and errors of one line."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

import server.lifecycle
from engine.config import EngineConfig
from server.cli import main
from server.config import ServerConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """Configs that `quire serve` would have served."""
    calls: list[tuple[EngineConfig, ServerConfig]] = []

    def record(engine_config: EngineConfig, config: ServerConfig) -> int:
        calls.append((engine_config, config))
        return 0

    monkeypatch.setattr(server.lifecycle, "serve", record)
    return calls


def test_defaults_are_those_of_the_configs(served: list[Any]) -> None:
    assert main(["serve", "m"], {}) == 0
    assert served == [(EngineConfig(model="m"), ServerConfig())]


def test_options(served: list[Any]) -> None:
    arguments = "serve m --kv-format int8 --kv-memory 2GiB --batch-invariant --max-model-len 99 --http-port 0"
    assert main([*arguments.split(), "--drain-seconds", "1.5"], {}) == 0
    engine_config, config = served[0]
    assert engine_config == EngineConfig(
        model="m", kv_format="int8", kv_memory=2**31, batch_invariant=True, max_model_len=99
    )
    assert config == ServerConfig(http_port=0, drain_seconds=1.5)


def test_variables_and_precedence(served: list[Any]) -> None:
    environ = {"QUIRE_MODEL": "m", "QUIRE_MAX_NUM_SEQS": "5", "QUIRE_BATCH_INVARIANT": "true", "QUIRE_HOST": "::1"}
    assert main(["serve"], environ) == 0
    assert main(["serve", "n", "--max-num-seqs", "6", "--no-batch-invariant"], environ) == 0
    first, second = served
    assert (first[0].model, first[0].max_num_seqs, first[0].batch_invariant, first[1].host) == ("m", 5, True, "::1")
    assert (second[0].model, second[0].max_num_seqs, second[0].batch_invariant) == ("n", 6, False)


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        ("serve", {}, "QUIRE_MODEL"),
        ("serve m", {"QUIRE_MAX_NUM_SEQS": "many"}, "QUIRE_MAX_NUM_SEQS is 'many'; it must be a whole number"),
        ("serve m", {"QUIRE_BATCH_INVARIANT": "maybe"}, "QUIRE_BATCH_INVARIANT is 'maybe'; it must be true or false"),
        ("serve m", {"QUIRE_KV_FORMAT": "int5"}, "QUIRE_KV_FORMAT is 'int5'; it must be one of auto, native"),
        ("serve m --dtype int8", {}, "--dtype is 'int8'; it must be one of auto, float32"),
        ("serve m --kv-memory lots", {}, "--kv-memory is 'lots'; it must be bytes"),
        ("serve m --page-tokens 48", {}, "--page-tokens is 48; it must be 32, 64 or 128"),
        ("serve m", {"QUIRE_PAGE_TOKENS": "48"}, "QUIRE_PAGE_TOKENS is 48; it must be 32, 64 or 128"),
        ("serve m --http-port 70000", {}, "--http-port is 70000; it must be from 0 to 65535"),
        ("serve m --drain-seconds nan", {}, "--drain-seconds is nan"),
        ("serve m --no-such-flag", {}, "--no-such-flag"),
        ("serve m --http-port", {}, "--http-port"),
        ("fly", {}, "fly"),
        ("", {}, "COMMAND"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    served: list[Any], capsys: pytest.CaptureFixture[str], arguments: str, environ: dict[str, str], says: str
) -> None:
    try:
        code: Any = main(arguments.split(), environ)
    except SystemExit as exit:
        code = exit.code
    output = capsys.readouterr()
    assert code == 2 and output.out == "" and served == []
    assert says in output.err and output.err.count("\n") == 1


def test_help_shows_every_option_with_its_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["serve", "--help"], {})
    assert exit.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    fields = [field for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)]
    for field in fields:
        if field.name == "model":
            continue
        default = "" if field.default is None else f"default: {field.default}; ".replace("False", "false")
        assert f"--{field.name.replace('_', '-')} " in text
        assert f"[{default}QUIRE_{field.name.upper()}]" in text
    assert "[QUIRE_MODEL]" in text
    for group in ("KV pool:", "engine:", "model:", "server:"):
        assert group in text


def test_a_variable_that_no_option_has_is_told(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m"], {"QUIRE_KV_FROMAT": "int8", "QUIRE_HOST": "::1"}) == 0
    assert capsys.readouterr().err.splitlines() == [
        "quire: QUIRE_KV_FROMAT is set, but no option has that name; see quire serve --help"
    ]


def test_an_empty_variable_is_none(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Compose passes `${NAME:-}` for what is not set."""
    empty = {"QUIRE_KV_RECIPE": "", "QUIRE_MAX_NUM_SEQS": "", "QUIRE_BATCH_INVARIANT": ""}
    assert main(["serve", "m", "--kv-format", "int4"], empty) == 0
    assert capsys.readouterr().err == ""
    (engine, _) = served[0]
    assert engine == EngineConfig(model="m", kv_format="int4")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"], {})
    assert exit.value.code == 0 and capsys.readouterr().out.startswith("quire ")


def test_help_loads_neither_torch_nor_servers() -> None:
    script = (
        "import sys, server.cli\n"
        "try: server.cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'grpc', 'starlette', 'pydantic') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
