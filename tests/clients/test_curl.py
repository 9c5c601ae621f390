"""curl, as the README calls it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.servers import Server

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]
README = (Path(__file__).parents[2] / "README.md").read_text()


def readme_command(server: Server) -> str:
    """The first example, with our server's address in it."""
    example = re.search(r"^```\n(curl -N .*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert example and example[1].count("http://127.0.0.1:8000") == 1
    return example[1].replace("http://127.0.0.1:8000", server.http)


def test_the_example_of_the_readme_streams_data_lines_and_nothing_else(server: Server) -> None:
    result = subprocess.run(["sh", "-c", readme_command(server)], capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr
    *events, rest = result.stdout.split(b"\n\n")
    assert rest == b"" and events.pop() == b"data: [DONE]"
    assert all(re.fullmatch(rb"data: \{[^\r\n]*\}", event) for event in events)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert "Paris" in "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


def test_pieces_come_one_by_one(server: Server) -> None:
    """curl hands on what it gets at once (-N), so the first event is there long before the last is made."""
    command = readme_command(server).replace('"stream":true', '"stream":true,"ignore_eos":true,"max_tokens":900')
    with subprocess.Popen(["sh", "-c", f"exec {command}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as curl:
        assert curl.stdout
        assert curl.stdout.readline().startswith(b"data: {")
        assert curl.stdout.readline() == b"\n"
        assert curl.poll() is None
        assert server.client.get("/v1/pool").json()["requests"]["running"] == 1
        curl.kill()


def test_a_refusal_has_its_status_its_id_and_one_object(server: Server) -> None:
    command = ["curl", "-s", "-i", f"{server.http}/v1/completions", "-H", "x-request-id: mine-1", "-d", '{"model": 1}']
    head, _, body = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.partition("\n\n")
    assert head.startswith("HTTP/1.1 400 ") and "x-request-id: mine-1" in head
    assert list(json.loads(body)["error"]) == ["message", "type", "param", "code"]
