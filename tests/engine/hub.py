"""A small hub on the loopback that serves model folders, and what a process of its own finds there."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FETCH = """
import json, sys
from engine.errors import StartupError
from engine.model.hub import fetch, fetch_config
found = []
for model in sys.argv[1:]:
    word, _, text = model.rpartition(":")
    name, _, revision = text.partition("@")
    try:
        found.append([True, str((fetch_config if word else fetch)(name, revision or None))])
    except StartupError as error:
        found.append([False, str(error)])
print(json.dumps(found))
"""
MIB = 2**20
OWN = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_")


@dataclass(frozen=True)
class Answer:
    """A status without a body; `headers` say what a hub means by it."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Repo:
    """A model at the hub. `refusals`: what it answers to paths with a part in them.

    `claimed_bytes`: what the listing says of a file instead of its size; `lost_bytes`: how many at the end of a file do
    not come; `seconds_per_mib`: how slowly files do.
    """

    folder: Path
    refusals: Mapping[str, Answer] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main", COMMIT)
    claimed_bytes: Mapping[str, int] = field(default_factory=dict)
    lost_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds_per_mib: float = 0

    def answer(self, method: str, kind: str, rest: list[str]) -> tuple[Answer, bytes]:
        """`rest`: of a path of the API, behind the model's name; of a file, behind the commit."""
        path = "/".join((kind, *rest))
        for part, refusal in self.refusals.items():
            if part in path:
                return refusal, b""
        if kind == "api":
            return self._describe(rest)
        file = self.folder.joinpath(*rest)
        if not file.is_file():
            return Answer(404, {"X-Error-Code": "EntryNotFound"}), b""
        body = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        lost = 0 if method == "HEAD" else self.lost_bytes.get(file.name, 0)
        return Answer(200, headers), body[: len(body) - lost]

    def _describe(self, rest: list[str]) -> tuple[Answer, bytes]:
        if len(rest) > 1 and rest[1] not in self.revisions:
            return Answer(404, {"X-Error-Code": "RevisionNotFound"}), b""
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        sizes = {str(path.relative_to(self.folder)): path.stat().st_size for path in paths} | dict(self.claimed_bytes)
        found: object
        if rest[:1] == ["tree"]:
            found = [{"type": "file", "path": file, "size": size, "oid": "0" * 40} for file, size in sizes.items()]
        else:
            siblings = [{"rfilename": file, "size": size} for file, size in sizes.items()]
            found = {"id": "some/model", "sha": COMMIT, "siblings": siblings}
        return Answer(200, {"Content-Type": "application/json"}), json.dumps(found).encode()


@dataclass
class Hub:
    """`asked`: method and path of each request, in order of arrival; `tokens`: what they were authorized with;
    `num_sent`: bytes of bodies."""

    repos: Mapping[str, Repo]
    asked: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    num_sent: int = 0
    url: str = ""

    def fetched(self, name: str) -> set[str]:
        """The files of which a body was asked for."""
        start = f"/{name}/resolve/{COMMIT}/"
        return {path.removeprefix(start) for method, path in self.asked if method == "GET" and path.startswith(start)}

    def pace(self, path: str) -> float:
        repo = self.repos.get("/".join(path.split("/")[1:3]))
        return 0 if repo is None else repo.seconds_per_mib

    def answer(self, method: str, path: str) -> tuple[Answer, bytes]:
        parts = unquote(path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, kind, rest = "/".join(parts[2:4]), "api", parts[4:]
        else:
            name, kind, rest = "/".join(parts[:2]), "resolve", parts[4:]
        if name not in self.repos:
            return Answer(401, {"X-Error-Code": "RepoNotFound"}), b""
        return self.repos[name].answer(method, kind, rest)


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.asked.append((self.command, path))
            hub.tokens.add(self.headers["Authorization"])
            answer, body = hub.answer(self.command, path)
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self._send(body, hub.pace(path))

        do_HEAD = do_GET

        def _send(self, body: bytes, seconds_per_mib: float) -> None:
            with suppress(ConnectionError):  # whoever has seen enough
                for start in range(0, len(body), MIB):
                    self.wfile.write(body[start : start + MIB])
                    hub.num_sent += len(body[start : start + MIB])
                    time.sleep(seconds_per_mib)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def environment(url: str, home: Path, **more: str) -> dict[str, str]:
    """For a process that knows no other hub and no other cache."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    return others | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | more


def fetch(url: str, home: Path, *models: str, **more: str) -> list[tuple[bool, str]]:
    """For each NAME, or NAME@REVISION, whether `engine.model.hub.fetch` brings it, and the folder or the error. With
    `config:` in front it is `fetch_config`."""
    done = subprocess.run(
        [sys.executable, "-c", FETCH, *models],
        env=environment(url, home, **more),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return [(is_there, text) for is_there, text in json.loads(done.stdout)]
