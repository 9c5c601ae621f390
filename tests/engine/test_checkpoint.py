import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import StartupError
from engine.model.checkpoint import expected_tensors, open_checkpoint
from engine.model.demo_checkpoint import DEMO_NAME, demo_file, split_halves
from engine.model.gguf_file import GgufFile
from engine.request import SamplingDefaults
from tests.model_folders import tiny_config, tiny_weights, write_json, write_model_folder

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00002.safetensors"


def test_folder_gives_weights_config_and_tokenizer(tmp_path):
    weights = tiny_weights(tiny_config())
    checkpoint = open_checkpoint(str(write_model_folder(tmp_path / "tiny-llama", weights=weights)))
    assert checkpoint.name == "tiny-llama"
    assert checkpoint.config.num_layers == 2
    for name, weight in weights.items():
        assert checkpoint.shape(name) == tuple(weight.shape)
        assert torch.equal(checkpoint.tensor(name), weight)
    assert checkpoint.shape("lm_head.weight") is None
    assert checkpoint.tokenizer().encode("</s>") == [257]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_keep_their_stored_type(tmp_path, dtype):
    weights = {name: weight.to(dtype) for name, weight in tiny_weights(tiny_config()).items()}
    checkpoint = open_checkpoint(str(write_model_folder(tmp_path, weights=weights)))
    assert torch.equal(checkpoint.tensor(Q_PROJ), weights[Q_PROJ])
    assert checkpoint.tensor(Q_PROJ).dtype == dtype


@pytest.mark.parametrize("has_index", [True, False])
def test_several_files_read_as_one(tmp_path, has_index):
    weights = tiny_weights(tiny_config())
    write_model_folder(tmp_path, weights=weights, shards=2)
    if not has_index:
        (tmp_path / INDEX).unlink()
    checkpoint = open_checkpoint(str(tmp_path))
    assert all(torch.equal(checkpoint.tensor(name), weight) for name, weight in weights.items())


def test_linked_files_are_followed(tmp_path):
    write_model_folder(tmp_path / "blobs", shards=2)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(os.path.relpath(path, tmp_path / "snapshot"))
    assert open_checkpoint(str(tmp_path / "snapshot")).shape(Q_PROJ) == (16, 16)


def test_name_is_the_folders_even_when_given_as_a_dot(tmp_path, monkeypatch):
    monkeypatch.chdir(write_model_folder(tmp_path / "here"))
    assert open_checkpoint("./").name == "here"


def test_generation_config_adds_end_tokens(tmp_path):
    write_model_folder(tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [1, 2]})
    assert open_checkpoint(str(tmp_path)).config.eos_token_ids == {1, 2, 257}


def test_expected_tensors_follow_the_flags(tmp_path):
    plain = set(expected_tensors(open_checkpoint(str(write_model_folder(tmp_path / "a"))).config))
    raw = tiny_config(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    full = expected_tensors(open_checkpoint(str(write_model_folder(tmp_path / "b", raw))).config)
    layers = [f"model.layers.{layer}" for layer in range(2)]
    biases = {f"{layer}.self_attn.{name}_proj.bias" for layer in layers for name in "qkvo"}
    biases |= {f"{layer}.mlp.{name}_proj.bias" for layer in layers for name in ("gate", "up", "down")}
    assert set(full) - plain == biases | {"lm_head.weight"}
    assert full["model.layers.1.self_attn.k_proj.bias"] == (8,)

    qwen = expected_tensors(
        open_checkpoint(str(write_model_folder(tmp_path / "c", tiny_config(architectures=["Qwen2ForCausalLM"])))).config
    )
    assert set(qwen) - plain == {f"{layer}.self_attn.{name}_proj.bias" for layer in layers for name in "qkv"}


def test_weights_that_no_config_asks_for_are_ignored(tmp_path):
    weights = tiny_weights(tiny_config())
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2, dtype=torch.float64)
    weights["lm_head.weight"] = torch.ones(1)
    assert open_checkpoint(str(write_model_folder(tmp_path, weights=weights))).shape(Q_PROJ) == (16, 16)


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = tiny_weights(tiny_config()) | changes
    save_file({name: weight for name, weight in weights.items() if weight is not None}, folder / "model.safetensors")


