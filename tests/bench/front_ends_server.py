"""The server of `bench-front-ends`: `quire serve` whose engine can also be driven without its front ends.

One process for all, because two of the same program differ by more than the front ends cost. Beside the two ports there
are two bare ones, HTTP and gRPC, that do the least that an answer takes: what a client sees there is its own time, its
library's and the sockets'. Prints the bare ports, then answers each line of stdin with one of JSON.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Delta, Event, Finished, Request, SamplingParams
from proto.quire.v1 import inference_pb2 as pb
from server import cli, lifecycle

USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
CHUNKS = (
    {"object": "text_completion", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]},
    {"object": "text_completion", "choices": [], "usage": USAGE},
)
EVENTS = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in CHUNKS) + b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 24\r\n\r\n{"data":[{"id":"bare"}]}'


class Timed:
    """Stands before the engine's `submit`, and knows how long the last request waited there for its first token."""

    def __init__(self, engine: Engine):
        self.seconds = 0.0
        self._submit = engine.submit
        engine.submit = self.submit  # type: ignore[method-assign]

    def submit(self, requests: list[Request], sinks: Sequence[Callable[[Event], None]]) -> None:
        began = time.monotonic()

        def timing(sink: Callable[[Event], None]) -> Callable[[Event], None]:
            is_first = True

            def hear(event: Event) -> None:
                nonlocal is_first
                if is_first and isinstance(event, Delta):
                    is_first = False
                    self.seconds = time.monotonic() - began
                sink(event)

            return hear

        self._submit(requests, [timing(sink) for sink in sinks])


async def generate(engine: Engine, prompts: Sequence[str], num_tokens: int) -> None:
    """Continue all texts at once by `num_tokens` each."""
    heard: asyncio.Queue[Event] = asyncio.Queue()
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        ids = tuple(engine.tokenizer.encode(prompt))
        engine.submit([Request(id=f"driven-{number}", prompt=ids, sampling=sampling)], [heard.put_nowait])
    num_running = len(prompts)
    while num_running:
        num_running -= isinstance(await heard.get(), Finished)


async def bare_http(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await reader.readline():
        length = 0
        while (line := await reader.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        body = await reader.readexactly(length)
        if head.startswith(b"GET"):
            writer.write(MODELS)
        else:
            await generate(engine, [json.loads(body)["prompt"]], 1)
            writer.write(STREAM + b"%x\r\n" % len(EVENTS) + EVENTS + b"\r\n0\r\n\r\n")


class BareGrpc(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, engine: Engine):
        self._engine = engine

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method.endswith("/GetModel"):
            return grpc.unary_unary_rpc_method_handler(self._model)
        return grpc.unary_stream_rpc_method_handler(self._generate)

    async def _model(self, request: bytes, context: Any) -> bytes:
        return pb.GetModelResponse(model="bare").SerializeToString()

    async def _generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await generate(self._engine, [pb.GenerateRequest.FromString(request).text], 1)
        yield pb.GenerateResponse(text="a", token_ids=[1]).SerializeToString()
        yield pb.GenerateResponse(finish=pb.Finish(usage=pb.Usage(generated_tokens=1))).SerializeToString()


async def obey(engine: Engine) -> None:
    """In the event loop of the front ends."""
    timed = Timed(engine)
    http = await asyncio.start_server(lambda *connection: bare_http(engine, *connection), "127.0.0.1", 0)
    grpc_server = grpc.aio.server()
    grpc_server.add_generic_rpc_handlers((BareGrpc(engine),))
    grpc_port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    print(f"bare: http://127.0.0.1:{http.sockets[0].getsockname()[1]} grpc://127.0.0.1:{grpc_port}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if load := json.loads(line):
            await generate(engine, **load)
        print(json.dumps({"engine_seconds": timed.seconds}), flush=True)


def main() -> None:
    load = lifecycle._load_engine
    tasks: list[asyncio.Task[None]] = []  # the loop keeps no hold on them

    def load_and_share(config: EngineConfig, progress: Callable[[int, int], None]) -> Engine:
        engine = load(config, progress)
        tasks.append(asyncio.get_running_loop().create_task(obey(engine)))
        return engine

    lifecycle._load_engine = load_and_share
    sys.exit(cli.main(["serve", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
