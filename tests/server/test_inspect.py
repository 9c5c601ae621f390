"""`quire inspect` from the command line, on tiny models in folders."""

import csv
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import server.inspection
from engine.study.distribution import Kind
from server.cli import main
from tests.engine.inspections import (
    OUTLIER_CHANNEL,
    OUTLIER_HEAD,
    SINK_CHANNEL,
    SINK_LAYER,
    SINK_TEXT,
    TEXT,
    normalised_embeddings,
    planted_folder,
    planted_residual,
    planted_weights,
    token_ids,
)

FILES = ["channels.csv", "channels.png", "layers.csv", "magnitudes.png", "sinks.csv", "sinks.png", "surfaces.png"]
SINK_PLACES = (100, 150)
NUM_TOKENS = 200


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return planted_folder(tmp_path / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """One token a byte, with two sink tokens."""
    letters = list(TEXT)
    for place in SINK_PLACES:
        letters[place] = SINK_TEXT
    file = tmp_path / "text.txt"
    file.write_text("".join(letters))
    return file


def command(model: Path, text: Path, *more: str) -> list[str]:
    options = f"--tokens {NUM_TOKENS} --device cpu --output {text.parent / 'figs'}"
    return ["inspect", str(model), "--text", str(text), *options.split(), *more]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_what_was_planted_is_found(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(model, text), {}) == 0
    folder, output = tmp_path / "figs", capsys.readouterr()
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figs", "model", "text.txt"]
    for path in folder.glob("*.png"):
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") and struct.unpack(">I", data[16:20]) == (1200,)

    weights, tokens = planted_weights(), token_ids(text.read_text()[:NUM_TOKENS])
    channels = table(folder / "channels.csv")
    assert len(channels) == 3 * len(Kind) * 2 * 4
    of_first = [row for row in channels if (row["layer"], row["kind"]) == ("0", "k_before_rope")]
    outliers = [(row["head"], row["channel"]) for row in of_first if row["is_outlier"] == "true"]
    assert outliers == [(str(OUTLIER_HEAD), str(OUTLIER_CHANNEL))]
    (row,) = (row for row in of_first if (row["head"], row["channel"]) == outliers[0])
    row_weight = weights["model.layers.0.self_attn.k_proj.weight"][OUTLIER_HEAD * 4 + OUTLIER_CHANNEL].double()
    numbers = normalised_embeddings(weights, tokens) @ row_weight
    centred = numbers - numbers.mean()
    assert [float(row[name]) for name in ("mean_abs", "max_abs", "std", "kurtosis")] == pytest.approx(
        [
            float(numbers.abs().mean()),
            float(numbers.abs().max()),
            float(centred.square().mean().sqrt()),
            float((centred**4).mean() / centred.square().mean() ** 2),
        ],
        rel=1e-4,
    )

    layers = table(folder / "layers.csv")
    assert len(layers) == 3 * len(Kind)
    for row in layers:
        assert (row["per_channel_4bit_weights_error"] == "") == row["kind"].startswith("v")
        assert float(row["per_token_4bit_outputs_error"]) > 0 and 0 < float(row["top_1_percent_energy"]) < 1

    residual = planted_residual(weights, tokens)
    peaks = residual.abs().amax(-1)
    sinks = table(folder / "sinks.csv")
    assert [int(row["position"]) for row in sinks] == list(SINK_PLACES)
    for row, place in zip(sinks, SINK_PLACES, strict=True):
        assert (row["token_id"], row["text"]) == (str(tokens[place]), SINK_TEXT)
        assert (row["emergence_layer"], row["layers"]) == (str(SINK_LAYER), "1-2")
        assert row["channel"] == str(SINK_CHANNEL)
        assert float(row["magnitude"]) == pytest.approx(float(residual[place, SINK_CHANNEL].abs()), rel=1e-4)
        assert float(row["times_median"]) == pytest.approx(float(peaks[place] / peaks.median()), rel=1e-4)
    for word in ("axis of K", "K has no bias", "2 (tokens 100, 150)", "2 behind the first page", str(folder)):
        assert word in " ".join(output.out.split())


def test_layers_and_head_are_chosen_and_force_replaces(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(model, text, "--layers", "2, 0", "--head", "1", "--dtype", "bfloat16"), {}) == 0
    folder = tmp_path / "figs"
    (folder / "mine.txt").write_text("kept")
    before = (folder / "layers.csv").read_bytes()
    assert main(command(model, text), {}) == 2
    assert "is not empty" in capsys.readouterr().err and (folder / "layers.csv").read_bytes() == before
    assert main(command(model, text, "--force"), {}) == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "mine.txt"])
    assert (folder / "layers.csv").read_bytes() != before


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--layers 0,3", "--layers has '3'; it must be made of numbers from 0 to 2"),
        ("--layers 0,,1", "--layers has ''"),
        ("--layers -1", "--layers has '-1'"),
        ("--head 2", "--head is 2; model has KV heads 0 to 1"),
        ("--tokens 191", "--tokens is 191; it must be from 192 to the 512 positions"),
        ("--tokens 513", "--tokens is 513; it must be from 192 to the 512 positions"),
        ("--text no.txt", "--text no.txt: No such file"),
        ("--dtype int8", "--dtype is 'int8'"),
        ("--output no/such/folder", "there is no folder"),
        ("--output text.txt", "is a file"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    name, value = more.split(maxsplit=1)
    assert main([*command(model, text), f"{name}={value}"], {}) == 2
    output = capsys.readouterr()
    assert says in output.err and output.err.count("\n") == 1 and output.out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_short_text_is_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "short.txt"
    file.write_text("x" * (NUM_TOKENS - 1))
    assert main(command(model, file), {}) == 2
    assert f"{NUM_TOKENS - 1} tokens; lower --tokens" in capsys.readouterr().err
    assert not (tmp_path / "figs").exists()


def test_numbers_that_are_not_finite_are_told_and_nothing_is_written(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = planted_weights()
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    model = planted_folder(tmp_path / "model", weights)
    assert main(command(model, text), {}) == 2
    assert "layer 1 gives numbers that are not finite" in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


def test_a_stopped_run_leaves_nothing(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server.inspection, "save_figures", stop)
    assert main(command(model, text), {}) == 130
    assert capsys.readouterr().err.endswith("quire: stopped\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


def test_help_and_mistakes_load_no_torch() -> None:
    script = (
        "import sys, server.cli\n"
        "server.cli.main(['inspect', 'm', '-o', 'no/such/folder', '--text', 't'], {})\n"
        "print([name for name in ('torch', 'matplotlib', 'grpc', 'starlette') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
