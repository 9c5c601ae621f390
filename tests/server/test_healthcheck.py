"""`quire healthcheck`: 0 only where the server takes requests, whatever guards its ports, and never a long wait."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from server.admin import build_admin_app
from server.cli import main
from server.commands import healthcheck
from server.service import Service
from tests.server.test_lifecycle import MAIN
from tests.server.test_tls import Files


def ask(port: int) -> int:
    return main(["healthcheck"], {"QUIRE_ADMIN_PORT": str(port)})


def test_ready_behind_keys_and_client_certificates_and_not_when_it_has_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = Files(tmp_path)
    (tmp_path / "keys").write_text("alice 0123456789abcdef\n")
    guards = [
        *("--api-keys", str(tmp_path / "keys"), "--tls-cert", str(files.cert), "--tls-key", str(files.key)),
        *("--tls-client-ca", str(files.client_ca)),
    ]
    arguments = ["slow", "--http-port", "0", "--grpc-port", "0", "--admin-port", "0", *guards]
    with subprocess.Popen([sys.executable, "-c", MAIN, *arguments], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            output = ""
            while not re.search(r"^ready: https:", output, re.MULTILINE):
                output += (line := server.stdout.readline())
                assert line, output
            found = re.search(r"admin\s+http://127\.0\.0\.1:(\d+)", output)
            assert found
            port = int(found[1])
            assert main(["healthcheck", *guards, "--admin-port", str(port)], {}) == 0
            assert capsys.readouterr().out == "ready\n"
            server.send_signal(signal.SIGTERM)
            assert server.wait(10) == 0
        finally:
            server.kill()
    assert ask(port) == 1
    assert capsys.readouterr().err.startswith(f"quire: nothing listens on port {port} yet")


async def test_the_route_says_no_while_the_server_drains(service: Service) -> None:
    transport = httpx.ASGITransport(build_admin_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
        assert (await admin.get("/ready")).json() == {"status": "ready"}
        service.drain()
        assert (await admin.get("/ready")).status_code == 503


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "the server on port {port} answers 503"),
        (b"220 mail.example ready\r\n", "port {port} does not answer as a server does"),
        (b"", "port {port} does not answer as a server does"),
    ],
)
def test_other_answers_are_one_line(answer: bytes, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def reply() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        port = listening.getsockname()[1]
        assert ask(port) == 1
        thread.join(10)
    error = capsys.readouterr().err
    assert says.format(port=port) in error and error.count("\n") == 1


def test_a_server_that_hangs_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(healthcheck, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # connects, and nobody reads
        begin = time.monotonic()
        assert ask(listening.getsockname()[1]) == 1
    assert time.monotonic() - begin < 5
    assert "has not answered for 0.2 s" in capsys.readouterr().err


def test_a_server_that_talks_for_ever_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A byte now and then, never a line: each comes within the bound, all together do not."""
    monkeypatch.setattr(healthcheck, "SECONDS", 0.5)
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                while not done.wait(0.05):
                    connection.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        begin = time.monotonic()
        assert ask(listening.getsockname()[1]) == 1
        took = time.monotonic() - begin
        done.set()
        thread.join(10)
    assert took < 5 and "has not answered for 0.5 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "--admin-port is not set"),
        ({"QUIRE_ADMIN_PORT": "0"}, "--admin-port is 0"),
        ({"QUIRE_ADMIN_PORT": "many"}, "QUIRE_ADMIN_PORT is 'many'; it must be a whole number"),
    ],
)
def test_a_port_that_cannot_be_asked_is_one_line_and_not_code_2(
    environ: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["healthcheck"], environ) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"quire: {says}") and error.count("\n") == 1
