"""GET /: one file that a browser may trust, whoever asks."""

import base64
import hashlib
import re
import zipfile
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from setuptools import build_meta

from server.keys import KeyFile
from server.page import SCRIPTS, STYLE
from server.service import Service
from tests.fakes import FakeEngine

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "server/page"
MAX_BYTES = 64 * 1024
KEY = "0123456789abcdef"


@pytest.fixture
async def service(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Service]:
    """With keys: the page is to be seen without one."""
    (tmp_path / "keys").write_text(f"alice {KEY}\n")
    service = Service(engine, KeyFile(tmp_path / "keys"))  # type: ignore[arg-type]
    yield service
    await service.dialect.close()


class Elements(HTMLParser):
    """Start tags with their attributes, and the text inside `style` and `script`."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"style": [], "script": []}
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.texts:
            self.texts[self._inside].append(data)


async def test_it_needs_no_key_but_what_it_shows_does(client: httpx.AsyncClient) -> None:
    response = await client.get("/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path in ("/v1/pool/map", "/v1/pool/events?map=true", "/v1/models"):
        assert (await client.get(path)).status_code == 401
    assert (await client.get("/v1/pool/map", headers={"authorization": f"Bearer {KEY}"})).status_code == 200
    assert (await client.post("/")).status_code == 405


async def test_its_policy_allows_what_lies_in_it_and_nothing_else(client: httpx.AsyncClient) -> None:
    response = await client.get("/")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["img-src"] == "data:"
    elements = Elements(response.text)
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (text,) = elements.texts[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert set(policy) == {"default-src", "base-uri", "frame-ancestors", "form-action", "connect-src", "img-src",
                           "style-src", "script-src", "require-trusted-types-for"}  # fmt: skip
    for tag, attributes in elements.tags:  # what the policy would block
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


async def test_it_loads_nothing(client: httpx.AsyncClient) -> None:
    response = await client.get("/")
    assert len(response.content) < MAX_BYTES
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"^\s*//.*$", "", response.text, flags=re.MULTILINE))
    for tag, attributes in Elements(response.text).tags:
        for name in {"src", "href", "action", "srcset", "data"} & set(attributes):
            assert attributes[name] in ("data:,", "#main"), (tag, attributes)


async def test_no_text_becomes_html(client: httpx.AsyncClient) -> None:
    """What is shown may be any user's text."""
    (script,) = Elements((await client.get("/")).text).texts["script"]
    assert not re.search(r"(inner|outer|Adjacent)HTML|document\.write|eval\(|new Function|DOMParser|srcdoc", script)


async def test_it_is_sent_once(client: httpx.AsyncClient) -> None:
    response = await client.get("/")
    assert response.headers["cache-control"] == "no-cache"
    again = await client.get("/", headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == response.headers["content-security-policy"]
    assert (await client.get("/", headers={"if-none-match": '"other"'})).status_code == 200


async def test_what_is_named_is_there(client: httpx.AsyncClient) -> None:
    elements = Elements((await client.get("/")).text)
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in elements.tags:
        for name in ("for", "aria-labelledby", "aria-describedby"):
            assert attributes.get(name) in (None, *ids), (tag, attributes)
    (script,) = elements.texts["script"]
    assert set(re.findall(r'(?:byId|setText)\("([\w-]+)"', script)) <= set(ids)
    labelled = {attributes.get("for") for tag, attributes in elements.tags if tag == "label"}
    assert {a["id"] for tag, a in elements.tags if tag in ("input", "textarea", "select")} == labelled


def test_every_file_of_it_is_used_and_short() -> None:
    files = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert set(files) == {STYLE, "index.html", *SCRIPTS}
    assert all(len(text.splitlines()) < 300 for text in files.values())


def test_a_wheel_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built from a copy of what decides on it."""
    (tmp_path / "server").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "server/__init__.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "server/page").mkdir()
    for path in FOLDER.iterdir():
        (tmp_path / "server/page" / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    with zipfile.ZipFile(tmp_path / "out" / build_meta.build_wheel(str(tmp_path / "out"))) as wheel:
        names = {name for name in wheel.namelist() if name.startswith("server/page/")}
    assert names == {f"server/page/{path.name}" for path in FOLDER.iterdir()}
