"""What the start says and does: the table, its bytes, and one line for everything that is wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import StartupError
from engine.load import load_engine
from tests.e2e.servers import SMALL, Start
from tests.helpers import COVERING_RECIPES, greedy, pool_of, run
from tests.model_folders import tiny_config, tiny_weights, write_model_folder

ROWS = (
    "model",
    "weights",
    "device",
    "backend",
    "recipe",
    "recipe chosen",
    "page",
    "bytes per token",
    "KV memory",
    "sealed pool",
    "open pool",
    "full requests",
    "reclaim",
    "shrink",
    "host memory",
    "cache folder",
    "HTTP",
    "gRPC",
)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def test_the_table_of_a_running_server(start: Start, model_folder: Path) -> None:
    server = start(str(model_folder), *SMALL, "--kv-format", "int4").wait_ready()
    table = server.table
    assert list(table) == list(ROWS)
    assert table["model"] == "lively (LlamaForCausalLM)" and table["device"] == "cpu"
    assert table["HTTP"] == server.http and table["gRPC"] == f"grpc://{server.grpc}"
    # int4 of 2 layers, 2 kv heads, D = 16, P = 32, in bytes: K and V codes 32*16/2 a head; scale and zero of K by
    # channel and 16 tokens and of V by token in 8 bits, each with an fp16 factor a head that is padded to 16 bytes; one
    # fp16 norm a token.
    codes = 2 * 2 * 2 * 32 * 16 // 2
    parameters = 2 * (2 * 2 * 2 * 16 + 16 + 2 * 2 * 32 + 16 + 32 * 2)
    page = codes + parameters
    slot = 2 * 2 * 2 * 32 * 16 * 4
    assert numbers(table["page"])[:2] == [32, page]
    assert numbers(table["bytes per token"])[:4] == [page / 32, codes / 32, parameters / 32, slot / 32]
    slots, pages = numbers(table["open pool"])[0], numbers(table["sealed pool"])[0]
    assert numbers(table["sealed pool"])[1] == pages * 32
    # Both null pages count: the pools fill what is allowed, but for less than one page.
    used = (slots + 1) * slot + (pages + 1) * page
    assert 16 * 2**20 - page < used <= 16 * 2**20
    assert numbers(table["KV memory"]) == [pytest.approx(used / 2**20, abs=0.05), 16.0]
    assert numbers(table["full requests"]) == [8, 512]  # --max-num-seqs bounds it here
    assert "loading weights" not in server.output  # a bar is for terminals
    assert server.client.get("/health/ready").status_code == 200


@pytest.mark.parametrize("recipe", COVERING_RECIPES)
@pytest.mark.parametrize("memory", [2**20, 3_333_333])
def test_bytes_add_up(model_folder: Path, recipe: str, memory: int) -> None:
    config = EngineConfig(
        model=str(model_folder),
        kv_format=recipe,
        kv_memory=memory,
        max_num_seqs=4,
        page_tokens=32,
        device="cpu",
        dtype="float32",
    )
    engine = load_engine(config, lambda done, total: None)
    pool, info = pool_of(engine.core), engine.info
    allocated = sum(tensor.nbytes for tensor in (pool.sealed, pool.open))
    assert memory - pool.sealed[0].nbytes < allocated <= memory
    assert info.bytes_per_token == pool.sealed[0].nbytes / 32
    assert (len(pool.sealed), len(pool.open)) == (info.num_sealed_pages + 1, info.num_slots + 1)
    allocators = engine.core.scheduler.pools.cache
    assert (allocators.sealed.num_total, allocators.open.num_total) == (info.num_sealed_pages, info.num_slots)
    table = dict(engine.describe_start())
    assert numbers(table["bytes per token"])[0] == pytest.approx(info.bytes_per_token, abs=0.5)


@pytest.mark.parametrize(
    ("memory", "recipe", "says"),
    [
        # 4 requests of 512 tokens, 16 pages each, and slots for one page each, 8 to spare and the null slot
        ((4 * 16 + 1 + 4 + 8 + 1) * 16384, "native", "native holds 4 requests of 512 tokens"),
        ((4 * 16 + 1 + 4 + 8 + 1) * 16384 - 1, "int8", "int8 is the first that holds 4 requests of 512 tokens"),
        # int4: two slots each; 15 sealed pages each and the null page, of 2752 bytes
        (
            17 * 16384 + (4 * 15 + 1) * 2752 - 1,
            "int4",
            "int4 holds 3 of 4 requests of 512 tokens, and auto goes no lower",
        ),
    ],
)
def test_auto_goes_by_the_memory(model_folder: Path, memory: int, recipe: str, says: str) -> None:
    """Of 2 layers, 2 kv heads, D = 16, P = 32 in fp32: a page of native has 16384 bytes."""
    options = {"page_tokens": 32, "max_num_seqs": 4, "device": "cpu", "dtype": "float32"}
    config = EngineConfig(model=str(model_folder), kv_memory=memory, **options)  # type: ignore[arg-type]
    engine = load_engine(config, lambda done, total: None)
    assert config.kv_format == "auto" and engine.info.recipe == recipe
    table = dict(engine.describe_start())
    assert table["recipe chosen"] == f"auto: CPU: native, then int8, then int4; {says}"
    assert table["full requests"].startswith("3 of" if "3 of 4" in says else "4 of")


def test_a_format_that_was_asked_for_stays(start: Start, model_folder: Path) -> None:
    server = start(str(model_folder), *SMALL, "--kv-format", "kivi2").wait_ready()
    assert server.table["recipe"].startswith("kivi2: ")
    assert server.table["recipe chosen"] == "asked for with --kv-format"


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def other_shapes(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(tiny_config(num_hidden_layers=3)))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (remove_config, r"config\.json: file is missing"),
        (truncate_weights, r"model\.safetensors"),
        (other_shapes, r"model\.safetensors: tensor model\.layers\.2\.\S+ is missing, config\.json expects \[16\]"),
    ],
)
def test_a_bad_folder_is_one_line_and_code_2(
    start: Start, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    damage(write_model_folder(tmp_path / "bad"))
    code, errors = start(str(tmp_path / "bad"), *SMALL).finish()
    assert code == 2
    assert re.fullmatch(rf"quire: .*{says}.*\n", errors), errors


def test_the_smallest_memory_that_is_named_is_enough(model_folder: Path) -> None:
    options = {"page_tokens": 32, "max_num_seqs": 8, "device": "cpu", "dtype": "float32", "kv_format": "int8"}

    def load(memory: int) -> Engine:
        config = EngineConfig(model=str(model_folder), kv_memory=memory, **options)  # type: ignore[arg-type]
        return load_engine(config, lambda done, total: None)

    with pytest.raises(StartupError) as caught:
        load(100_000)
    refusal = re.fullmatch(
        r"--kv-memory is 100000 bytes, .* of 512 tokens .*; the smallest .* (\d+) .*", str(caught.value)
    )
    assert refusal, caught.value
    with pytest.raises(StartupError):
        load(int(refusal[1]) - 1)
    core = load(int(refusal[1])).core
    recorders = run(core, [greedy("long", [5] * 500, 12), greedy("also long", [6] * 400, 112)])
    assert [len(recorder.token_ids) for recorder in recorders] == [12, 112]


def test_more_memory_than_there_is_is_one_line(start: Start, model_folder: Path) -> None:
    code, errors = start(str(model_folder), *SMALL, "--kv-memory", "900000GiB").finish()
    assert code == 2
    assert re.fullmatch(r"quire: the weights of .* --kv-memory is \d+; .* free here .*; lower --kv-memory\n", errors)


def test_a_context_that_no_memory_holds_is_one_line(tmp_path: Path) -> None:
    """Without `--kv-memory` too, and before the tables of all positions are made."""
    raw = tiny_config(max_position_embeddings=2**31 - 1, head_dim=128)
    write_model_folder(tmp_path / "endless", raw, tiny_weights(raw))
    config = EngineConfig(model=str(tmp_path / "endless"), device="cpu")
    with pytest.raises(StartupError, match=r"of 2147483647 tokens .*or lower --max-model-len"):
        load_engine(config, lambda done, total: pytest.fail("a weight was read"))


def test_a_token_that_the_model_lacks_is_refused_and_harms_nobody(start: Start, tmp_path: Path) -> None:
    """Some tokenizers have more tokens than their model has embeddings; here `</s>` is the token 257 of 256."""
    raw = tiny_config(vocab_size=256, eos_token_id=0)
    write_model_folder(tmp_path / "small", raw, tiny_weights(raw))
    server = start(str(tmp_path / "small"), *SMALL).wait_ready()
    refused = server.client.post("/v1/completions", json={"model": "small", "prompt": "hi</s>"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert "257" in refused.json()["error"]["message"] and "255" in refused.json()["error"]["message"]
    chat = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}  # the template writes `</s>`
    refused = server.client.post("/v1/chat/completions", json=chat)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert server.client.post("/v1/completions", json={"model": "small", "prompt": "hi"}).status_code == 200
    assert server.popen.poll() is None
