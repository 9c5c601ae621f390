"""What the README promises of the demo model: the curl, the openai client, the generated gRPC stub."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import pytest

from engine.model.demo_checkpoint import DEMO_NAME
from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.servers import Server, servers

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
QUESTION = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = "--kv-format int4 --device cpu --max-model-len 1024 --max-num-seqs 4 --http-port 0 --grpc-port 0"
    with servers() as start:
        yield start(DEMO_NAME, *options.split()).wait_ready()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_the_curl_of_the_readme_answers_with_paris(server: Server) -> None:
    command = re.search(r"^curl -N http://127\.0\.0\.1:8000(\S+) .*?-d '(.*?)'$", README, re.DOTALL | re.MULTILINE)
    assert command
    headers = {"content-type": "application/json"}
    with server.client.stream("POST", command[1], content=command[2], headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "Paris" in "".join(texts)
    assert len([text for text in texts if text]) > 3  # it came in pieces
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_python_examples_of_the_readme_run_as_pasted(server: Server) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert len(examples) == 2
    for example in examples:
        for address, ours in (("http://127.0.0.1:8000", server.http), ("127.0.0.1:50051", server.grpc)):
            example = example.replace(address, ours)
        result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert result.returncode == 0, result.stderr
        assert "Paris" in result.stdout


def test_openai_client_with_and_without_a_stream(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEMO_NAME]
    fields = {"model": DEMO_NAME, "messages": [QUESTION], "temperature": 0}
    whole = client.chat.completions.create(**fields).choices[0].message.content
    assert whole and "Paris" in whole
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_openai_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=DEMO_NAME, messages=[QUESTION], temperature=0, stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "".join(deltas)
    assert "Paris" in "".join(deltas) and final.choices[0].finish_reason == "stop"
    assert final.usage and final.usage.completion_tokens >= len(deltas)


def test_openai_completion(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model=DEMO_NAME, prompt="The capital of France is", max_tokens=5, temperature=0
    )
    assert "Paris" in completion.choices[0].text
    assert completion.usage and completion.usage.completion_tokens == 5


def test_the_generated_stub_streams(server: Server) -> None:
    request = pb.GenerateRequest(
        model=DEMO_NAME, text="The capital of France is", sampling=pb.SamplingParams(temperature=0, max_tokens=8)
    )
    with grpc.insecure_channel(server.grpc) as channel:
        stub = InferenceServiceStub(channel)
        assert stub.GetModel(pb.GetModelRequest(), timeout=10).model == DEMO_NAME
        messages = list(stub.Generate(request, timeout=60))
    assert "Paris" in "".join(message.text for message in messages)
    assert [len(message.token_ids) for message in messages] == [1] * 8 + [0]
    assert messages[-1].finish.reason == pb.FINISH_REASON_LENGTH
