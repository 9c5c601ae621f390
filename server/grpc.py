"""The gRPC front end: `quire.v1.InferenceService`, health and reflection."""

import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.errors import ErrorKind, RequestError
from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1 import inference_pb2_grpc as pb_grpc
from server.convert import read_fields, read_prompt, write_event, write_model
from server.errors import STATUSES, grpc_metadata, internal
from server.openai import DEFAULT_MAX_TOKENS
from server.service import Service

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

OPTIONS = (
    ("grpc.max_receive_message_length", 16 * 2**20),
    # Two servers on one port would share it silently.
    ("grpc.so_reuseport", 0),
    # Find dead peers, and let clients ping every 10 s even while they wait for a long prefill.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Writes to the call instead of yielding, so that a cancelled call raises here and not in a suspended generator."""

    def __init__(self, service: Service):
        self._service = service

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with _errors_as_status(context), self._service.generation() as generation:
            left = context.time_remaining()
            if left is not None and left <= 0:
                raise RequestError(ErrorKind.DEADLINE, "the deadline passed before the request was read")
            self._service.check_model(request.model)
            forks = await self._service.forks(
                [read_prompt(request)],
                read_fields(request),
                id=f"grpc-{uuid.uuid4().hex}",
                prompt_param="prompt",
                default_max_tokens=DEFAULT_MAX_TOKENS,
            )
            generation.submit(forks)
            async for index, event in generation.events():
                await context.write(write_event(index, event))

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        return write_model(self._service.engine.info)


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
    await context.abort(STATUSES[refusal.kind].grpc, refusal.message, grpc_metadata(refusal))


class GrpcServer:
    """A server with its health. Build it inside the event loop that will run it."""

    def __init__(self) -> None:
        self._server = grpc.aio.server(options=OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def bind(self, address: str) -> int:
        """Take a port, `host:port`, and return its number. Raises RuntimeError if that is not possible."""
        port: int = self._server.add_insecure_port(address)
        return port

    async def start(self, service: Service) -> None:
        """Begin to answer; health says NOT_SERVING until `set_ready`."""
        servicer = InferenceServicer(service)
        pb_grpc.add_InferenceServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        await self.set_ready(False)
        await self._server.start()

    async def set_ready(self, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace_seconds: float) -> None:
        await self._server.stop(grace_seconds)
