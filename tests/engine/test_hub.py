"""Models by their names on a hub: what is asked for, what the cache gives later, and one line for all that fails."""

import errno
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engine.model.hub
from engine.errors import StartupError
from engine.model.checkpoint import open_checkpoint
from engine.study.known_models import find_model
from tests.engine.hub import COMMIT, FETCH, MIB, Answer, Hub, Repo, environment, fetch, running
from tests.model_folders import tiny_config, write_json, write_model_folder

NAME = "some-org/tiny.llama"
GATED = {"X-Error-Code": "GatedRepo"}
READ = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
}  # fmt: skip


def write_repository(folder: Path) -> Path:
    """A model, and what repositories hold beside what is read."""
    write_model_folder(folder, shards=2)
    for file in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "onnx/model.safetensors", "vocab.json"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(b"not asked for")
    write_json(folder / "generation_config.json", {"temperature": 0.5})
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("hub") / "model")


def test_only_files_that_are_read_are_asked_for(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Hub({NAME: Repo(folder)})) as hub:
        ((is_there, found),) = fetch(hub.url, tmp_path, NAME, HF_TOKEN="hf_secret")
        assert is_there and hub.fetched(NAME) == READ
        assert hub.tokens == {"Bearer hf_secret"}
    assert {path.name for path in Path(found).iterdir()} == READ
    assert all((Path(found) / file).read_bytes() == (folder / file).read_bytes() for file in READ)
    monkeypatch.setattr("engine.model.checkpoint.fetch", lambda name, revision: Path(found))
    assert open_checkpoint(NAME).name == NAME


def test_weights_without_an_index(tmp_path: Path, folder: Path) -> None:
    repos = {}
    for name, files in (("a/whole", ("model", "other")), ("a/parts", ("one", "two"))):
        here = tmp_path / name
        (here / "onnx").mkdir(parents=True)
        for file in ("config.json", "tokenizer.json"):
            (here / file).write_bytes((folder / file).read_bytes())
        for file in (*files, "onnx/three"):
            (here / f"{file}.safetensors").write_text(file)
        repos[name] = Repo(here)
    with running(Hub(repos)) as hub:
        assert all(is_there for is_there, _ in fetch(hub.url, tmp_path, *repos))
        described = {"config.json", "tokenizer.json"}
        assert hub.fetched("a/whole") - described == {"model.safetensors"}
        assert hub.fetched("a/parts") - described == {"one.safetensors", "two.safetensors"}


def test_later_the_cache_is_enough(tmp_path: Path, folder: Path) -> None:
    with running(Hub({NAME: Repo(folder)})) as hub:
        (first,) = fetch(hub.url, tmp_path, NAME)
        assert first[0]
        hub.asked.clear()
        assert fetch(hub.url, tmp_path, NAME, f"config:{NAME}") == [first, (True, f"{first[1]}/config.json")]
        assert hub.fetched(NAME) == set() and not any(method == "HEAD" for method, _ in hub.asked)
        hub.asked.clear()
        models = (NAME, f"{NAME}@main", f"{NAME}@{COMMIT}", f"{NAME}@v2")
        *found, (is_there, says) = fetch(hub.url, tmp_path, *models, HF_HUB_OFFLINE="1")
        assert found == [first] * 3 and hub.asked == []
        assert not is_there and "holds no whole model of revision 'v2' of that name" in says
        hub.repos = {NAME: Repo(folder, refusals={"": Answer(503)})}
        assert fetch(hub.url, tmp_path, NAME) == [first]
    assert fetch(hub.url, tmp_path, NAME) == [first]  # nobody listens there now


def test_a_revision(tmp_path: Path, folder: Path) -> None:
    with running(Hub({NAME: Repo(folder, revisions=("v1", COMMIT))})) as hub:
        there, missing = fetch(hub.url, tmp_path, f"{NAME}@v1", f"{NAME}@v2")
        assert there[0] and ("GET", f"/api/models/{NAME}/revision/v1") in hub.asked
        assert not missing[0] and f"{NAME} has no revision 'v2'" in missing[1] and "--revision" in missing[1]


ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "a/gated-page": (
        {"refusals": {"api": Answer(403, GATED)}},
        r"is gated; ask for access at http://\S+/a/gated-page,",
    ),
    "a/gated-files": ({"refusals": {"resolve": Answer(401, GATED)}}, "is gated; ask for access"),
    "a/forbidden": ({"refusals": {"": Answer(403)}}, r"answers 403 for a/forbidden; set HF_TOKEN"),
    "a/broken": (
        {"refusals": {"": Answer(500)}},
        "cache holds no whole model of that name, and .* 500; try again later",
    ),
    "a/portal": ({"refusals": {"": Answer(200)}}, "does not answer as a hub"),
    "a/cut": ({"lost_bytes": {"tokenizer.json": 7}}, "could not be downloaded from .*; the same command tries again"),
    "a/cut-whole": ({"lost_bytes": {"model.safetensors": 1}}, "could not be downloaded"),
    "a/cut-weights": ({"lost_bytes": {"model-00002-of-00002.safetensors": 1}}, "could not be downloaded"),
}