def edit_index(folder: Path, edit) -> None:
    write_model_folder(folder, shards=2)
    (folder / "model.safetensors").unlink()
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    write_json(folder / INDEX, index)


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def replace_by_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def duplicate(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({Q_PROJ: torch.ones(16, 16)}, folder / "b.safetensors")


def damage_qwen3(folder: Path, k_norm: torch.Tensor | None) -> None:
    raw = tiny_config(architectures=["Qwen3ForCausalLM"], head_dim=16)
    weights = tiny_weights(raw)
    del weights["model.layers.1.self_attn.k_norm.weight"]
    if k_norm is not None:
        weights["model.layers.1.self_attn.k_norm.weight"] = k_norm
    write_model_folder(folder, raw, weights)


FAULTS = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: file is missing"),
    "config is not JSON": (lambda f: (f / "config.json").write_text('{"a":'), "config.json: not readable as JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json: holds a JSON list"),
    "config is not UTF-8": (lambda f: (f / "config.json").write_bytes(b'"\xff"'), "config.json: cannot be read"),
    "deep config": (lambda f: (f / "config.json").write_text("[" * 10**5), "config.json: not readable as JSON"),
    "bad field": (lambda f: write_json(f / "config.json", tiny_config(head_dim=3)), "field head_dim is 3"),
    "bad end token": (
        lambda f: write_json(f / "generation_config.json", {"eos_token_id": 258}),
        "generation_config.json: field eos_token_id is 258",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights found, expected model.safetensors"),
    "pickle": (replace_by_pickle, "pytorch_model.bin: pickled weights are refused .* runs code"),
    "truncated": (lambda f: truncate(f / "model.safetensors", 9000), "model.safetensors: file is truncated, has 9000"),
    "truncated header": (
        lambda f: truncate(f / "model.safetensors", 90),
        "model.safetensors: not readable .* 90 bytes",
    ),
    "folder as file": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()),
        "model.safetensors: not readable as safetensors",
    ),
    "empty": (lambda f: truncate(f / "model.safetensors", 0), "model.safetensors: not readable as safetensors"),
    "not safetensors": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors: not readable as safetensors",
    ),
    "shape": (
        lambda f: change_weights(f, **{Q_PROJ: torch.ones(16, 8)}),
        rf"model.safetensors: tensor {Q_PROJ} has shape \[16, 8\], config.json expects \[16, 16\]",
    ),
    "shape of a norm": (
        lambda f: damage_qwen3(f, torch.ones(8)),
        r"model.safetensors: tensor model.layers.1.self_attn.k_norm.weight has shape \[8\], config.json expects \[16\]",
    ),
    "norm absent": (
        lambda f: damage_qwen3(f, None),
        "model.safetensors: tensor .*.1.self_attn.k_norm.weight is missing",
    ),
    "absent": (lambda f: change_weights(f, **{Q_PROJ: None}), f"model.safetensors: tensor {Q_PROJ} is missing"),
    "untied without head": (
        lambda f: write_json(f / "config.json", tiny_config(tie_word_embeddings=False)),
        r"tensor lm_head.weight is missing, config.json expects \[258, 16\]",
    ),
    "int8": (
        lambda f: change_weights(f, **{Q_PROJ: torch.ones(16, 16, dtype=torch.int8)}),
        f"tensor {Q_PROJ} is stored as I8, expected F32, BF16, F16",
    ),
    "float8": (
        lambda f: change_weights(f, **{Q_PROJ: torch.ones(16, 16).to(torch.float8_e4m3fn)}),
        f"tensor {Q_PROJ} is stored as F8_E4M3, expected",
    ),
    "in two files": (duplicate, f"tensor {Q_PROJ} is in both a.safetensors and b.safetensors"),
    "shard missing": (
        lambda f: (edit_index(f, dict), (f / SHARD).unlink()),
        rf"{SHARD}: file is missing, {INDEX} says that it holds \d+ tensors",
    ),
    "index without map": (lambda f: write_json(f / INDEX, {}), f"{INDEX}: weight_map is missing"),
    "index of numbers": (lambda f: write_json(f / INDEX, {"weight_map": {"a": 1}}), f"{INDEX}: weight_map is missing"),
    "index lies": (
        lambda f: edit_index(f, lambda map: map.update({"extra.weight": SHARD})),
        f"{SHARD}: tensor extra.weight is missing",
    ),
    "index leaves the folder": (
        lambda f: edit_index(f, lambda map: map.update({Q_PROJ: "../x.safetensors"})),
        "weight_map names '../x.safetensors', expected a .safetensors file inside the folder",
    ),
    "index goes to the root": (
        lambda f: edit_index(f, lambda map: map.update({Q_PROJ: "/etc/x.safetensors"})),
        "weight_map names '/etc/x.safetensors'",
    ),
    "index names a pickle": (
        lambda f: edit_index(f, lambda map: map.update({Q_PROJ: "model.bin"})),
        "weight_map names 'model.bin'",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        INDEX,
        SHARD,
    ],
)
@pytest.mark.parametrize("target", ["../../blobs/1234", "{name}"], ids=["nowhere", "itself"])
def test_a_link_that_leads_nowhere_is_told(tmp_path, name, target):
    """What is left of a cache of links when somebody copies or mounts only a part of it."""
    write_model_folder(tmp_path, shards=2 if name == SHARD else 1)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(target.format(name=name))
    with pytest.raises(StartupError) as caught:
        open_checkpoint(str(tmp_path)).tokenizer()
    assert str(caught.value).startswith(f"{tmp_path / name}: is a link that leads nowhere")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("damage", "says"), FAULTS.values(), ids=FAULTS)
