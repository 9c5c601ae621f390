"""The whole process: ports, the ready line, signals, drain and exit codes."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import httpx
import pytest

from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1.inference_pb2_grpc import InferenceServiceStub

MAIN = """
import asyncio, sys, time
import server.lifecycle
from engine.errors import StartupError
from engine.request import Delta, Finished, FinishReason
from server.cli import main
from tests import fakes

async def slow(request):
    for number in range(20):
        yield Delta(f"t{number} ", (number,))
        await asyncio.sleep(0.05)
    yield Finished(FinishReason.LENGTH, fakes.usage(request, 20))

async def dies(request):
    yield Delta("t0 ", (0,))
    engine.is_ready = False
    await asyncio.Event().wait()

async def sticks(request):
    yield Delta("t0 ", (0,))
    engine.step_seconds = 1000.0
    engine.stop = lambda timeout=None: time.sleep(timeout)  # the thread is in its step
    await asyncio.Event().wait()

def load(config, progress):
    global engine
    if config.model == "broken":
        raise StartupError("config.json is missing")
    progress(1, 2)
    if config.model == "slow to load":
        print("loading", flush=True)
        time.sleep(60)
    scripts = {"slow": slow, "dies": dies, "sticks": sticks, "hangs": fakes.hang_after(1)}
    engine = fakes.FakeEngine(scripts[config.model])
    return engine

server.lifecycle._load_engine = load
sys.exit(main(["serve", *sys.argv[1:]]))
"""
STREAM = {"model": "tiny", "prompt": "hi", "stream": True}
Start = Callable[..., "Process"]


class Process:
    """A server in a process of its own, over a fake engine whose script is named by the model."""

    def __init__(self, *arguments: str):
        self.popen = subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.output = ""
        self.http = self.grpc = ""

    def wait_ready(self) -> "Process":
        assert self.popen.stdout
        for line in self.popen.stdout:
            self.output += line
            if match := re.fullmatch(r"ready: (http://\S+) grpc://(\S+)\n", line):
                self.http, self.grpc = match.groups()
                return self
        raise AssertionError(f"not ready: {self.output} {self.finish()}")

    def wait_draining(self) -> None:
        deadline = time.monotonic() + 5
        while httpx.get(f"{self.http}/health/ready").status_code != 503:
            assert time.monotonic() < deadline

    def finish(self) -> tuple[int, str]:
        _, errors = self.popen.communicate(timeout=10)
        return self.popen.returncode, errors


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[Process] = []

    def start(*arguments: str) -> Process:
        processes.append(Process(*arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.popen.kill()
        process.popen.communicate()


def test_running_requests_finish_after_sigterm(start: Start) -> None:
    process = start("slow", "--http-port", "0", "--grpc-port", "0").wait_ready()
    assert process.http in process.output and "tiny" in process.output
    with grpc.insecure_channel(process.grpc) as channel, httpx.Client(base_url=process.http) as client:
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(model="tiny", text="hi"))
        first = next(call)
        with client.stream("POST", "/v1/completions", json=STREAM) as stream:
            lines = stream.iter_lines()
            assert "t0" in next(lines)
            process.popen.send_signal(signal.SIGTERM)
            rest = list(lines)
        messages = [first, *call]
    assert rest[-2] == "data: [DONE]"
    assert messages[-1].finish.reason == pb.FINISH_REASON_LENGTH and len(messages) == 21
    assert process.finish()[0] == 0


def test_requests_past_the_drain_bound_fail_aloud(start: Start) -> None:
    process = start("hangs", "--http-port", "0", "--grpc-port", "0", "--drain-seconds", "0.2").wait_ready()
    with httpx.stream("POST", f"{process.http}/v1/completions", json=STREAM) as stream:
        lines = stream.iter_lines()
        assert "t0" in next(lines)
        process.popen.send_signal(signal.SIGINT)
        received = []
        with pytest.raises(httpx.RemoteProtocolError):
            received.extend(lines)
            pytest.fail(f"the stream ended as if complete: {received}")
    assert process.finish()[0] == 0


def test_a_second_signal_ends_the_drain(start: Start) -> None:
    process = start("hangs", "--http-port", "0", "--grpc-port", "0", "--drain-seconds", "600").wait_ready()
    with httpx.stream("POST", f"{process.http}/v1/completions", json=STREAM) as stream:
        lines = stream.iter_lines()  # kept: httpx closes the connection with its iterator
        assert "t0" in next(lines)
        process.popen.send_signal(signal.SIGTERM)
        process.wait_draining()
        process.popen.send_signal(signal.SIGTERM)
        assert process.finish()[0] == 0


def test_a_terminal_that_closes_drains(start: Start) -> None:
    """It sends SIGHUP itself and through the shell, and the second one does not count as hurry."""
    process = start("slow", "--http-port", "0", "--grpc-port", "0").wait_ready()
    with httpx.Client(base_url=process.http) as client, client.stream("POST", "/v1/completions", json=STREAM) as stream:
        lines = stream.iter_lines()
        assert "t0" in next(lines)
        process.popen.send_signal(signal.SIGHUP)
        process.wait_draining()
        process.popen.send_signal(signal.SIGHUP)
        assert list(lines)[-2] == "data: [DONE]"
    assert process.finish()[0] == 0


def test_nohup_is_respected(start: Start) -> None:
    """Had SIGHUP begun the drain, SIGTERM would be the second signal, which ends what runs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("slow", "--http-port", "0", "--grpc-port", "0")
    finally:
        signal.signal(signal.SIGHUP, before)
    process.wait_ready()
    with httpx.Client(base_url=process.http) as client, client.stream("POST", "/v1/completions", json=STREAM) as stream:
        lines = stream.iter_lines()
        assert "t0" in next(lines)
        process.popen.send_signal(signal.SIGHUP)
        process.popen.send_signal(signal.SIGTERM)
        assert list(lines)[-2] == "data: [DONE]"
    assert process.finish()[0] == 0


