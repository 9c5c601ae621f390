"""SIGTERM while requests stream over both protocols: they finish, and the process ends well."""

import signal
from pathlib import Path

import grpc

from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.servers import SMALL, Start

NUM_TOKENS = 200


def test_sigterm_lets_streams_finish(start: Start, model_folder: Path) -> None:
    server = start(str(model_folder), *SMALL, "--kv-format", "int4").wait_ready()
    body = {"model": "lively", "prompt": [7] * 20, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    message = pb.GenerateRequest(
        model="lively",
        token_ids=pb.TokenIds(ids=[7] * 20),
        sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    with grpc.insecure_channel(server.grpc) as channel:
        call = InferenceServiceStub(channel).Generate(message, timeout=60)
        first = next(call)
        with server.client.stream(
            "POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.popen.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        messages = [first, *call]
    assert rest[-1] == "data: [DONE]" and f'"completion_tokens":{NUM_TOKENS}' in rest[-2]
    assert messages[-1].finish.usage.generated_tokens == NUM_TOKENS
    code, errors = server.finish()
    assert code == 0 and "Traceback" not in errors
