"""A client of `quire.v1.InferenceService`."""

from collections.abc import Callable
from typing import Any

import grpc

from engine.errors import StartupError
from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1 import inference_pb2_grpc as pb_grpc
from server.bench.client import ClientOptions
from server.bench.endpoints import Prompt
from server.bench.recording import Recording, RequestFailed, TokenUsage

CONNECT_SECONDS = 10.0


class GrpcClient:
    """Build it inside the event loop that will run it. `url` is grpc://host:port or, with TLS, grpcs://host:port; all
    calls share one connection."""

    def __init__(self, url: str, clock: Callable[[], float], options: ClientOptions):
        self._url = url
        self._clock = clock
        self._given_model = options.model
        self._ignore_eos = options.ignore_eos
        self._options: dict[str, Any] = {
            "timeout": options.timeout,
            "metadata": (("authorization", f"Bearer {options.api_key}"),) if options.api_key else (),
        }
        scheme, _, address = url.partition("://")
        if scheme == "grpcs":
            roots = None if options.ca is None else options.ca.encode()
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots))
        else:
            self._channel = grpc.aio.insecure_channel(address)
        self._stub = pb_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    @property
    def model(self) -> str:
        assert self._given_model is not None, "connect comes first"
        return self._given_model

    async def connect(self) -> None:
        try:
            info = await self._stub.GetModel(pb.GetModelRequest(), **self._options | {"timeout": CONNECT_SECONDS})
        except grpc.aio.AioRpcError as error:
            details = " ".join((error.details() or "").split())
            raise StartupError(
                f"--url {self._url}: no answer over gRPC ({error.code().name} {details}); is Quire running there?"
            ) from None
        self._given_model = self._given_model or info.model

    async def generate(self, prompt: Prompt, recording: Recording) -> None:
        assert isinstance(prompt.content, str), "Generate takes text"
        sampling = pb.SamplingParams(temperature=0, max_tokens=prompt.max_tokens, ignore_eos=self._ignore_eos)
        request = pb.GenerateRequest(model=self.model, text=prompt.content, sampling=sampling)
        is_finished = False
        recording.send(self._clock())
        try:
            async for message in self._stub.Generate(request, **self._options):
                recording.last = now = self._clock()
                if message.text or message.token_ids:
                    recording.add(now, len(message.token_ids))
                if message.HasField("finish"):
                    recording.usage = _usage(message.finish.usage)
                    is_finished = True
        except grpc.aio.AioRpcError as error:
            recording.last = self._clock()
            raise RequestFailed(f"gRPC {error.code().name}", error.details() or "") from None
        if not is_finished:
            raise RequestFailed("the stream ended without finish")

    async def count_tokens(self, text: str) -> int | None:
        return None

    async def close(self) -> None:
        await self._channel.close()


def _usage(usage: pb.Usage) -> TokenUsage:
    return TokenUsage(usage.prompt_tokens, usage.generated_tokens, usage.cached_tokens)
