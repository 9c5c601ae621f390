"""`quire calibrate` and `--kv-recipe` from the command line, on a tiny model in a folder."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.load import load_engine
from engine.recipe_file import read_recipe
from server.cli import main
from tests.helpers import greedy, random_prompt, run
from tests.model_folders import tiny_config, tiny_weights, write_model_folder

TEXT = "".join(f"Line {number} of a text that nobody wrote. " for number in range(60))
CONFIG = tiny_config(hidden_size=32, head_dim=16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model", CONFIG, tiny_weights(CONFIG))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def command(model: Path, text: Path, folder: Path, *more: str) -> list[str]:
    options = "--context 256 --windows 2 --search-windows 1 --device cpu --page-tokens 32"
    return ["calibrate", str(model), "--text", str(text), "-o", str(folder), *options.split(), *more]


def engine_with(model: Path, folder: Path, **options: object) -> list[int]:
    config = EngineConfig(
        model=str(model),
        kv_recipe=str(folder),
        dtype="float32",
        device="cpu",
        max_num_seqs=2,
        **options,  # type: ignore[arg-type]
    )
    core = load_engine(config, lambda done, total: None).core
    (recorder,) = run(core, [greedy("a", random_prompt(0, 100), 40)])
    return list(recorder.token_ids)


def test_a_recipe_is_made_and_served(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recipe"
    assert main(command(model, text, folder, "--recipe", "nuq4"), {}) == 0
    assert "--kv-recipe" in capsys.readouterr().out
    names = ["codebooks.safetensors", "recipe.json", "sensitivities.csv", "sensitivities.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (folder / "sensitivities.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((folder / "sensitivities.csv").open()))
    assert len(rows) == 4 and all(row["chosen"] == "1" and float(row["loss_nats_per_token"]) >= 0 for row in rows)
    assert len(engine_with(model, folder)) == 40
    assert engine_with(model, folder) == engine_with(model, folder, batch_invariant=True)
    config = EngineConfig(model=str(model), kv_recipe=str(folder), dtype="float32", device="cpu", max_num_seqs=2)
    engine = load_engine(config, lambda done, total: None)
    assert (engine.info.recipe, engine.info.page_tokens) == ("nuq4", 32)
    table = dict(engine.describe_start())
    assert "before RoPE nuq4 per channel" in table["recipe"] and str(folder) in table["recipe chosen"]


def test_the_same_text_gives_the_same_recipe(model: Path, text: Path, tmp_path: Path) -> None:
    recipes = []
    for name in ("one", "two"):
        assert main(command(model, text, tmp_path / name, "--recipe", "mixed", "--budget", "4.5"), {}) == 0
        recipes.append(read_recipe(str(tmp_path / name)).recipe)
    assert recipes[0].id == recipes[1].id


def test_eval_takes_recipes(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "mine", tmp_path / "out.json"
    assert main(command(model, text, folder, "--recipe", "mixed", "--budget", "5"), {}) == 0
    options = "--context 256 --windows 1 --dtype float32 --device cpu --kv-format int8"
    arguments = ["eval", str(model), "--text", str(text), *options.split(), "--kv-recipe", str(folder)]
    assert main([*arguments, "--page-tokens", "32", "--json", str(out)], {}) == 0
    found = json.loads(out.read_text())["formats"]
    assert [item["name"] for item in found] == ["native", "int8", "mine"] and found[2]["bits_per_element"] <= 5
    capsys.readouterr()
    assert main(arguments, {}) == 2
    assert "measure all with --page-tokens 32" in capsys.readouterr().err


def test_another_model_is_refused(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "recipe"
    assert main(command(model, text, folder), {}) == 0
    other = write_model_folder(tmp_path / "other" / "model", CONFIG, tiny_weights(CONFIG, seed=1))
    capsys.readouterr()
    arguments = ["--kv-recipe", str(folder), "--http-port", "0", "--grpc-port", "0", "--device", "cpu"]
    assert main(["serve", str(other), *arguments], {}) == 2
    error = capsys.readouterr().err
    assert "made for model, which is not the model model (weights differ)" in error and error.count("\n") == 1


@pytest.mark.parametrize("flag", ["--page-tokens 32", "--sink-pages 1", "--window-pages 0", "--kv-format int4"])
def test_flags_beside_a_recipe_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--kv-recipe", "r", *flag.split()], {}) == 2
    assert f"{flag.split()[0]} is given beside --kv-recipe" in capsys.readouterr().err
    variable = "QUIRE_" + flag.split()[0][2:].replace("-", "_").upper()
    assert main(["serve", "m"], {variable: flag.split()[1], "QUIRE_KV_RECIPE": "r"}) == 2
    assert f"{variable} is given beside --kv-recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--recipe nuq5", "--recipe is 'nuq5'; it must be one of nuq4, nuq3, nuq2, nuq4_rot"),
        ("--recipe mixed", "--recipe mixed needs --budget"),
        ("--recipe mixed --budget 1", "--budget is 1 bits per element; mixed@1 takes at least"),
        ("--budget nan", "--budget is nan"),
        ("--budget 17", "--budget is 17.0; it must be bits per element, at most 16"),
        ("--context 100", "--context is 100; it must be whole pages of 32"),
        ("--context 64", "--context is 64; it must be at least 96"),
        ("--context 1024", "--context is 1024; model was made for at most 512"),
        ("--windows 0", "--windows is 0"),
        ("--marked-tokens 33", "--marked-tokens is 33; it must be from 0 to 32"),
        ("--page-tokens 48", "--page-tokens is 48"),
        ("--text no.txt", "--text no.txt: No such file"),
        ("-o no/such/recipe", "there is no folder"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, says: str
) -> None:
    before = sorted(tmp_path.iterdir())
    assert main([*command(model, text, tmp_path / "recipe"), *more.split()], {}) == 2
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("quire: ")]
    assert len(lines) == 1 and says in lines[0] and output.out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_search_with_room_for_everything_and_heads_of_no_whole_bytes(text: Path, tmp_path: Path) -> None:
    """A head of 20 channels: 3-bit codes do not fill bytes. 16 bits are more than the largest options take."""
    config = tiny_config(hidden_size=40, head_dim=20)
    model = write_model_folder(tmp_path / "model", config, tiny_weights(config))
    folder = tmp_path / "recipe"
    assert main(command(model, text, folder, "--recipe", "mixed", "--budget", "16"), {}) == 0
    rows = [row for row in csv.DictReader((folder / "sensitivities.csv").open()) if row["chosen"] == "1"]
    assert {row["code_bits"] for row in rows} == {"8"}


def test_a_short_text_is_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "short.txt"
    file.write_text("x" * 255)
    assert main(command(model, file, tmp_path / "recipe"), {}) == 2
    assert "255 tokens, shorter than one window" in capsys.readouterr().err
    assert not (tmp_path / "recipe").exists()


def test_numbers_that_are_not_finite_write_nothing(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tiny_weights(CONFIG)
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    model = write_model_folder(tmp_path / "broken", CONFIG, weights)
    before = sorted(tmp_path.iterdir())
    assert main(command(model, text, tmp_path / "recipe"), {}) == 2
    assert "not finite" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_recipe_is_replaced_only_when_told(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recipe"
    assert main(command(model, text, folder), {}) == 0
    first = read_recipe(str(folder)).recipe
    assert main(command(model, text, folder, "--recipe", "nuq2"), {}) == 2
    assert "is not empty" in capsys.readouterr().err and read_recipe(str(folder)).recipe == first
    assert main(command(model, text, folder, "--recipe", "nuq2", "--force"), {}) == 0
    assert read_recipe(str(folder)).recipe.name == "nuq2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "recipe", "text.txt"]


def test_a_failure_while_writing_leaves_nothing(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.study.calibration_report._draw", full)
    before = sorted(tmp_path.iterdir())
    assert main(command(model, text, tmp_path / "recipe"), {}) == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_help_and_mistakes_load_no_torch() -> None:
    script = (
        "import sys, server.cli\n"
        "server.cli.main(['calibrate', 'm', '--text', 't', '-o', 'r', '--recipe', 'nuq5'], {})\n"
        "print([name for name in ('torch', 'grpc', 'starlette') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
