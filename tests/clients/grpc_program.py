"""A client made from inference.proto alone: `python grpc_program.py SETTINGS`, where only grpcio, grpcio-tools and
protobuf are installed. The proto lies in quire/v1 of the working directory. Prints what it was told, as JSON."""

import importlib
import json
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
from grpc_tools import protoc

PROTO = "quire/v1/inference.proto"
PROMPT = "The capital of France is"
QUESTION = "What is the capital of France?"
SERVING = b"\x08\x01"  # HealthCheckResponse: field 1, a varint, is 1
SERVICE = b"quire.v1.InferenceService"


def generate_stub() -> tuple[Any, Any]:
    """The two modules that protoc writes."""
    assert find_spec("engine") is None and find_spec("server") is None and find_spec("proto") is None
    assert protoc.main(["protoc", "-I.", "--python_out=.", "--grpc_python_out=.", PROTO]) == 0
    sys.path.insert(0, str(Path.cwd()))
    name = PROTO.removesuffix(".proto").replace("/", ".")
    return importlib.import_module(f"{name}_pb2"), importlib.import_module(f"{name}_pb2_grpc")


def text_of(messages: Iterable[Any], reason: int) -> str:
    """The text of a call with one index; only its last message says why it ended."""
    messages = list(messages)
    assert [message.HasField("finish") for message in messages] == [False] * (len(messages) - 1) + [True]
    finish = messages[-1].finish
    assert finish.reason == reason, finish
    assert sum(len(message.token_ids) for message in messages) == finish.usage.generated_tokens
    return "".join(message.text for message in messages)


def status_of(call: Callable[[], Any]) -> grpc.StatusCode:
    try:
        call()
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return error.code()
    return grpc.StatusCode.OK


def check_health(channel: grpc.Channel) -> None:
    """Messages written by hand: the health proto is not at hand."""
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    named = b"\x0a" + bytes([len(SERVICE)]) + SERVICE  # HealthCheckRequest: field 1, a string
    assert check(b"", timeout=10) == check(named, timeout=10) == SERVING
    assert status_of(lambda: check(b"\x0a\x05other", timeout=10)) is grpc.StatusCode.NOT_FOUND
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(named, timeout=20)
    assert next(watch) == SERVING
    assert watch.cancel() and watch.code() is grpc.StatusCode.CANCELLED


def wait_until_idle(stub: Any, pb: Any) -> None:
    """The pool is watched until nothing runs."""
    watch = stub.WatchPool(pb.WatchPoolRequest(interval_ms=100), timeout=10)
    assert any(seen.running == 0 for seen in watch)
    watch.cancel()


def main(address: str, model: str) -> dict[str, Any]:
    pb, services = generate_stub()
    with grpc.insecure_channel(address) as channel:
        stub = services.InferenceServiceStub(channel)
        info = stub.GetModel(pb.GetModelRequest(), timeout=10)
        assert info.model == model and info.max_num_seqs == 4 and info.bytes_per_token > 0
        check_health(channel)

        six = pb.SamplingParams(temperature=0, max_tokens=6)
        ids = stub.Tokenize(pb.TokenizeRequest(model=model, text=PROMPT), timeout=10).token_ids
        assert stub.Detokenize(pb.DetokenizeRequest(model=model, token_ids=ids), timeout=10).text == PROMPT
        by_text = pb.GenerateRequest(model=model, text=PROMPT, sampling=six)
        by_ids = pb.GenerateRequest(model=model, token_ids=pb.TokenIds(ids=ids), sampling=six)
        generated = text_of(stub.Generate(by_text, timeout=60), pb.FINISH_REASON_LENGTH)
        assert text_of(stub.Generate(by_ids, timeout=60), pb.FINISH_REASON_LENGTH) == generated
        message = pb.ChatMessage(role="user", content=QUESTION)
        greedy = pb.SamplingParams(temperature=0)
        chat = stub.Chat(pb.ChatRequest(model=model, messages=[message], sampling=greedy), timeout=60)
        answered = text_of(chat, pb.FINISH_REASON_STOP)

        watch = stub.WatchPool(pb.WatchPoolRequest(interval_ms=100), timeout=20)
        for seen in (next(watch), next(watch), next(watch)):
            assert {tier.name for tier in seen.tiers} >= {"sealed", "open"}
            assert all(sum(state.pages for state in tier.states) == tier.total_pages for tier in seen.tiers)
        watch.cancel()

        endless = pb.GenerateRequest(
            model=model,
            text=PROMPT,
            kv_shrink="streaming:recent=2",
            sampling=pb.SamplingParams(max_tokens=1_000_000, ignore_eos=True),
        )
        late = stub.Generate(endless, timeout=1)
        assert status_of(lambda: list(late)) is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until_idle(stub, pb)
        left = stub.Generate(endless)
        next(left)
        assert left.cancel() and left.code() is grpc.StatusCode.CANCELLED
        wait_until_idle(stub, pb)
        other = pb.GenerateRequest(model="other", text=PROMPT)
        assert status_of(lambda: list(stub.Generate(other, timeout=10))) is grpc.StatusCode.NOT_FOUND
    return {"version": grpc.__version__, "ids": list(ids), "generated": generated, "answered": answered}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
