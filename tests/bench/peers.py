"""`make bench-peers`: the demo model in Quire, vLLM's CPU build and llama.cpp's server, all asked by `quire bench`.

QUIRE_VLLM_PYTHON is a Python that has vLLM, QUIRE_LLAMA_SERVER the path of llama-server; a peer that is not named is
left out. QUIRE_VLLM_ARGS are more options for vLLM. All servers are up at once; those that are not asked are stopped by
a signal meanwhile. The last line is one JSON object.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from engine.model.demo_checkpoint import DEMO_NAME, demo_file
from tests.bench.front_ends import turn
from tests.bench.pool import machine
from tests.docker.model import write_demo_folder

MAX_SEQUENCES = 8
MAX_MODEL_LEN = 8192
START_SECONDS = 300
OURS = ("int4", "int8", "native")
CACHE_TYPES = ("f16", "q8_0", "q4_0")
OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Contender:
    """`command` without the option for the port."""

    name: str
    command: Sequence[str]
    port_option: str
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests at the same time, tokens of their prompts. `is_prefill`: time to the first token counts, else what comes
    behind it, of prompts that the server has in its cache."""

    num_requests: int
    num_tokens: int
    is_prefill: bool

    def __str__(self) -> str:
        return f"{'prefill' if self.is_prefill else 'decode'} {self.num_requests} x {self.num_tokens}"


WORKLOADS = (
    Workload(1, 512, True),
    Workload(1, 4000, True),
    Workload(1, 512, False),
    Workload(8, 512, False),
    Workload(8, 4000, False),
)


def contenders(folder: Path) -> list[Contender]:
    quire = (sys.executable, "-m", "server.cli", "serve", DEMO_NAME, "--grpc-port", "0", "--max-num-seqs")
    limits = (str(MAX_SEQUENCES), "--max-model-len", str(MAX_MODEL_LEN), "--log-level", "warning", "--kv-format")
    found = [Contender(f"Quire {recipe}", (*quire, *limits, recipe), "--http-port") for recipe in OURS]
    if python := os.environ.get("QUIRE_VLLM_PYTHON"):
        options = ("--model", str(write_demo_folder(folder)), "--max-model-len", str(MAX_MODEL_LEN))
        command = (python, "-m", "vllm.entrypoints.openai.api_server", *options, "--max-num-seqs", str(MAX_SEQUENCES))
        more = shlex.split(os.environ.get("QUIRE_VLLM_ARGS", "--dtype bfloat16"))
        found.append(
            Contender("vLLM", (*command, *more), "--port", {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1"})
        )
    if program := os.environ.get("QUIRE_LLAMA_SERVER"):
        context = str(MAX_SEQUENCES * (4000 + 2 * OUTPUT_TOKENS))
        options = (
            "-m",
            str(demo_file()),
            "-np",
            str(MAX_SEQUENCES),
            "-c",
            context,
            "-t",
            str(os.cpu_count()),
            "-fa",
            "on",
        )
        for kind in CACHE_TYPES:
            found.append(Contender(f"llama.cpp {kind}", (program, *options, "-ctk", kind, "-ctv", kind), "--port"))
    return found


class PeerServer:
    """A running contender, stopped by a signal but while it is `awake`."""

    def __init__(self, contender: Contender, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.name = contender.name
        self.url = f"http://127.0.0.1:{port}"
        self._popen = subprocess.Popen(
            [*contender.command, contender.port_option, str(port)],
            env={**os.environ, **contender.environment},
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._popen.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise SystemExit(f"{self.name} did not start; the end of what it said:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        self._signal(signal.SIGSTOP)

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/v1/models", timeout=5) as response:
                return bool(response.status == 200)
        except (URLError, OSError):
            return False

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._popen.pid, number)

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        if self._popen.poll() is None:
            self._signal(signal.SIGKILL)
            self._popen.wait()

    def ask(self, workload: Workload, seed: int, num_tokens: int) -> dict[str, Any]:
        """What `quire bench` says of one level."""
        number = str(workload.num_requests)
        options = ("--concurrency", number, "--requests", number, "--seed", str(seed), "--no-warm-up", "--json", "-")
        lengths = ("--input-tokens", str(workload.num_tokens), "--output-tokens", str(num_tokens))
        command = (sys.executable, "-m", "server.cli", "bench", "--url", self.url, *options, *lengths)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        if done.returncode:
            raise SystemExit(f"{self.name}, {workload}: {done.stderr}")
        level: dict[str, Any] = json.loads(done.stdout)["levels"][0]
        return level

    def tokens_per_second(self, workload: Workload, seed: int) -> float:
        with self.awake():
            if workload.is_prefill:
                level = self.ask(workload, seed, 1)
                return 1e3 * float(level["mean_prompt_tokens"]) / float(level["time_to_first_token_ms"]["p50"])
            self.ask(workload, seed, 1)
            level = self.ask(workload, seed, OUTPUT_TOKENS)
            return 1e3 * workload.num_requests / float(level["interval_ms"]["p50"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    console = Console(width=140)
    results: dict[str, dict[str, list[float]]] = {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        servers = []
        for contender in contenders(Path(folder) / "model"):
            server = PeerServer(contender, Path(folder) / f"{contender.name}.log")
            stack.callback(server.close)
            servers.append(server)
        for workload in WORKLOADS:
            rates = results[str(workload)] = {server.name: [] for server in servers}
            for number in range(options.rounds):
                for server in turn(servers, number):
                    rates[server.name].append(server.tokens_per_second(workload, seed=1000 * number + 7))
                    print(f"{workload}, {server.name}: {rates[server.name][-1]:.1f} tokens/s", file=sys.stderr)
    show(results, console)
    print(json.dumps({"machine": machine(), "tokens_per_second": results}))


def show(results: dict[str, dict[str, list[float]]], console: Console) -> None:
    table = Table(title="tokens a second: median, lowest to highest, and how many times as fast Quire's int4 is")
    table.add_column("workload")
    for name in next(iter(results.values())):
        table.add_column(name)
    for workload, rates in results.items():
        ours = median(rates[f"Quire {OURS[0]}"])
        cells = (f"{median(r):.1f}\n{min(r):.1f} to {max(r):.1f}\n{ours / median(r):.2f}x" for r in rates.values())
        table.add_row(workload, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
