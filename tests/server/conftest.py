"""A running server over a fake engine, on free ports of the loopback."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import openai
import pytest

from proto.quire.v1 import inference_pb2_grpc as pb_grpc
from server.config import ConnectionLimits, ServerConfig
from server.grpc import GrpcServer
from server.http import build_app
from server.ports import bind_grpc, bind_http
from server.service import Service
from server.web import http_server
from tests.fakes import FakeEngine

LIMITS = ConnectionLimits(max_connections=64, request_seconds=60, write_seconds=60)


@dataclass
class Running:
    """A gRPC server and a channel to it."""

    engine: FakeEngine
    service: Service
    server: GrpcServer
    port: int
    channel: grpc.aio.Channel

    @property
    def stub(self) -> pb_grpc.InferenceServiceStub:
        return pb_grpc.InferenceServiceStub(self.channel)


@dataclass
class Web:
    """An HTTP server."""

    engine: FakeEngine
    service: Service
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def service(engine: FakeEngine) -> AsyncIterator[Service]:
    service = Service(engine)  # type: ignore[arg-type]
    yield service
    await service.dialect.close()


@pytest.fixture
async def running(engine: FakeEngine, service: Service, limits: ConnectionLimits) -> AsyncIterator[Running]:
    server = GrpcServer(limits)
    port = bind_grpc(server, ServerConfig(grpc_port=0))
    await server.start(service)
    await server.set_ready(True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Running(engine, service, server, port, channel)
    await server.stop(0)


@pytest.fixture
def limits() -> ConnectionLimits:
    return LIMITS


@pytest.fixture
async def web(engine: FakeEngine, service: Service, limits: ConnectionLimits) -> AsyncIterator[Web]:
    server = http_server(build_app(service), limits)
    with bind_http(ServerConfig(http_port=0)) as socket:
        task = asyncio.create_task(server.serve(sockets=[socket]))
        while not server.started:  # it listens only then
            assert not task.done()
            await asyncio.sleep(0.001)
        yield Web(engine, service, socket.getsockname()[1])
        engine.stop()
        server.should_exit = True
        await task


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """Speaks to the application directly; an unforeseen exception fails the test."""
    transport = httpx.ASGITransport(build_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://quire") as client:
        yield client


async def within(awaitable: Any, seconds: float = 5) -> Any:
    """Wait for something that must happen, and fail instead of hanging when it does not."""
    return await asyncio.wait_for(awaitable, seconds)
