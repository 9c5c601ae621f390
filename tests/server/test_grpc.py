"""The gRPC front end: streaming, statuses, cancellation, deadlines, health, and equality with HTTP."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ErrorKind, RequestError
from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1.inference_pb2_grpc import InferenceServiceStub
from server.errors import STATUSES
from server.grpc import GrpcServer, InferenceServicer, server_options
from server.guard import SERVICE_NAME
from tests.fakes import echo_params, fail_after, hang_after
from tests.server.conftest import LIMITS, Running, Web, within

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def ask(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"model": "tiny", "text": "hi", **fields})


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def test_generate_streams_and_finishes_once(running: Running) -> None:
    messages = [message async for message in running.stub.Generate(ask())]
    assert "".join(message.text for message in messages) == "Héllo"
    assert [id for message in messages for id in message.token_ids] == [1, 2, 3, 4]
    assert [message.HasField("finish") for message in messages] == [False] * (len(messages) - 1) + [True]
    finish = messages[-1].finish
    assert finish.reason == pb.FINISH_REASON_STOP and finish.WhichOneof("matched") is None
    assert finish.usage == pb.Usage(prompt_tokens=3, cached_tokens=3, generated_tokens=4)


async def test_length_and_matched_stop(running: Running) -> None:
    messages = [m async for m in running.stub.Generate(ask(sampling=pb.SamplingParams(max_tokens=2)))]
    assert messages[-1].finish.reason == pb.FINISH_REASON_LENGTH
    running.engine.script = echo_params
    messages = [m async for m in running.stub.Generate(ask(sampling=pb.SamplingParams(stop=["END"])))]
    assert messages[-1].finish.stop_string == "END"


async def test_get_model(running: Running) -> None:
    model = await running.stub.GetModel(pb.GetModelRequest())
    assert (model.model, model.max_model_len, model.vocab_size, model.kv_format) == ("tiny", 128, 300, "int4")
    assert (model.page_tokens, model.sink_pages, model.bytes_per_token) == (64, 1, 12.5)


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": 5},
    {"temperature": 0, "seed": 2**64 - 1, "top_k": -1},
    {"stop": ["a", "b"], "stop_token_ids": [5, 6], "ignore_eos": True},
    {"min_p": 0.25, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25, "min_tokens": 3},
    {"logit_bias": {7: 1.5, 299: -100.0}, "logprobs": 3},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("prompt", ["hé", [1, 2, 3]])
async def test_the_engine_gets_the_same_request_over_either_protocol(
    running: Running, web: Web, sampling: dict[str, Any], prompt: Any
) -> None:
    fields = {"text": prompt} if isinstance(prompt, str) else {"token_ids": pb.TokenIds(ids=prompt)}
    message = pb.GenerateRequest(model="tiny", sampling=pb.SamplingParams(**sampling), **fields)
    _ = [m async for m in running.stub.Generate(message)]
    async with httpx.AsyncClient(base_url=web.url) as client:
        await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **sampling})
    ours, theirs = running.engine.requests
    assert ours.prompt == theirs.prompt
    names = [name for name in ours.sampling.__slots__ if name != "seed" or "seed" in sampling]
    assert [getattr(ours.sampling, name) for name in names] == [getattr(theirs.sampling, name) for name in names]


BAD: list[tuple[pb.GenerateRequest, grpc.StatusCode, str, str]] = [
    (ask(sampling=pb.SamplingParams(temperature=3)), grpc.StatusCode.INVALID_ARGUMENT, "temperature", "invalid_value"),
    (ask(sampling=pb.SamplingParams(temperature=float("nan"))), grpc.StatusCode.INVALID_ARGUMENT, "temperature",
     "invalid_value"),
    (ask(sampling=pb.SamplingParams(max_tokens=0)), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens", "invalid_value"),
    (ask(sampling=pb.SamplingParams(stop_token_ids=[300])), grpc.StatusCode.INVALID_ARGUMENT, "stop_token_ids",
     "invalid_value"),
    (pb.GenerateRequest(model="tiny"), grpc.StatusCode.INVALID_ARGUMENT, "prompt", "missing_required_parameter"),
    (ask(token_ids=pb.TokenIds()), grpc.StatusCode.INVALID_ARGUMENT, "prompt", "invalid_value"),
    (ask(token_ids=pb.TokenIds(ids=[300])), grpc.StatusCode.INVALID_ARGUMENT, "prompt", "invalid_value"),
    (ask(text="x" * 500), grpc.StatusCode.INVALID_ARGUMENT, "prompt", "context_length_exceeded"),
    (ask(model="other"), grpc.StatusCode.NOT_FOUND, "model", "model_not_found"),
    (ask(model=""), grpc.StatusCode.INVALID_ARGUMENT, "model", "missing_required_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "status", "param", "code"), BAD)
async def test_bad_requests(
    running: Running, message: pb.GenerateRequest, status: grpc.StatusCode, param: str, code: str
) -> None:
    if message.HasField("token_ids"):
        message.ClearField("text")
    error = await status_of(running.stub.Generate(message))
    metadata = dict(error.trailing_metadata())
    assert (error.code(), metadata["error-param"], metadata["error-code"]) == (status, param, code)
    assert running.engine.requests == []


@pytest.mark.parametrize("kind", ErrorKind)
@pytest.mark.parametrize("deltas", [0, 2])
async def test_every_kind_of_failure_has_its_status(running: Running, kind: ErrorKind, deltas: int) -> None:
    running.engine.script = fail_after(deltas, RequestError(kind, "as told"))
    error = await status_of(running.stub.Generate(ask()))
    assert (error.code(), error.details()) == (STATUSES[kind].grpc, "as told")
    is_retryable = kind in (ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE)
    assert ("grpc-retry-pushback-ms" in dict(error.trailing_metadata())) is is_retryable


async def test_an_unforeseen_exception_is_internal_and_says_nothing(running: Running) -> None:
    def broken(request: Any) -> Any:
        raise KeyError("canary-7421")

    running.engine.submit = broken  # type: ignore[method-assign]
    error = await status_of(running.stub.Generate(ask()))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "canary" not in (error.details() or "")


@pytest.mark.parametrize("deltas", [0, 2])
@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
async def test_leaving_cancels_the_request(running: Running, how: str, deltas: int) -> None:
    running.engine.script = hang_after(deltas)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{running.port}")
    call = InferenceServiceStub(channel).Generate(ask(), timeout=0.5 if how == "deadline" else None)
    text = ""
    while len(text) < 3 * deltas:
        text += (await within(call.read())).text
    reading = asyncio.ensure_future(call.read())
    await within(running.engine.saw_submit.wait())
    if how == "cancel":
        call.cancel()
    elif how == "close":
        await channel.close()
    await within(running.engine.saw_cancel.wait())
    await asyncio.gather(reading, return_exceptions=True)
    if how == "deadline":
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await channel.close()
    assert running.engine.cancelled == [running.engine.requests[0].id]
    await within(running.service.wait_idle())


async def test_a_deadline_that_has_passed_submits_nothing(running: Running) -> None:
    class Aborted(Exception):
        pass

    class Context:
        def time_remaining(self) -> float:
            return 0.0

        def invocation_metadata(self) -> None:
            return None

        async def abort(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
            raise Aborted(code)

    with pytest.raises(Aborted) as caught:
        await InferenceServicer(running.service, LIMITS).Generate(ask(), Context())
    assert caught.value.args == (grpc.StatusCode.DEADLINE_EXCEEDED,)
    assert running.engine.requests == []


async def test_draining_is_unavailable(running: Running) -> None:
    running.service.drain()
    error = await status_of(running.stub.Generate(ask()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_message_over_16_mib_is_refused(running: Running) -> None:
    error = await status_of(running.stub.Generate(ask(text="x" * (16 * 2**20 + 1))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_two_servers_cannot_share_a_port(running: Running) -> None:
    with pytest.raises(RuntimeError, match=str(running.port)):
        GrpcServer(LIMITS).bind(f"127.0.0.1:{running.port}", None)


async def test_health_check_and_watch(running: Running) -> None:
    health = health_pb2_grpc.HealthStub(running.channel)
    for name in ("", SERVICE_NAME):
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert (await within(watch.read())).status == SERVING
    await running.server.set_ready(False)
    assert (await within(watch.read())).status == NOT_SERVING
    await running.server.set_ready(True)
    assert (await within(watch.read())).status == SERVING
    watch.cancel()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_gives_what_a_client_needs(running: Running, version: str) -> None:
    """Both versions have the same messages."""
    ask_reflection = running.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="quire.v1.InferenceService"),
    ]
    listed, described = [answer async for answer in ask_reflection(iter(requests))]
    names = {service.name for service in listed.list_services_response.service}
    assert SERVICE_NAME == "quire.v1.InferenceService"
    assert {SERVICE_NAME, "grpc.health.v1.Health", f"grpc.reflection.{version}.ServerReflection"} <= names
    (file,) = described.file_descriptor_response.file_descriptor_proto
    assert descriptor_pb2.FileDescriptorProto.FromString(file).package == "quire.v1"


@pytest.mark.parametrize("method", ["Generate", "GetModel", "Chat", "Tokenize", "Detokenize", "WatchPool"])
async def test_bytes_that_are_no_message(running: Running, method: str) -> None:
    call = running.channel.unary_stream(f"/{SERVICE_NAME}/{method}")(b"\xff\xff\xff\xff")
    error = await status_of(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "canary" not in (error.details() or "")


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_bytes_that_are_no_message_of_health(running: Running, method: str) -> None:
    error = await status_of(running.channel.unary_stream(f"/grpc.health.v1.Health/{method}")(b"\xff\xff"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: st.text(max_size=10) | st.sampled_from(["tiny", "none", "auto", "user", "{}"]),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_INT32: st.integers(-1, 3) | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 3) | st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
}


def messages(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Any fields of a message, with any values."""
    fields = {}
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (SCALARS[part.type] for part in field.message_type.fields)
            fields[field.name] = st.dictionaries(key, value, max_size=3)
            continue
        value = SCALARS[field.type] if field.message_type is None else messages(field.message_type)
        fields[field.name] = st.lists(value, max_size=3) if field.is_repeated else value
    return st.fixed_dictionaries({}, optional=fields)


