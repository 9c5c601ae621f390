"""The real server in a process of its own, and a tiny model on disk for it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from engine.model.checkpoint import expected_tensors
from engine.model.describe import describe
from tests.helpers import RandomCheckpoint
from tests.model_folders import tiny_config, write_model_folder

PORTS = ("--http-port", "0", "--grpc-port", "0")
MEMORY = ("--kv-memory", "16MiB")
SHAPE = ("--page-tokens", "32", "--max-num-seqs", "8", "--max-step-tokens", "64")
SMALL = ("--device", "cpu", "--dtype", "float32", *SHAPE, *MEMORY, *PORTS)


class Server:
    """`quire serve` with `arguments`. `output`: what it has printed so far; `client` speaks to it once it is ready."""

    def __init__(self, *arguments: str):
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "server.cli", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Rows of the table on one line each; one thread, as for all tests.
            env={**os.environ, "COLUMNS": "250", "OMP_NUM_THREADS": "1"},
        )
        self.output = ""
        self.http = self.grpc = ""
        self.client = httpx.Client(timeout=60)

    def wait_ready(self) -> "Server":
        assert self.popen.stdout
        for line in self.popen.stdout:
            self.output += line
            if match := re.fullmatch(r"ready: (http://\S+) grpc://(\S+)\n", line):
                self.http, self.grpc = match.groups()
                self.client.base_url = self.http
                return self
        raise AssertionError(f"not ready: {self.output} {self.finish()}")

    @property
    def table(self) -> dict[str, str]:
        rows = (re.fullmatch(r"(\S.*?)\s{2,}(\S.*?)\s*", line) for line in self.output.splitlines())
        return {row[1]: row[2] for row in rows if row}

    def finish(self) -> tuple[int, str]:
        """Wait for the end: exit code and what went to stderr."""
        output, errors = self.popen.communicate(timeout=60)
        self.output += output
        return self.popen.returncode, errors


Start = Callable[..., Server]


@contextmanager
def servers() -> Iterator[Start]:
    """Starts servers, and ends those that still run when the block is left."""
    started: list[Server] = []

    def start(*arguments: str) -> Server:
        started.append(Server(*arguments))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            if server.popen.poll() is None:
                server.popen.kill()
            server.popen.communicate()
            server.client.close()


def write_lively_model(folder: Path) -> Path:
    """A model whose output varies: weights as in tests/helpers.py, 258 tokens, 512 positions."""
    raw = tiny_config(hidden_size=64, intermediate_size=96, num_attention_heads=6, head_dim=16)
    config = describe(raw)
    checkpoint = RandomCheckpoint(config)
    weights: dict[str, torch.Tensor] = {name: checkpoint.tensor(name) for name in expected_tensors(config)}
    return write_model_folder(folder, raw, weights)
