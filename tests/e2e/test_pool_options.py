"""The options of the pool, on whole servers: what they refuse, hooks that fail, and pages that outlive the process."""

import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import StartupError
from engine.load import load_engine
from tests.e2e.servers import SMALL, Server, Start
from tests.helpers import random_prompt

PAGE = 32
LENGTHS = (PAGE, PAGE + 1, 3 * PAGE + 5, 5 * PAGE)
NUM_TOKENS = 12
INT4 = ("--kv-format", "int4", "--batch-invariant")

REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--reclaim", "mru"), r"--reclaim is 'mru'; it must be one of lru, .*, or path\.py:Class for a .*"),
    (("--host-memory", "1KiB"), r"--host-memory is 1024 bytes, .*; the smallest that works is \d+ bytes"),
    (("--host-memory", "much"), r"--host-memory is 'much'; it must be bytes, or a number with KiB, .*"),
    (("--poison=1",), r"argument --poison\S*: ignored explicit argument '1'; .*"),
]


def ask(server: Server, seed: int, length: int, **fields: Any) -> tuple[str, int]:
    """The greedy text after a random prompt, and how many of its tokens were cached."""
    body = {"model": "lively", "prompt": random_prompt(seed, length), "max_tokens": NUM_TOKENS, "temperature": 0}
    response = server.client.post("/v1/completions", json=body | {"ignore_eos": True} | fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"], response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_all(server: Server) -> tuple[list[str], list[int]]:
    answers = [ask(server, seed, length) for seed, length in enumerate(LENGTHS)]
    return [text for text, _ in answers], [cached for _, cached in answers]


def terminate(server: Server) -> str:
    """SIGTERM, and a good end. Returns what was logged."""
    server.popen.send_signal(signal.SIGTERM)
    code, errors = server.finish()
    assert code == 0, errors
    return errors


def warnings(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if " WARNING " in line or " ERROR " in line]


def test_each_refusal_is_one_line_and_code_2(start: Start, model_folder: Path) -> None:
    started = [start(str(model_folder), *SMALL, *options) for options, _ in REFUSED]
    for server, (_, says) in zip(started, REFUSED, strict=True):
        code, errors = server.finish()
        assert code == 2 and re.fullmatch(rf"quire( serve)?: {says}\n", errors), errors


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reclaim": "slru:ttl=0"}, "--reclaim is 'slru:ttl=0'; ttl must be a number of seconds above 0"),
        ({"host_reclaim": "nowhere.py:Mine"}, "--host-reclaim: there is no file 'nowhere.py'"),
        ({"shrink": "h3o"}, "must be none, or one of streaming, h2o, snapkv"),
        ({"shrink": "snapkv"}, "--shrink snapkv needs --host-memory"),
        ({"shrink": "h2o:heavy=0", "host_memory": 2**30}, "heavy of h2o must be an integer from 1 to 1048576"),
        ({"host_memory": 0}, "--host-memory is 0; it must be at least 1"),
    ],
)
def test_what_a_load_refuses(model_folder: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError) as caught:
        load_engine(EngineConfig(model=str(model_folder), device="cpu", **options), lambda done, total: None)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("--" + next(iter(options)).replace("_", "-"))


MOODY = """
class Moody:
    def key(self, page, now):
        if page.depth > 1:
            raise LookupError("not today")
        return "nonsense" if page.depth else page.last_use
"""


def test_a_hook_that_fails_does_not_end_the_server(start: Start, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(MOODY)
    hooks = [text for flag in ("--reclaim", "--host-reclaim") for text in (flag, f"{tmp_path}/moody.py:Moody")]
    small = ("--kv-memory", "450KiB", "--host-memory", "64KiB", "--max-model-len", "256", "--poison")
    server = start(str(model_folder), *SMALL, *small, *INT4, *hooks).wait_ready()
    prompts = [(seed, 3 * PAGE + 1) for seed in range(40)]
    first = [ask(server, *prompt) for prompt in prompts]
    assert [ask(server, *prompt)[0] for prompt in prompts] == [text for text, _ in first]
    pool = server.client.get("/v1/pool?check=true").json()
    assert pool["check"] == "ok"
    assert sum(pool["reclaimed_pages"].values()) > 40, pool
    errors = terminate(server)
    assert len(warnings(errors)) == errors.count("Traceback") == errors.count("LookupError: not today") == 2
    for flag in ("--reclaim", "--host-reclaim"):
        assert f": {flag} {tmp_path}/moody.py:Moody failed for a page" in errors


def test_pages_outlive_the_server_but_not_what_broke_them(start: Start, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    options = (str(model_folder), *SMALL, *INT4, "--cache-dir", str(folder))
    first = start(*options).wait_ready()
    texts, cached = ask_all(first)
    assert cached == [0] * len(LENGTHS)
    assert warnings(terminate(first)) == []
    most = [(length - 1) // PAGE * PAGE for length in LENGTHS]  # whole pages, and not that of the last token

    second = start(*options).wait_ready()
    assert int(re.findall(r", (\d+) pages", second.table["cache folder"])[0]) >= sum(most) // PAGE
    assert ask_all(second) == (texts, most)
    other = start(*options).wait_ready()  # leaves the folder to the second, and is well without it
    assert ask_all(other) == (texts, [0] * len(LENGTHS))
    (warning,) = warnings(terminate(other))
    assert "another server uses it" in warning and str(folder) in warning

    # The disk takes no more: what was saved before stays.
    resource.prlimit(second.popen.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    (warning,) = warnings(terminate(second))
    assert "cached pages were not saved" in warning and "File too large" in warning
    third = start(*options).wait_ready()
    assert ask_all(third) == (texts, most)
    assert warnings(terminate(third)) == []

    (index,) = folder.rglob("index.json")
    index.write_bytes(bytes(255 - byte for byte in index.read_bytes()))
    fourth = start(*options).wait_ready()
    assert ask_all(fourth) == (texts, [0] * len(LENGTHS))
    (warning,) = warnings(terminate(fourth))
    assert "pages on disk are not used" in warning and str(index) in warning


def test_a_cache_folder_that_cannot_be_made_is_a_warning(start: Start, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "locked").mkdir(mode=0o500)
    locked = tmp_path / "locked" / "cache" if os.geteuid() else Path("/proc/cache")  # root may write to the former
    for folder in (tmp_path / "file", locked):
        server = start(str(model_folder), *SMALL, *INT4, "--cache-dir", str(folder)).wait_ready()
        (text, cached), again = ask(server, 1, 3 * PAGE), ask(server, 1, 3 * PAGE)
        assert cached == 0 and again == (text, 2 * PAGE)
        (warning,) = warnings(terminate(server))
        assert "pages are not kept on disk" in warning and str(folder) in warning
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_default_shrink_holds_for_all_requests_and_can_be_turned_off(start: Start, model_folder: Path) -> None:
    options = ("--shrink", "h2o:heavy=2,recent=1", "--host-memory", "4MiB")
    server = start(str(model_folder), *SMALL, *INT4, *options).wait_ready()
    assert server.table["shrink"].startswith("h2o:heavy=2,recent=1")

    def num_dropped() -> int:
        return int(server.client.get("/v1/pool").json()["pages"]["dropped"])

    whole, _ = ask(server, 1, 9 * PAGE, kv_shrink="none")
    assert num_dropped() == 0
    shrunk, _ = ask(server, 1, 9 * PAGE)
    assert num_dropped() > 0 and shrunk != whole
    assert ask(server, 1, 9 * PAGE, kv_shrink="none")[0] == whole
