"""The gRPC front end: `quire.v1.InferenceService`, health and reflection."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from engine.errors import ErrorKind, RequestError, invalid
from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1 import inference_pb2_grpc as pb_grpc
from server.config import ConnectionLimits
from server.convert import ChatWriter, read_ask, read_chat, read_messages, write_event, write_model, write_pool
from server.errors import abort, internal
from server.guard import SERVICE_NAME, GrpcGuard, GrpcReader, tenant_of
from server.messages import parse_messages
from server.pool import check_interval
from server.record import SLOW_READER, Caller, request_id
from server.service import Generation, Service
from server.tokens import detokenize, tokenize_chat, tokenize_text

log = logging.getLogger(__name__)

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


def server_options(limits: ConnectionLimits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", 16 * 2**20),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", int(limits.request_seconds * 1000)),
        # Two servers on one port would share it silently.
        ("grpc.so_reuseport", 0),
        # Find dead peers, and let clients ping every 10 s even while they wait for a long prefill.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Writes to the call instead of yielding, so that a cancelled call raises here and not in a suspended generator."""

    def __init__(self, service: Service, limits: ConnectionLimits):
        self._service = service
        self._limits = limits

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with self._generation(context) as generation:
            ask = read_ask(request)
            forks = await self._service.forks(ask, f"grpc-{uuid.uuid4().hex}", generation.record)
            generation.submit(forks)
            async for index, event in generation.events():
                await self._write(context, write_event(index, event))

    async def Chat(self, request: pb.ChatRequest, context: grpc.aio.ServicerContext) -> None:
        async with self._generation(context) as generation:
            ask = read_chat(request)
            forks = await self._service.forks(ask, f"grpc-{uuid.uuid4().hex}", generation.record)
            writers = [ChatWriter(index, self._service.dialect.parser(ask)) for index in range(ask.num_choices)]
            generation.submit(forks)
            async for index, event in generation.events():
                for message in writers[index].write(event):
                    await self._write(context, message)

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        async with _errors_as_status(context):
            self._service.check_model(request.model)
            match request.WhichOneof("input"):
                case "text":
                    special = not request.HasField("add_special_tokens") or request.add_special_tokens
                    ids = await tokenize_text(self._service, request.text, add_special_tokens=special)
                case "conversation":
                    raw = read_messages(request.conversation.messages)
                    ids = await tokenize_chat(self._service, parse_messages(raw))
                case _:
                    raise invalid("input is required: text or conversation", "input", "missing_required_parameter")
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._service.engine.info.max_model_len)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        async with _errors_as_status(context):
            self._service.check_model(request.model)
            text = await detokenize(self._service, list(request.token_ids), "token_ids")
        return pb.DetokenizeResponse(text=text)

    @asynccontextmanager
    async def _generation(self, context: grpc.aio.ServicerContext) -> AsyncIterator[Generation]:
        async with _errors_as_status(context):
            caller = _caller(self._service, context)
            with self._service.generation(caller) as generation:
                if caller.deadline is not None and caller.deadline <= time.monotonic():
                    raise RequestError(ErrorKind.DEADLINE, "the deadline passed before the request was read")
                yield generation

    async def _write(self, context: grpc.aio.ServicerContext, message: Any) -> None:
        """Raises RequestError where the client takes nothing for too long."""
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                await context.write(message)
        except TimeoutError:
            seconds = self._limits.write_seconds
            why = f"nothing of the answer was read for {seconds:g} s; read it as it comes"
            raise RequestError(ErrorKind.OVERLOADED, why, code=SLOW_READER) from None

    async def WatchPool(self, request: pb.WatchPoolRequest, context: grpc.aio.ServicerContext) -> None:
        async with _errors_as_status(context):
            interval = check_interval(request.interval_ms if request.HasField("interval_ms") else None)
            snapshots = self._service.pool_watch.snapshots(
                interval, lambda: tenant_of(self._service, context.invocation_metadata())
            )
            async for snapshot in snapshots:
                await self._write(context, write_pool(snapshot))

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        return write_model(self._service.engine.info)


def _caller(service: Service, context: grpc.aio.ServicerContext) -> Caller:
    """Raises RequestError where the key is not known."""
    metadata = context.invocation_metadata() or ()
    values = {name: value for name, value in metadata if isinstance(value, str)}
    left = context.time_remaining()
    return Caller(
        "grpc",
        tenant_of(service, metadata),
        request_id(values.get("x-request-id")),
        values.get("traceparent"),
        None if left is None else time.monotonic() + left,
    )


@asynccontextmanager
async def _errors_as_status(context: Any) -> AsyncIterator[None]:
    """End the call with the status of what was raised; anything unforeseen is INTERNAL, never UNKNOWN."""
    try:
        yield
    except RequestError as error:
        refusal = error
    except Exception:
        log.exception("a call failed")
        refusal = internal()
    else:
        return
    await abort(context, refusal)


def _add_reflection(server: grpc.aio.Server) -> None:
    """Under both of its names: the messages of v1 are those of v1alpha, for which there is a library."""
    names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1)
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (reflection.SERVICE_NAME, REFLECTION_V1):
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}),)
        )


class GrpcServer:
    """A server with its health. Build it inside the event loop that will run it."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._guard = GrpcGuard()
        self._server = grpc.aio.server(options=server_options(limits), interceptors=(self._guard, GrpcReader()))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        _add_reflection(self._server)

    def bind(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Take a port, `host:port`, and return its number. Raises RuntimeError if that is not possible."""
        if credentials is None:
            port: int = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        if port == 0:
            raise RuntimeError("gRPC could not take it")
        return port

    async def start(self, service: Service) -> None:
        """Begin to answer; health says NOT_SERVING until `set_ready`."""
        self._guard.service = service
        servicer = InferenceServicer(service, self._limits)
        pb_grpc.add_InferenceServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        await self.set_ready(False)
        await self._server.start()

    async def set_ready(self, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace_seconds: float) -> None:
        await self._server.stop(grace_seconds)
