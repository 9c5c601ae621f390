"""The service under compose, as an operator runs it: one life of it, test after test."""

import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest

from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.docker.engine import Service, docker, health, inspect, log, wait_for

pytestmark = pytest.mark.docker
QUESTION = {
    "model": "demo",
    "stream": True,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
LONG = "The quick brown fox jumps over the lazy dog. " * 40
NUM_TOKENS = 32
MOST_SECONDS = 20


def metadata(service: Service) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {service.key}")]


def num_cached(service: Service) -> int:
    body = {"model": "demo", "prompt": LONG, "max_tokens": 1}
    response = httpx.post(f"{service.url}/v1/completions", json=body, headers=service.headers, timeout=60)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_it_is_healthy_soon(service: Service) -> None:
    waited, ready = service.wait_healthy(), service.seconds_to_ready()
    print(f"\nready {ready:.1f} s after the container's start; healthy {waited:.1f} s after compose")
    assert ready < MOST_SECONDS


def test_it_is_locked_in(service: Service) -> None:
    def inside(*command: str) -> str:
        return docker("exec", service.container, *command, check=False).stdout

    status = dict(line.split(":\t") for line in inside("cat", "/proc/1/status").splitlines() if ":\t" in line)
    assert status["Uid"].split()[0] == "10001" and status["Gid"].split()[0] == "0"
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0 and status["NoNewPrivs"] == "1"
    assert inside("cat", "/proc/1/cmdline").split("\0")[1:] == ["--", "quire", "serve", "/models/demo", ""]
    writable = inside("sh", "-c", "for d in / /opt/quire /models /secrets /tmp /cache; do test -w $d && echo $d; done")
    assert writable.split() == ["/tmp", "/cache"]


def test_orphans_are_reaped(service: Service) -> None:
    states = ("exec", service.container, "sh", "-c", "grep -h ^State /proc/[0-9]*/status")
    before = docker(*states).stdout.count("\n")
    for _ in range(5):
        docker("exec", service.container, "sh", "-c", "(sleep 0.2 &)")
    wait_for("no orphan is left", lambda: docker(*states, check=False).stdout.count("\n") <= before, 10)


def test_curl_streams_through_the_published_port(service: Service) -> None:
    command = ["curl", "-sSN", f"{service.url}/v1/chat/completions", "-H", "content-type: application/json"]
    command += ["-d", json.dumps(QUESTION)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert json.loads(refused.stdout)["error"]["code"] == "missing_api_key"
    command += ["-H", f"authorization: Bearer {service.key}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    *events, last = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert last == "[DONE]" and len(events) > 3
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)
    assert "Paris" in text


def test_grpc_streams_through_the_published_port(service: Service) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
        request = pb.GenerateRequest(
            model="demo", text="The capital of France is", sampling=pb.SamplingParams(temperature=0, max_tokens=16)
        )
        messages = list(InferenceServiceStub(channel).Generate(request, metadata=metadata(service), timeout=60))
    assert len(messages) > 3 and "Paris" in "".join(message.text for message in messages)


def test_prometheus_gets_its_metrics_with_the_key_that_was_made_for_it(service: Service) -> None:
    key = (service.folder / "secrets/metrics_key").read_text()
    response = httpx.get(f"{service.url}/metrics", headers={"authorization": f"Bearer {key}"}, timeout=10)
    assert response.status_code == 200 and "quire_build_info" in response.text


def test_a_stop_lets_eight_streams_finish(service: Service) -> None:
    container, started = service.container, threading.Barrier(9, timeout=60)

    def over_http(number: int) -> tuple[int, str]:
        body = {"model": "demo", "prompt": f"{number} ", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        reason, count = "", 0
        with httpx.stream(
            "POST", f"{service.url}/v1/completions", json=body, headers=service.headers, timeout=60
        ) as stream:
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
            next(lines)
            started.wait()
            for line in lines:
                if line == "[DONE]":
                    return count, reason
                event = json.loads(line)
                for choice in event["choices"]:
                    reason = choice["finish_reason"] or reason
                count = (event.get("usage") or {}).get("completion_tokens", count)
        raise AssertionError("the stream ended without [DONE]")

    def over_grpc(number: int) -> tuple[int, str]:
        sampling = pb.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        request = pb.GenerateRequest(model="demo", text=f"{number} ", sampling=sampling)
        with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
            call = InferenceServiceStub(channel).Generate(request, metadata=metadata(service), timeout=60)
            next(call)
            started.wait()
            *_, last = call
        reason = {pb.FINISH_REASON_LENGTH: "length"}.get(last.finish.reason, "other")
        return last.finish.usage.generated_tokens, reason

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(over_http if number % 2 else over_grpc, number) for number in range(8)]
        started.wait()
        service.compose("stop")
        assert [stream.result() for stream in streams] == [(NUM_TOKENS, "length")] * 8
    state = inspect(container)["State"]
    assert (state["Status"], state["ExitCode"], state["OOMKilled"]) == ("exited", 0, False)


def test_a_killed_server_comes_back_with_its_cache(service: Service) -> None:
    service.compose("up", "-d")
    service.wait_healthy()
    assert num_cached(service) == 0
    service.compose("stop")  # here the pages are written
    service.compose("up", "-d")
    service.wait_healthy()
    found = num_cached(service)
    assert found > 0
    index = ["exec", service.container, "sh", "-c", "cat /cache/quire-pages/current; sha256sum /cache/quire-pages/*/*"]
    before = docker(*index).stdout
    docker("kill", "--signal", "KILL", service.container)
    assert inspect(service.container)["State"]["ExitCode"] == 137
    service.compose("up", "-d")
    service.wait_healthy()
    assert docker(*index).stdout == before and before
    assert num_cached(service) == found
    assert "pages on disk are not used" not in "".join(log(service.container))


def test_health_follows_the_server(service: Service) -> None:
    assert health(service.container) == "healthy"
    assert docker("exec", service.container, "quire", "healthcheck").stdout == "ready\n"
    done = docker("exec", "-e", "QUIRE_ADMIN_PORT=8002", service.container, "quire", "healthcheck", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
