"""`quire eval` from the command line, on a tiny model in a folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.study.driver import Driver
from server.cli import main
from tests.model_folders import tiny_config, tiny_weights, write_model_folder

TEXT = "".join(f"Line {number} of a text that nobody wrote. " for number in range(60))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def command(model: Path, text: Path, *more: str) -> list[str]:
    options = "--context 256 --windows 2 --dtype float32 --device cpu --page-tokens 32 --max-step-tokens 64"
    return ["eval", str(model), "--text", str(text), *options.split(), *more]


def without_times(value: Any) -> Any:
    """The report without what differs from run to run."""
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if "second" not in name}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def test_table_and_json(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    arguments = command(model, text, "--kv-format", "kivi2, int8,kivi2", "--json", str(file), "--probe", "quote")
    assert main([*arguments, "--probe-depths", "1", "--kv-memory", "10MiB"], {}) == 0
    output = capsys.readouterr()
    report = json.loads(file.read_text())
    assert [found["name"] for found in report["formats"]] == ["native", "kivi2", "int8"]
    assert (report["context"], report["num_windows"], report["dtype"]) == (256, 2, "float32")
    native, kivi2, _ = report["formats"]
    assert (native["bits_per_element"], native["kl"], native["agreement"]) == (32, 0, 1)
    assert native["loss_percent"] == {"mean": 0, "low": 0, "high": 0}
    assert kivi2["kl"] > 0 and kivi2["loss_percent"]["low"] < kivi2["loss_percent"]["high"]
    assert all(len(found["windows"]) == 2 and len(found["probes"]) == 1 for found in report["formats"])
    for word in ("native", "kivi2", "int8", "perplexity", "quote", "2 x 256 tokens"):
        assert word in output.out
    assert "--context is 256" in output.err and "measure at 8192" in output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.json", "text.txt"]


def test_a_stopped_run_goes_on(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    assert main(command(model, text, "--kv-format", "int8", "--json", str(whole)), {}) == 0
    prefill, salts = Driver.prefill, []

    def counted(self: Driver, *args: Any, **more: Any) -> Any:
        if len(salts) == 3:
            raise KeyboardInterrupt
        salts.append(more["salt"])
        return prefill(self, *args, **more)

    monkeypatch.setattr(Driver, "prefill", counted)
    arguments = command(model, text, "--kv-format", "int8", "--json", str(parts))
    assert main(arguments, {}) == 130
    assert not parts.exists() and "goes on from here" in capsys.readouterr().err
    del salts[:]
    assert main(arguments, {}) == 0
    assert salts == ["window 1"]
    first, second = (without_times(json.loads(file.read_text())) for file in (whole, parts))
    assert first == second


def test_a_folder_of_another_run_is_refused(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "results")
    assert main(command(model, text, "--kv-format", "native", "--resume", folder), {}) == 0
    assert main(command(model, text, "--kv-format", "int8", "--resume", folder), {}) == 0  # formats may be added
    capsys.readouterr()
    other = write_model_folder(tmp_path / "other" / "model", None, tiny_weights(tiny_config(), seed=1))
    for arguments, says in (
        (command(other, text), "model_digest differ"),
        (command(model, text, "--sink-pages", "2"), "sink_pages differ"),
        (command(model, text, "--windows", "1"), "num_windows differ"),
    ):
        assert main([*arguments, "--resume", folder], {}) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--kv-format int8,int5", "--kv-format has 'int5'; it must be made of native, int8"),
        ("--probe passkeys", "--probe has 'passkeys'; it must be made of passkey, quote"),
        ("--context 513", "--context is 513; model was made for at most 512 positions"),
        ("--context 63", "--context is 63; it must be at least 64"),
        ("--context 128 --probe quote", "with --probe it must be at least 256"),
        ("--windows 0", "--windows is 0"),
        ("--json no/such/out.json", "there is no such folder"),
        ("--page-tokens 48", "--page-tokens is 48"),
        ("--text no.txt", "--text no.txt: No such file"),
        ("--dtype int8", "--dtype is 'int8'"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, says: str
) -> None:
    before = sorted(tmp_path.iterdir())
    assert main([*command(model, text), *more.split()], {}) == 2
    output = capsys.readouterr()
    assert says in output.err and output.err.count("\n") == 1 and output.out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_text_is_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(model)], {}) == 2
    assert "--text" in capsys.readouterr().err


def test_a_short_text_is_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "short.txt"
    file.write_text("x" * 255)
    assert main(command(model, file), {}) == 2
    error = capsys.readouterr().err
    assert "255 tokens, shorter than one window" in error and error.count("\n") == 1


def test_fewer_windows_than_asked_for_are_told(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command(model, text), "--windows", "99", "--kv-format", "native"], {}) == 0
    count = len(TEXT) // 256
    assert f"the text has {count} windows of 256 tokens, not 99" in " ".join(capsys.readouterr().err.split())


def test_a_model_without_finite_numbers_is_told(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tiny_weights(tiny_config())
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    model, file = write_model_folder(tmp_path / "model", None, weights), tmp_path / "out.json"
    assert main(command(model, text, "--json", str(file)), {}) == 2
    assert "no finite numbers" in capsys.readouterr().err
    assert not file.exists()


def test_help_and_mistakes_load_no_torch() -> None:
    script = (
        "import sys, server.cli\n"
        "server.cli.main(['eval', 'm', '--text', 't', '--kv-format', 'int5'], {})\n"
        "print([name for name in ('torch', 'grpc', 'starlette') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
