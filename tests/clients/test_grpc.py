"""A client that has nothing but inference.proto says what HTTP says."""

import json
import shutil
from pathlib import Path

import pytest

from engine.model.demo_checkpoint import DEMO_NAME
from tests.clients import grpc_program
from tests.clients.environments import Environments, run
from tests.e2e.servers import Server

pytestmark = pytest.mark.clients
PROGRAM = Path(__file__).parent / "grpc_program.py"
PROTO = Path(__file__).parents[2] / "proto" / grpc_program.PROTO


def test_a_client_made_from_the_proto_alone(environments: Environments, server: Server, tmp_path: Path) -> None:
    python = environments.python("grpc", "grpcio>=1.80", "grpcio-tools>=1.80", "protobuf>=6.31")
    copy = tmp_path / grpc_program.PROTO
    copy.parent.mkdir(parents=True)
    shutil.copy(PROTO, copy)
    told = json.loads(run(python, PROGRAM, json.dumps({"address": server.grpc, "model": DEMO_NAME}), cwd=tmp_path))

    def post(path: str, **fields: object) -> dict[str, object]:
        response = server.client.post(path, json={"model": DEMO_NAME, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    greedy = {"temperature": 0, "max_tokens": 6}
    assert post("/tokenize", prompt=grpc_program.PROMPT)["tokens"] == told["ids"]
    completion = post("/v1/completions", prompt=grpc_program.PROMPT, **greedy)
    assert completion["choices"][0]["text"] == told["generated"] and "Paris" in told["generated"]
    question = {"role": "user", "content": grpc_program.QUESTION}
    chat = post("/v1/chat/completions", messages=[question], temperature=0)
    assert chat["choices"][0]["message"]["content"] == told["answered"]