def test_what_a_hub_may_answer(tmp_path: Path, folder: Path) -> None:
    whole = write_model_folder(tmp_path / "whole")
    repos = {name: Repo(folder, **changes) for name, (changes, _) in ANSWERS.items()}
    with running(Hub(repos | {"a/cut-whole": Repo(whole, **ANSWERS["a/cut-whole"][0])})) as hub:
        found = fetch(hub.url, tmp_path, *ANSWERS, "a/nothing", "a--b/nothing")
    expected = [says for _, says in ANSWERS.values()] + [
        r"there is no folder a/nothing, and http://\S+ shows no model of that name; check it, or set HF_TOKEN",
        "no model of a hub can have that name",
    ]
    for (is_there, line), says in zip(found, expected, strict=True):
        assert not is_there and re.search(says, line) and "\n" not in line
    held = {str(path.relative_to(tmp_path / "hub")) for path in tmp_path.glob("hub/*/snapshots/*/*")}
    assert any("cut-weights" in path and path.endswith("00001-of-00002.safetensors") for path in held)
    assert not any(path.endswith("00002-of-00002.safetensors") for path in held)
    assert not any("--cut/" in path and path.endswith("tokenizer.json") for path in held)
    # what ended early is not taken for whole where no hub answers
    for is_there, line in fetch(hub.url, tmp_path, "a/cut", "a/gated-files", "a/cut-whole", HF_HUB_OFFLINE="1"):
        assert not is_there and "the cache holds no whole model of that name, and HF_HUB_OFFLINE is set" in line


def test_nobody_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ((_, says),) = fetch(url, tmp_path, NAME, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert "does not answer as a hub (ReadTimeout" in says
    ((_, says),) = fetch(url, tmp_path, NAME)
    assert "does not answer as a hub (ConnectError" in says and "check the network" in says
    ((_, says),) = fetch(url, tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set; unset it" in says


def remove(pattern: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for path in list(folder.rglob(pattern)):
            path.unlink()

    return damage


UNSERVED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a/pickled": (remove("*.safetensors*"), r"has no \*.safetensors, only pytorch_model.bin"),
    "a/no-tokenizer": (remove("tokenizer.json"), "has no tokenizer.json"),
    "a/no-config": (remove("config.json"), "has no config.json"),
    "a/other": (
        lambda folder: write_json(folder / "config.json", tiny_config(architectures=["OtherForCausalLM"])),
        "OtherForCausalLM",
    ),
    "a/large": (lambda folder: None, r"take 1\d{18} bytes more, and \d+ are free at"),
}


def test_what_cannot_be_served_is_refused_before_its_weights_come(tmp_path: Path) -> None:
    repos = {}
    for name, (damage, _) in UNSERVED.items():
        damage(write_repository(tmp_path / name))
        claimed = {"model-00001-of-00002.safetensors": 10**18} if name == "a/large" else {}
        repos[name] = Repo(tmp_path / name, claimed_bytes=claimed)
    with running(Hub(repos)) as hub:
        found = fetch(hub.url, tmp_path, *UNSERVED)
        assert not any(file.endswith((".safetensors", ".bin")) for name in UNSERVED for file in hub.fetched(name))
    for (is_there, line), (_, says) in zip(found, UNSERVED.values(), strict=True):
        assert not is_there and re.search(says, line) and "\n" not in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_download(tmp_path: Path, folder: Path, number: signal.Signals) -> None:
    size = 64 * MIB
    slow = tmp_path / "slow"
    slow.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (slow / file).write_bytes((folder / file).read_bytes())
    (slow / "model.safetensors").write_bytes(bytes(size))
    handlers = (
        "import signal, sys\nfor number in (15, 1): signal.signal(number, lambda number, _: sys.exit(128 + number))"
    )
    with running(Hub({NAME: Repo(slow, seconds_per_mib=0.2)})) as hub:
        command = [sys.executable, "-c", handlers + FETCH, NAME]
        with subprocess.Popen(command, env=environment(hub.url, tmp_path), stderr=subprocess.DEVNULL) as process:
            while hub.num_sent < 2 * MIB:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait(30) == (-number if number is signal.SIGINT else 128 + number)
        assert hub.num_sent < size
    assert list(tmp_path.rglob("*.incomplete")) == []


@pytest.mark.parametrize(("number", "says"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "cannot be written")])
def test_a_cache_that_takes_nothing(monkeypatch: pytest.MonkeyPatch, number: int, says: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(engine.model.hub, "_list_files", fail)
    with pytest.raises(StartupError, match=f"{says}.*HF_HOME"):
        engine.model.hub.fetch(NAME, None)


def test_a_folder_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model_folder(tmp_path / NAME)
    assert open_checkpoint(NAME).name == "tiny.llama"
    with pytest.raises(StartupError, match=f"--revision is given, but {NAME} does not come from a hub; leave it out"):
        open_checkpoint(NAME, "v1")


@pytest.mark.parametrize("model", ["tiny", "a/b/c", "a/", "a/b\n", "ä/b", "a b/c", ""])
def test_what_is_no_name_reaches_no_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.checkpoint.fetch", lambda *_: pytest.fail("asked"))
    with pytest.raises(StartupError, match="is not known.*or ORG/NAME of a model on the Hugging Face hub"):
        open_checkpoint(model)


@pytest.mark.parametrize("model", ["/a/b", "./a", "../a/b"])
def test_a_path_that_leads_nowhere_reaches_no_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.checkpoint.fetch", lambda *_: pytest.fail("asked"))
    with pytest.raises(StartupError, match="there is no such folder.*that the folder is mounted there"):
        open_checkpoint(model)


def test_a_plan_needs_the_description_only(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Hub({NAME: Repo(folder)})) as hub:
        ((is_there, found),) = fetch(hub.url, tmp_path, f"config:{NAME}")
        assert is_there and hub.fetched(NAME) == {"config.json"}
        assert fetch(hub.url, tmp_path, f"config:{NAME}", HF_HUB_OFFLINE="1") == [(True, found)]
    monkeypatch.setattr("engine.study.known_models.fetch_config", lambda name: Path(found))
    model = find_model(NAME)
    assert (model.name, model.max_position) == (NAME, 512)
