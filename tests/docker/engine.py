"""Docker as a program: what tests say to it, and a service under compose."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCKER = os.environ.get("DOCKER", "docker")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CPU_IMAGE, GPU_IMAGE = (f"quire:{VERSION}-{target}" for target in ("cpu", "gpu"))
LOCKED = ("--read-only", "--user", "12345:0", "--cap-drop", "ALL", "--network", "none")


def docker(*arguments: str | Path, seconds: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([DOCKER, *arguments], capture_output=True, text=True, timeout=seconds)
    assert not check or done.returncode == 0, f"docker {' '.join(map(str, arguments))}: {done.stderr}"
    return done


def has_image(name: str) -> bool:
    return docker("image", "inspect", name, check=False).returncode == 0


def inspect(container: str) -> dict[str, Any]:
    (found,) = json.loads(docker("inspect", container).stdout)
    return dict(found)


def wait_for(what: str, condition: Callable[[], bool], seconds: float) -> float:
    """Returns how long it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)
    return time.monotonic() - begin


def health(container: str) -> str:
    return str(inspect(container)["State"]["Health"]["Status"])


def log(container: str) -> tuple[str, str]:
    """What it wrote to stdout and stderr."""
    done = docker("logs", container)
    return done.stdout, done.stderr


def compose_command() -> list[str]:
    """Compose v2 where the client has it, else Debian's docker-compose."""
    has_plugin = subprocess.run([DOCKER, "compose", "version"], capture_output=True).returncode == 0
    assert has_plugin or shutil.which("docker-compose"), "neither docker compose nor docker-compose is installed"
    return [DOCKER, "compose"] if has_plugin else ["docker-compose"]


@dataclass(frozen=True)
class Service:
    """The folder of compose.yaml after install.sh, with one model."""

    folder: Path
    project: str
    key: str
    http_port: int
    grpc_port: int

    def compose(self, *arguments: str, seconds: float = 180) -> subprocess.CompletedProcess[str]:
        # What the environment says would go before .env.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        command = [*compose_command(), "--profile", "cpu", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done

    @property
    def container(self) -> str:
        return self.compose("ps", "-q", "quire-cpu").stdout.strip()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def wait_healthy(self, seconds: float = 60) -> float:
        return wait_for("healthy", lambda: health(self.container) == "healthy", seconds)

    def seconds_to_ready(self) -> float:
        """From the start of the container to the ready line, by Docker's clock."""
        (line,) = [line for line in docker("logs", "-t", self.container).stdout.splitlines() if " ready: " in line][-1:]
        return (_time(line.split(" ")[0]) - _time(inspect(self.container)["State"]["StartedAt"])).total_seconds()


@contextmanager
def running(folder: Path, *before: str) -> Iterator[Service]:
    """Run install.sh in `folder`, behind the words `before`, and start the service on free ports. All of it is removed
    in the end."""
    command = [*before, str(folder / "install.sh")]
    done = subprocess.run(command, env={**os.environ, "DOCKER": DOCKER}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    key = re.search(r"sk-[0-9a-f]+", done.stdout)
    assert key
    project, ports = f"quire-test-{secrets.token_hex(4)}", (_free_port(), _free_port())
    text = (folder / ".env").read_text().replace("COMPOSE_PROJECT_NAME=quire\n", f"COMPOSE_PROJECT_NAME={project}\n")
    text += f"HTTP_PORT={ports[0]}\nGRPC_PORT={ports[1]}\nQUIRE_MAX_MODEL_LEN=2048\nQUIRE_KV_FORMAT=int4\n"
    (folder / ".env").write_text(text)
    service = Service(folder, project, key[0], *ports)
    try:
        service.compose("up", "-d")
        yield service
    finally:
        service.compose("down", "--volumes", "--timeout", "5")


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _time(stamp: str) -> datetime:
    """In RFC 3339, of which Docker writes nanoseconds."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", stamp))
