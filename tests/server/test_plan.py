"""`quire plan`: its figures against arithmetic, its outputs, and one line for everything that is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

import engine.study.known_models
from engine.recipe_file import ModelIdentity, SavedRecipe, write_recipe
from engine.study.cards import CARDS
from engine.study.known_models import GroupedHeads, find_model
from kernels.format.named import RECIPE_NAMES, RECIPES
from kernels.format.recipe import Recipe
from server.cli import main
from tests.model_folders import tiny_config

WIDE = {"COLUMNS": "200"}
KNOWN = ("llama-3-8b", "llama-3.1-8b", "llama-3-70b", "llama-3.1-70b", "llama-2-7b", "deepseek-v2", "deepseek-v3")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json", "-"], WIDE) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", *arguments], WIDE) == 0
    return capsys.readouterr().out


def only(items: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    (found,) = (item for item in items if all(item[name] == value for name, value in fields.items()))
    return found


@pytest.mark.parametrize(
    ("model", "layers", "heads", "shown"),
    [("Llama-3-8B", 32, 8, "17.18"), ("llama-3.1-70b", 80, 8, "42.95"), ("llama-2-7b", 32, 32, "68.72")],
)
def test_16_bit_sizes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, layers: int, heads: int, shown: str
) -> None:
    arguments = (model, "--context", "128k", "--users", "8", "--kv-format", "fp16")
    native = only(plan(capsys, *arguments)["formats"], name="native")
    token = 2 * layers * heads * 128 * 2
    assert (native["bits_per_element"], native["bytes_per_token"]) == (16, token)
    # pages of 64 tokens; beside them a null page, and slots: a null slot, one a user, 8 to spare
    pages = {users: 64 * token * (1 + users * 131072 // 64 + 1 + users + 8) for users in (1, 8)}
    assert native["sizes"] == [
        {
            "context": 131072,
            "user_bytes": token * 131072,
            "pool_bytes_one_user": pages[1],
            "pool_bytes": pages[8],
        }
    ]
    assert f" {shown} " in table(capsys, monkeypatch, *arguments)


@pytest.mark.parametrize(
    ("name", "codes_bits", "parameters"),
    [
        # fp16 scales (and zeros) of 128 channels and 64 tokens in each of 8 heads
        ("fp8_e5m2", 8, 8 * 2 * (128 + 64)),
        ("int8", 8, 8 * 4 * (128 + 64)),
        # scales and zeros of a byte each, of 2 groups of tokens and 128 channels, and of 64 tokens and 4 groups of
        # channels; a factor for each head, of K and of V; a norm for each token
        ("int4", 4, 8 * 2 * (4 * 128 + 64 * 2) + 2 * 8 * 2 + 64 * 2),
    ],
)
def test_quantized_sizes(capsys: pytest.CaptureFixture[str], name: str, codes_bits: int, parameters: int) -> None:
    """Of Llama-3-8B: a page of 64 tokens has codes and parameters."""
    page = 32 * (8 * (2 * 64 * 128 * codes_bits // 8) + parameters)
    slot = 32 * 2 * 8 * 64 * 128 * 2
    found = only(plan(capsys, "llama-3-8b", "--context", "1000", "--users", "100", "--kv-format", name)["formats"])
    assert found["bytes_per_token"] == page / 64
    assert found["bits_per_element"] == pytest.approx(8 * page / 64 / (2 * 32 * 8 * 128))
    # 16 pages a user, of which one is a sink; slots: null, open and sink, a tenth to spare
    assert only(found["sizes"])["pool_bytes"] == page * (1 + 100 * 15) + slot * (1 + 200 + 20)
    assert only(found["sizes"])["user_bytes"] == round(1000 * page / 64)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [  # as the authors' checkpoints count
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-2-7b", 6_738_415_616),
        ("smollm2-135m-instruct", 134_515_008),
    ],
)
def test_weights(model: str, parameters: int) -> None:
    assert find_model(model).num_parameters == parameters
    assert find_model(model).weight_bytes == 2 * parameters


@pytest.mark.parametrize(("model", "layers"), [("deepseek-v2", 60), ("DeepSeek-V3", 61)])
def test_mla_is_sized_in_16_bit_and_not_served(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, layers: int
) -> None:
    arguments = (model, "--context", "128k", "--users", "4", "--kv-format", "native,int4", "--gpu", "32xH100")
    result = plan(capsys, *arguments)
    native = only(result["formats"], name="native")
    token = layers * (512 + 64) * 2
    assert native["bytes_per_token"] == token and only(native["sizes"])["pool_bytes"] == 4 * token * 131072
    int4 = only(result["formats"], name="int4")
    assert int4 == {
        "name": "int4",
        "is_served": False,
        "bits_per_element": None,
        "bytes_per_token": None,
        "sizes": [],
    }
    gpu = only(result["gpus"])
    assert gpu["prescriptions"] == [] and only(gpu["fits"], format="int4")["num_users"] is None
    assert only(gpu["fits"], format="native")["num_users"] == gpu["kv_bytes"] // (token * 131072)
    assert "Quire does not serve deepseek" in result["notes"][0]
    assert "not served" in table(capsys, monkeypatch, *arguments)


def test_what_fits_and_what_is_prescribed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (
        "llama-3-8b",
        "--gpu",
        "4xL40S, a100-40gb",
        "--context",
        "32k,1M",
        "--users",
        "8",
        "--kv-format",
        "fp16",
    )
    result = plan(capsys, *arguments)
    four = only(result["gpus"], name="4xL40S")
    memory = (4 * 48 * 10**9 - 2 * 8_030_261_248) * 9 // 10
    assert (four["count"], four["memory_bytes"], four["kv_bytes"]) == (4, 192 * 10**9, memory)
    page = 2 * 32 * 8 * 128 * 2 * 64
    fits = only(four["fits"], format="native", context=32768)["num_users"]

    def pool(users: int) -> int:
        return page * (1 + 512 * users + 1 + users + max(8, -(-users // 10)))

    assert pool(fits) <= memory < pool(fits + 1)
    choices = {choice["context"]: choice for choice in four["prescriptions"]}
    assert choices[32768]["format"] == "fp8_e5m2" and choices[32768]["num_users"] == 8
    assert choices[1048576]["format"] == "int4" and 0 < choices[1048576]["num_users"] < 8
    one = only(result["gpus"], name="A100-40GB")
    # 8 users of 32k take 18.0 GB of 21.5 in int8
    assert [choice["format"] for choice in one["prescriptions"]] == ["int8", "int4"]
    assert {gpu["name"] for gpu in result["cards"]} == {card.name for card in CARDS}
    assert any("one GPU today" in note for note in result["notes"])
    assert any("made for 8192 positions" in note for note in result["notes"])
    text = table(capsys, monkeypatch, *arguments)
    assert choices[1048576]["reason"] in text and "one GPU today" in text


def test_weights_that_leave_no_room(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("llama-3.1-70b", "--gpu", "L4", "--context", "8k")
    gpu = only(plan(capsys, *arguments)["gpus"])
    assert gpu["kv_bytes"] == 0 and gpu["prescriptions"] == []
    assert {item["num_users"] for item in gpu["fits"]} == {0}
    assert "no room" in table(capsys, monkeypatch, *arguments)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_config_alone_is_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path, is_folder: bool) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    result = plan(capsys, str(folder if is_folder else folder / "config.json"), "--context", "512")
    # 2 layers, hidden 16, inner 24, 4 query and 2 kv heads of 4, 258 tokens, tied
    layer = 2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24 + 2 * 16
    assert result["model"] == {
        "name": "my-model",
        "num_parameters": 258 * 16 + 2 * layer + 16,
        "weight_bytes": 2 * (258 * 16 + 2 * layer + 16),
        "max_position": 512,
        "elements_per_token": 2 * 2 * 2 * 4,
    }
    assert not any("made for" in note for note in result["notes"])


def test_the_order_of_contexts_and_doubles_do_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    first = plan(capsys, "llama-3-8b", "--context", "1M,32k,1024k", "--kv-format", "int4,int4", "--gpu", "L4,l4")
    assert first == plan(capsys, "llama-3-8b", "--context", "32768,1m", "--kv-format", "int4", "--gpu", "1xL4")


def test_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot, file = tmp_path / "plan.png", tmp_path / "plan.json"
    arguments = ["llama-2-7b", "--gpu", "H100", "--context", "100,5000"]
    assert main(["plan", *arguments, "--json", str(file), "--plot", str(plot)], WIDE) == 0
    assert "H100" in capsys.readouterr().out
    assert json.loads(file.read_text()) == plan(capsys, *arguments)
    assert plot.read_bytes().startswith(b"\x89PNG\r\n") and plot.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("gpt-5", ("model 'gpt-5' is not known", *KNOWN)),
        ("llama-3-8b --kv-format int5", ("--kv-format has 'int5'", *RECIPE_NAMES)),
        ("llama-3-8b --kv-format native,", ("--kv-format has ''",)),
        ("llama-3-8b --gpu 4xTitan", ("--gpu is '4xTitan'", *(card.name for card in CARDS))),
        ("llama-3-8b --gpu L4,", ("--gpu is ''",)),
        ("llama-3-8b --gpu 0xL4", ("--gpu is '0xL4'", "from 1 to 1024")),
        ("llama-3-8b --gpu 9999xL4", ("--gpu is '9999xL4'", "from 1 to 1024")),
        ("llama-3-8b --context 32q", ("--context has '32q'", "from 1 to 2147483647")),
        ("llama-3-8b --context 0", ("--context has '0'",)),
        ("llama-3-8b --context 4k,-1", ("--context has '-1'",)),
        ("llama-3-8b --context 4096M", ("--context has '4096M'",)),
        ("llama-3-8b --users 0", ("--users is '0'", "from 1 to 1000000")),
        ("llama-3-8b --users ٣", ("--users is '٣'",)),
        ("llama-3-8b --plot figure.pdf", ("--plot is 'figure.pdf'", ".png")),
        ("llama-3-8b --plot nowhere/figure.png", ("--plot nowhere/figure.png: cannot be written",)),
        ("llama-3-8b --json nowhere/plan.json", ("--json nowhere/plan.json: cannot be written",)),
        ("", ("MODEL_OR_CONFIG",)),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: str, says: tuple[str, ...]
) -> None:
    try:
        code: Any = main(["plan", *arguments.split()], {})
    except SystemExit as exit:
        code = exit.code
    output = capsys.readouterr()
    assert code == 2 and output.out == "" and output.err.count("\n") == 1
    assert [word for word in says if word not in output.err] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not readable as JSON"),
        ("[]", "holds a JSON list"),
        (json.dumps(tiny_config(architectures=["BertModel"])), "architecture BertModel is not supported"),
        (json.dumps(tiny_config(num_hidden_layers=0)), "num_hidden_layers"),
    ],
)
def test_a_bad_config_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["plan", str(path)], {}) == 2
    errors = capsys.readouterr().err
    assert says in errors and errors.count("\n") == 1


def test_a_folder_without_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", str(tmp_path)], {}) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_recipe_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Half of the layers in 8 bits, half in 16, as counted by hand."""
    model, folder = tmp_path / "config.json", tmp_path / "recipe"
    model.write_text(json.dumps(tiny_config()))
    folder.mkdir()
    heads = find_model(str(model)).heads
    assert isinstance(heads, GroupedHeads) and heads.num_layers % 2 == 0
    layers = (RECIPES["int8"](False), RECIPES["native"](False)) * (heads.num_layers // 2)
    identity = ModelIdentity(
        name="tiny",
        architecture="LlamaForCausalLM",
        hidden_size=1,
        num_layers=heads.num_layers,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        weights="0",
    )
    write_recipe(folder, SavedRecipe(Recipe("mine", layers, 64, 1), identity))
    found = only(plan(capsys, str(model), "--kv-recipe", str(folder))["formats"], name="recipe")
    row = heads.head_dim * heads.num_kv_heads
    parameters = 4 * row / 64 + 4 * heads.num_kv_heads  # fp16 scale and zero: K by channel, V by token
    assert found["bytes_per_token"] == heads.num_layers / 2 * (2 * row + parameters + 4 * row)
    assert main(["plan", "llama-3-8b", "--kv-recipe", str(folder)], {}) == 2
    assert f"{heads}; llama-3-8b has 32 layers, 8 KV heads of 128 channels" in capsys.readouterr().err
    assert main(["plan", "deepseek-v3", "--kv-recipe", str(folder)], {}) == 2
    assert "deepseek-v3 has 61 layers with MLA" in capsys.readouterr().err
    named_int4 = folder.rename(tmp_path / "int4")
    assert main(["plan", str(model), "--kv-recipe", str(named_int4)], {}) == 2
    assert "'int4' is the name of another format" in capsys.readouterr().err
    assert main(["plan", "llama-3-8b", "--kv-recipe", str(tmp_path / "no")], {}) == 2
    assert "recipe.json cannot be read" in capsys.readouterr().err


def test_names_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "[red]:smile: a [bold]model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    assert table(capsys, monkeypatch, str(folder)).startswith(f"{folder.name}: ")


def test_names_are_those_that_the_error_lists() -> None:
    models = (*engine.study.known_models.GROUPED_MODELS, *engine.study.known_models.LATENT_MODELS)
    assert models == KNOWN
    for name in models:
        assert find_model(name.upper()).name == name
