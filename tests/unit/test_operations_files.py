"""The systemd unit, the Kubernetes manifest and docs/operations.md: they name what there is."""

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from engine.config import EngineConfig
from server.cli import main
from server.config import ServerConfig
from server.options import options_of

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
OPERATIONS = (ROOT / "docs/operations.md").read_text()
UNIT = (DOCKER / "quire.service").read_text()
DRAIN_SECONDS = int(ServerConfig().drain_seconds)
VARIABLES = {option.variable for config in (EngineConfig, ServerConfig) for option in options_of(config)}


@pytest.fixture
def analyzed_unit(tmp_path: Path) -> Path:
    """The unit with a program that is there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed; Debian's package systemd has it")
    version = re.match(r"systemd (\d+)", analyze("--version"))
    if version is None or int(version[1]) < 250:
        pytest.skip("systemd-analyze is older than 250, which cannot rate a unit that is not installed")
    text, count = re.subn(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT, flags=re.MULTILINE)
    assert count == 1
    path = tmp_path / "quire.service"
    path.write_text(text)
    return path


def analyze(*arguments: str) -> str:
    done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_systemd_takes_the_unit(analyzed_unit: Path) -> None:
    assert "quire.service" not in analyze("verify", "--recursive-errors=no", str(analyzed_unit))


def test_the_unit_is_hardened(analyzed_unit: Path) -> None:
    """systemd rates units from 0 to 10; without any of the options this one would have 9 and more."""
    analyze("security", "--offline=true", "--threshold=20", str(analyzed_unit))


def test_the_unit_waits_for_the_drain_and_does_not_repeat_mistakes() -> None:
    values = dict(line.split("=", 1) for line in UNIT.splitlines() if re.match(r"[A-Z]\w+=", line))
    assert int(values["TimeoutStopSec"]) > DRAIN_SECONDS + 10
    assert values["KillMode"] == "mixed" and values["RestartPreventExitStatus"] == "2"
    needed = 2 * ServerConfig().max_connections
    assert int(values["LimitNOFILE"]) > needed
    assert set(re.findall(r"\bQUIRE_[A-Z_]+(?==)", UNIT)) <= VARIABLES


def documents() -> Iterator[dict[str, Any]]:
    return yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_takes_the_manifest(version: str) -> None:
    kinds = []
    for document in documents():
        kinds.append(document["kind"])
        if document["kind"] != "ServiceMonitor":  # the Prometheus operator's own, which Kubernetes does not know
            kubernetes_validate.validate(document, version, strict=True)
    assert kinds == ["Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor"]


def test_the_manifest_fits_together() -> None:
    deployment, service, budget, policy, monitor = documents()
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"], policy["spec"]["podSelector"]["matchLabels"],
    ):  # fmt: skip
        assert selector == labels
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    # What the job is called; the alerts ask for it.
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "quire"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": ServerConfig().http_port, "grpc": ServerConfig().grpc_port}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert set(variables) <= VARIABLES | {"QUIRE_MODEL"}
    # New calls still come while the endpoints are updated, which takes some seconds.
    (sleep, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep" and int(seconds) >= 5
    drain = int(seconds) + int(variables["QUIRE_DRAIN_SECONDS"])
    assert pod["spec"]["terminationGracePeriodSeconds"] > drain + 10
    assert pod["spec"]["shareProcessNamespace"] is True
    assert budget["spec"]["maxUnavailable"] < deployment["spec"]["replicas"]


def test_the_manifest_is_hardened() -> None:
    deployment, *_ = documents()
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not container["image"].endswith(":latest") and ":" in container["image"]
    assert {"cpu", "memory"} <= set(container["resources"]["requests"]) and container["resources"]["limits"]["memory"]
    assert all(name in container for name in ("startupProbe", "livenessProbe", "readinessProbe"))


def test_the_capacity_cookbook_is_what_quire_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.strip("|").split("|") for line in OPERATIONS.splitlines() if line.startswith("| llama-")]
    rows = [[cell.strip() for cell in line] for line in lines]
    (header,) = re.findall(r"^\| model \| GPU \| GB for K and V \| (.*) \|$", OPERATIONS, re.MULTILINE)
    formats = [name.strip("` ") for name in header.split("|")]
    assert {"L40S", "A100-80GB", "H100", "H200"} <= {row[1] for row in rows}
    for model in {row[0] for row in rows}:
        mine = [row for row in rows if row[0] == model]
        gpus = ",".join(row[1] for row in mine)
        assert main(["plan", model, "--context", "8k,32k,128k", "--gpu", gpus, "--json", "-"], {}) == 0
        plan = json.loads(capsys.readouterr().out)
        assert f"{plan['model']['weight_bytes'] / 1e9:.1f} GB" in OPERATIONS or model == "llama-3.1-8b"
        for row, gpu in zip(mine, plan["gpus"], strict=True):
            fits = [
                " / ".join(str(fit["num_users"]) for fit in gpu["fits"] if fit["format"] == name) for name in formats
            ]
            assert row[1:] == [gpu["name"], f"{gpu['kv_bytes'] / 1e9:.2f}", *fits]


def test_operations_names_variables_messages_and_sections_that_there_are() -> None:
    assert len(OPERATIONS.splitlines()) < 300
    assert set(re.findall(r"\bQUIRE_[A-Z_]+\b", OPERATIONS)) <= VARIABLES | {"QUIRE_MODEL"}
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", OPERATIONS, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", OPERATIONS)) <= headings
    table = OPERATIONS[OPERATIONS.index("| message or symptom |") :]
    messages = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    said = "\n".join(texts())
    assert len(messages) > 10
    for message in messages:
        assert message in said, f"nothing says {message!r}"


def texts() -> Iterator[str]:
    """Every string in the program, with a mark where a value is put in."""
    for folder in ("engine", "server", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