@pytest.mark.parametrize("method", ["Generate", "Chat", "Tokenize", "Detokenize"])
async def test_no_field_is_the_servers_fault(running: Running, method: str) -> None:
    """One event loop for all examples: they are drawn first."""
    kind = getattr(pb, f"{method}Request")
    drawn: list[dict[str, Any]] = []

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(messages(kind.DESCRIPTOR))
    def draw(fields: dict[str, Any]) -> None:
        drawn.append(fields | ({"model": "tiny"} if len(drawn) % 4 else {}))

    draw()
    good = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    for fields in drawn:
        call = running.channel.unary_stream(f"/{SERVICE_NAME}/{method}")(kind(**fields).SerializeToString())
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        assert await call.code() in good, (fields, await call.details())
    await within(running.service.wait_idle())


async def test_compressed_messages(running: Running) -> None:
    """A client that compresses: its request is far over the limit only before."""
    text = "x" * 100_000
    call = running.stub.Generate(ask(text=text, model="other"), compression=grpc.Compression.Gzip)
    assert (await status_of(call)).code() is grpc.StatusCode.NOT_FOUND
    call = running.stub.Generate(ask(), compression=grpc.Compression.Deflate)
    assert "".join([message.text async for message in call]) == "Héllo"


async def test_a_refusal_for_now_carries_retry_info(running: Running) -> None:
    running.engine.refusal = RequestError(ErrorKind.OVERLOADED, "many wait", retry_after=2.5)
    error = await status_of(running.stub.Generate(ask()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(error.trailing_metadata() or ())
    assert trailing["grpc-retry-pushback-ms"] == "2500"
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info) and info.retry_delay.ToMilliseconds() == 2500
    assert (status.code, status.message) == (8, "many wait")


async def test_a_client_may_ping_while_it_waits_for_its_first_token() -> None:
    """The bound on pings, scaled from 10 s to 0.5 s, works: a misspelt option is ignored, and kills the call in 4 s."""
    bound = "grpc.http2.min_ping_interval_without_data_ms"
    options = server_options(LIMITS)
    server = grpc.aio.server(options=[(name, 500 if name == bound else value) for name, value in options])

    async def wait(request: bytes, context: Any) -> bytes:
        await asyncio.sleep(5)
        return b"answer"

    handler = grpc.unary_unary_rpc_method_handler(wait)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Test", {"Wait": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pings = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=pings) as channel:
        assert await channel.unary_unary("/test.Test/Wait")(b"") == b"answer"
    await server.stop(0)