def test_a_dead_engine_ends_the_process(start: Start) -> None:
    process = start("dies", "--http-port", "0", "--grpc-port", "0").wait_ready()
    with httpx.stream("POST", f"{process.http}/v1/completions", json=STREAM) as stream:
        events = ""
        with pytest.raises(httpx.RemoteProtocolError):
            for text in stream.iter_text():
                events += text
    assert json.loads(events.split("\n\n")[-2].removeprefix("data: "))["error"]["type"] == "server_unavailable"
    code, errors = process.finish()
    assert code == 1 and "engine has stopped" in errors and "Traceback" not in errors


def test_a_step_that_never_ends_fails_what_is_open_and_ends_the_process(start: Start) -> None:
    process = start("sticks", "--http-port", "0", "--grpc-port", "0", "--step-seconds", "900").wait_ready()
    with grpc.insecure_channel(process.grpc) as channel:
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(model="tiny", text="hi"))
        assert next(call).text == "t0 "
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    code, errors = process.finish()
    assert code == 1 and "--step-seconds" in errors and "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_loading_ends_the_process(start: Start, number: signal.Signals) -> None:
    process = start("slow to load", "--http-port", "0", "--grpc-port", "0")
    assert process.popen.stdout
    while process.popen.stdout.readline() != "loading\n":
        assert process.popen.poll() is None
    process.popen.send_signal(number)
    code, errors = process.finish()
    assert code == 128 + number and errors.count("\n") == 1 and "loading the weights of 2 layers" in errors


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_busy_port_is_one_line(start: Start, flag: str) -> None:
    other = "--grpc-port" if flag == "--http-port" else "--http-port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, errors = start("slow", flag, str(port), other, "0").finish()
    assert code == 2
    assert re.fullmatch(rf"quire: cannot listen on port {port} of 127\.0\.0\.1: .*{flag}.*\n", errors)


def test_more_connections_than_descriptors_are_one_line(start: Start) -> None:
    code, errors = start("slow", "--http-port", "0", "--grpc-port", "0", "--max-connections", str(2**30)).finish()
    assert code == 2 and errors.count("\n") == 1 and "--max-connections" in errors


def test_a_model_that_cannot_load_is_one_line(start: Start) -> None:
    code, errors = start("broken", "--http-port", "0", "--grpc-port", "0").finish()
    assert (code, errors) == (2, "quire: config.json is missing\n")
