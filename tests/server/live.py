"""Both front ends over a tiny random model, all in one process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import httpx
import tokenizers

from engine.chat_template import ChatTemplate
from engine.config import EngineConfig
from engine.engine import Engine
from engine.load import build_engine
from engine.tokenizer import Tokenizer
from server.config import ConnectionLimits, ServerConfig
from server.dialect import Dialect
from server.grpc import GrpcServer
from server.http import build_app
from server.keys import KeyFile
from server.ports import bind_grpc, bind_http
from server.service import Service
from server.web import http_server
from tests.helpers import TINY, RandomCheckpoint

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}. A call is "
    '<tool_call>\\n{"name": a name, "arguments": an object}\\n</tool_call><|im_end|>\\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIMITS = ConnectionLimits(max_connections=1024, request_seconds=60, write_seconds=60)
SPECIALS = ("<|end|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIALS)


@dataclass
class Live:
    """A running server. `http` and `grpc` are its ports."""

    engine: Engine
    service: Service
    http: int
    grpc: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def client(self, **headers: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=60, headers=headers)

    def counted(self, name: str) -> dict[str, float]:
        """A counter's values by reason."""
        samples = [sample for family in self.service.telemetry.collect() for sample in family.samples]
        return {sample.labels["reason"]: sample.value for sample in samples if sample.name == f"quire_{name}_total"}


def chat_tokenizer() -> Tokenizer:
    """A token for each byte, three special ones, and a template in the manner of ChatML."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    return Tokenizer(backend, ChatTemplate(CHATML, {}))


@contextlib.asynccontextmanager
async def serve(
    door: KeyFile | None = None, *, shows_previews: bool = False, is_endless: bool = False, **options: object
) -> AsyncIterator[Live]:
    """`is_endless`: no token ends an answer. `options` are fields of EngineConfig."""
    defaults: dict[str, object] = {
        "model": "tiny", "dtype": "float32", "device": "cpu", "kv_format": "int4", "page_tokens": 32,
        "max_num_seqs": 6, "max_step_tokens": 128, "kv_memory": 16 * 2**20, "poison": True,
    }  # fmt: skip
    config = EngineConfig(**(defaults | options))  # type: ignore[arg-type]
    end = frozenset() if is_endless else frozenset({256})
    model = replace(TINY, vocab_size=VOCAB, eos_token_ids=end, max_position=8192)
    checkpoint = RandomCheckpoint(model)
    engine = build_engine(config, checkpoint, chat_tokenizer(), lambda done, total: None)
    engine.start()
    dialect = Dialect(engine.tokenizer, engine.info)
    await dialect.start()
    service = Service(engine, door, dialect, shows_previews=shows_previews)
    grpc_server = GrpcServer(LIMITS)
    grpc_port = bind_grpc(grpc_server, ServerConfig(grpc_port=0))
    await grpc_server.start(service)
    await grpc_server.set_ready(True)
    server = http_server(build_app(service), LIMITS)
    with bind_http(ServerConfig(http_port=0)) as bound:
        task = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.001)
        try:
            yield Live(engine, service, bound.getsockname()[1], grpc_port)
        finally:
            await asyncio.to_thread(engine.stop)
            server.should_exit = True
            await task
            await grpc_server.stop(0)
            await dialect.close()