def test_damaged_folder_is_refused_in_one_line(tmp_path, damage, says):
    damage(write_model_folder(tmp_path))
    with pytest.raises(StartupError, match=says) as caught:
        open_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_every_truncation_is_refused(tmp_path):
    path = write_model_folder(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for num_bytes in range(0, len(whole), 997):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(StartupError, match="model.safetensors"):
            open_checkpoint(str(tmp_path))


def test_unknown_model_lists_what_is_accepted(tmp_path):
    with pytest.raises(StartupError, match=f"'gpt5' is not known; expected {DEMO_NAME} or the path of a folder"):
        open_checkpoint("gpt5")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for model in (str(tmp_path / "model.gguf"), "", "a\0b", "x" * 10_000):
        with pytest.raises(StartupError, match="is not known"):
            open_checkpoint(model)


def test_demo_without_its_package_says_what_to_run(monkeypatch):
    monkeypatch.setattr("engine.model.demo_checkpoint.PACKAGE", "no_such_package")
    with pytest.raises(StartupError, match="make setup"):
        open_checkpoint(DEMO_NAME)


def test_split_halves_turns_adjacent_pairs_into_halves():
    # One head of 6 rows: pairs (0,1) (2,3) (4,5) become first halves 0 2 4, then second halves 1 3 5.
    rows = torch.arange(12.0).view(12, 1)
    assert split_halves(rows, 2).flatten().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_demo_model_is_described_and_readable():
    checkpoint = open_checkpoint(DEMO_NAME)
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.vocab_size, config.max_position) == (64, 49152, 8192)
    assert config.tie_embeddings
    assert config.eos_token_ids == {2}
    assert checkpoint.tokenizer().vocab_size == 49152
    # Sums that transformers 5.24.0 gives for its own reading of the same file.
    sums = {
        "model.embed_tokens.weight": -312506157.53272057,
        Q_PROJ: 25876.190353393555,
        "model.layers.29.self_attn.k_proj.weight": 11799.602088928223,
        "model.layers.7.mlp.down_proj.weight": -20829.93930053711,
    }
    for name, expected in sums.items():
        weight = checkpoint.tensor(name)
        assert weight.dtype == torch.float32
        assert weight.shape == checkpoint.shape(name)
        # Weighted by row, so that rows in another order give another sum.
        rows = torch.arange(weight.shape[0], dtype=torch.float64)
        assert (weight.double().sum(1) @ rows).item() == pytest.approx(expected, rel=1e-9)


def test_damaged_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    with demo_file().open("rb") as file:
        head = file.read(4_000_000)
    path.write_bytes(head)
    with pytest.raises(StartupError, match="model.gguf: file is truncated, has 4000000 bytes, its header expects 98"):
        GgufFile(path)
    for damaged in (b"", b"GGUF", head[:100_000], b"nope" + head[4:], b"GGUF" + struct.pack("<I", 9) + head[8:]):
        path.write_bytes(damaged)
        with pytest.raises(StartupError, match="model.gguf: not a readable GGUF file"):
            GgufFile(path)


def test_sampling_defaults_come_from_the_generation_config(tmp_path: Path):
    folder = write_model_folder(tmp_path / "model", tiny_config())
    assert open_checkpoint(str(folder)).sampling_defaults == SamplingDefaults(temperature=1.0, top_k=0, top_p=1.0)
    stated = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    assert open_checkpoint(str(folder)).sampling_defaults == SamplingDefaults(temperature=0.6, top_k=40, top_p=0.9)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": -1}))
    message = "generation_config.json: field temperature is -1, expected a number from 0 to 2"
    with pytest.raises(StartupError, match=message):
        open_checkpoint(str(folder))
