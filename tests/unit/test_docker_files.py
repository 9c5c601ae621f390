"""The files of the container images and of compose, without Docker: what hardening and operation rest on is there."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import EngineConfig
from server.config import ServerConfig
from server.options import options_of

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)(?:(:?[-?])([^}]*))?\}")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLOSE_SECONDS = 10  # for the last answers and the cached pages


def resolve(value: Any) -> Any:
    """With the defaults that stand in the file, and a model."""
    if isinstance(value, str):
        return VARIABLE.sub(lambda match: match[3] if match[2] in ("-", ":-") else "NAME", value)
    if isinstance(value, dict):
        return {key: resolve(item) for key, item in value.items()}
    return [resolve(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(resolve(yaml.safe_load(COMPOSE.read_text())))


@pytest.fixture(scope="module")
def quires(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in compose["services"].items() if name.startswith("quire-")}


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: the word and the rest of each, lines joined and comments left out."""
    lines = [
        line for line in (ROOT / "docker/Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for line in joined.splitlines() if line for word, _, rest in [line.partition(" ")]]


@pytest.fixture(scope="module")
def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, those of the stages below it first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions():
        if word == "FROM":
            below, _, name = rest.partition(" AS ")
            found[name] = list(found.get(below, ()))
        elif found:
            found[name].append((word, rest))
    return found


def environment(stage: list[tuple[str, str]]) -> dict[str, str]:
    pairs = re.findall(r"([A-Z_]+)=(\S+)", " ".join(rest for word, rest in stage if word == "ENV"))
    return dict(pairs)


def test_stages_begin_with_one_pinned_base() -> None:
    bases = [rest.partition(" AS ")[0] for word, rest in instructions() if word == "FROM"]
    names = [rest.partition(" AS ")[2] for word, rest in instructions() if word == "FROM"]
    assert {base for base in bases if base not in names} == {"${BASE_IMAGE}"}
    (default,) = [rest for word, rest in instructions() if word == "ARG" and rest.startswith("BASE_IMAGE=")]
    assert re.fullmatch(r"BASE_IMAGE=python:3\.\d+\.\d+-slim-bookworm", default)
    assert not {word for word, _ in instructions()} & {"ADD", "MAINTAINER"}


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_an_image_runs_as_any_user_and_writes_in_one_volume(
    stages: dict[str, list[tuple[str, str]]], target: str
) -> None:
    stage = stages[target]
    said = {word: rest for word, rest in stage}  # the last of each
    assert stage[-1][0] == "USER" and re.fullmatch(r"[1-9]\d{3,}:0", said["USER"])
    assert said["VOLUME"] == "/cache" and said["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(said["ENTRYPOINT"]) == ["quire"] and json.loads(said["CMD"]) == ["serve"]
    assert json.loads(said["HEALTHCHECK"].partition(" CMD ")[2]) == ["quire", "healthcheck"]
    variables = environment(stage)
    folders = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "MPLCONFIGDIR")
    assert all(variables[name].split("/")[:2] == ["", "cache"] for name in folders)
    known = {option.variable for config in (EngineConfig, ServerConfig) for option in options_of(config)}
    assert {name for name in variables if name.startswith("QUIRE_")} <= known
    assert said["EXPOSE"].split() == [str(ServerConfig().http_port), str(ServerConfig().grpc_port)]


def test_only_the_gpu_image_has_a_compiler_and_insists_on_a_gpu(stages: dict[str, list[tuple[str, str]]]) -> None:
    installs = {name: " ".join(rest for word, rest in stage if word == "RUN") for name, stage in stages.items()}
    assert "gcc" in installs["gpu"] and "gcc" not in installs["cpu"]
    assert environment(stages["gpu"])["QUIRE_DEVICE"] == "cuda" and "QUIRE_DEVICE" not in environment(stages["cpu"])


def test_the_build_sees_the_packages_and_little_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines and lines.index("*") < min(index for index, line in enumerate(lines) if line.startswith("!"))
    seen = {line[1:] for line in lines if line.startswith("!")}
    packages = {name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert seen == packages | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert "**/__pycache__" in lines


def test_every_service_is_pinned_and_hardened(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"quire-cpu", "quire-gpu", "prometheus", "grafana"}
    for name, service in compose["services"].items():
        assert re.search(r":v?\d+\.\d+\.\d+(-(cpu|gpu))?$", service["image"]), name
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "network_mode", "pid", "cap_add"} & set(service), name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert service["restart"] == "unless-stopped", name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        for mount in service["volumes"]:
            source, _, mode = mount.split(":", 2) if mount.count(":") == 2 else (*mount.split(":"), "rw")
            assert (mode == "ro") == source.startswith("./"), mount
            assert mode == "ro" or source in compose["volumes"], mount
    profiles = {name: service["profiles"] for name, service in compose["services"].items()}
    assert profiles["quire-cpu"] == ["cpu"] and profiles["quire-gpu"] == ["gpu"]
    assert profiles["prometheus"] == profiles["grafana"] == ["observability"]


def test_the_servers_differ_in_image_and_device(quires: dict[str, dict[str, Any]]) -> None:
    version = PROJECT["project"]["version"]
    cpu, gpu = quires["quire-cpu"], quires["quire-gpu"]
    assert (cpu["image"], gpu["image"]) == (f"quire:{version}-cpu", f"quire:{version}-gpu")
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    assert {key for key in {*cpu, *gpu} if cpu.get(key) != gpu.get(key)} == {"image", "profiles", "deploy"}


def test_a_server_is_not_the_first_process(quires: dict[str, dict[str, Any]]) -> None:
    """The first one must reap orphans, and signals have no default action there."""
    assert all(service["init"] is True for service in quires.values())


def test_a_server_gets_time_to_drain(quires: dict[str, dict[str, Any]]) -> None:
    for service in quires.values():
        match = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
        assert match and int(match[1]) >= ServerConfig().drain_seconds + CLOSE_SECONDS


def test_every_option_can_be_set_but_what_would_lead_ports_astray(quires: dict[str, dict[str, Any]]) -> None:
    known = {option.variable for config in (EngineConfig, ServerConfig) for option in options_of(config)}
    for service in quires.values():
        assert service["env_file"] == ".env" and set(service["environment"]) <= known
        assert service["environment"]["QUIRE_HOST"] == "0.0.0.0"
        inside = {service["environment"][f"QUIRE_{name}_PORT"] for name in ("HTTP", "GRPC")}
        assert {port.rsplit(":", 1)[1] for port in service["ports"]} == inside
        assert service["command"] == ["serve", "/models/NAME"]
        assert service["environment"]["QUIRE_API_KEYS"] == "/secrets/api_keys"
        assert service["user"] == "10001:0"


def test_the_example_names_every_variable_with_its_default() -> None:
    text = (ROOT / "docker/.env.example").read_text()
    example = dict(re.findall(r"^(?:# )?([A-Z][A-Z0-9_]*)=(.*)$", text, re.MULTILINE))
    used = {match[1]: match[3] for match in VARIABLE.finditer(COMPOSE.read_text())}
    assert set(used) <= set(example)
    assert {name: example[name] for name in used} == {**used, "MODEL": ""}
    options = {name for name in example if name.startswith("QUIRE_")}
    assert options <= {option.variable for config in (EngineConfig, ServerConfig) for option in options_of(config)}
    assert set(example) - options - set(used) == {"COMPOSE_PROJECT_NAME"}


def test_prometheus_and_grafana_find_their_files(compose: dict[str, Any]) -> None:
    for name in ("prometheus", "grafana"):
        for mount in compose["services"][name]["volumes"]:
            source = mount.split(":")[0]
            assert not source.startswith("./") or (COMPOSE.parent / source).is_dir(), source
    assert compose["secrets"].keys() == {"metrics_key", "grafana_password"}
    watched = (COMPOSE.parent / "prometheus/prometheus.yml").read_text()
    assert "/run/secrets/metrics_key" in watched and "quire-cpu" in watched and "quire-gpu" in watched
