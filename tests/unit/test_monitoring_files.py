"""The alerts and the dashboard: they ask for what the server has, and fit to compose.yaml and docs/operations.md."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.config import ServerConfig
from server.metrics import PATIENCE_SECONDS, Exporter
from server.service import Service
from tests.fakes import FakeEngine

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
OPERATIONS = (ROOT / "docs/operations.md").read_text()
PROMETHEUS = DOCKER / "prometheus"
ALERTS: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((DOCKER / "grafana/dashboards/quire.json").read_text())
EXPRESSIONS = [
    *[alert["expr"] for alert in ALERTS],
    *[target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())],
]
SELECTOR = re.compile(r"\b((?:quire|process)_\w+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {
        "type": {"enum": ["row", "stat", "gauge", "timeseries", "table"]},
        "title": {"type": "string", "minLength": 1},
        "gridPos": {
            "type": "object",
            "required": ["x", "y", "w", "h"],
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 23},
                "y": {"type": "integer", "minimum": 0},
                "w": {"type": "integer", "minimum": 1, "maximum": 24},
                "h": {"type": "integer", "minimum": 1},
            },
        },
    },
    "if": {"properties": {"type": {"not": {"const": "row"}}}},
    "then": {
        "required": ["description", "datasource", "targets", "fieldConfig", "options"],
        "properties": {
            "description": {"type": "string", "minLength": 10},
            "datasource": {"$ref": "#/$defs/datasource"},
            "targets": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["refId", "expr", "datasource", "legendFormat"],
                    "properties": {"datasource": {"$ref": "#/$defs/datasource"}, "expr": {"minLength": 1}},
                },
            },
            "fieldConfig": {"type": "object", "required": ["defaults", "overrides"]},
        },
    },
}
SCHEMA = {
    "$defs": {
        "datasource": {"const": {"type": "prometheus", "uid": "${datasource}"}},
    },
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "time", "refresh", "templating", "panels"],
    "properties": {
        "schemaVersion": {"type": "integer", "minimum": 36},
        "uid": {"type": "string", "maxLength": 40},
        "panels": {"type": "array", "items": PANEL},
    },
}


@pytest.fixture
async def exposed() -> list[tuple[str, dict[str, str]]]:
    """Names and labels of every sample that a server has from its start."""
    text, _ = await Exporter(Service(FakeEngine())).render("")  # type: ignore[arg-type]
    families = text_string_to_metric_families(text.decode())
    return [(sample.name, sample.labels) for family in families for sample in family.samples]


def matches(labels: dict[str, str], matchers: list[tuple[str, str, str]]) -> bool:
    """Whether a sample is selected, but for the labels that Prometheus adds."""
    return all(
        name in labels and (labels[name] == value if operator == "=" else re.fullmatch(value, labels[name]))
        for name, operator, value in matchers
        if name not in ("job", "instance")
    )


def test_every_expression_selects_what_the_server_has(exposed: list[tuple[str, dict[str, str]]]) -> None:
    names = {name for name, _ in exposed}
    for expression in EXPRESSIONS:
        selectors = SELECTOR.findall(expression)
        assert selectors, expression
        for name, inside in selectors:
            if name == "up":
                continue
            assert name in names, f"{name} is not in /metrics"
            matchers = MATCHER.findall(inside)
            assert ("job", "=", "quire") in matchers, expression
            assert any(name == other and matches(labels, matchers) for other, labels in exposed), f"{name}{{{inside}}}"
            for label, operator, value in matchers:
                if operator == "=~" and label != "instance":
                    assert all(any(labels.get(label) == one for _, labels in exposed) for one in value.split("|"))


def test_each_by_names_labels_that_there_are(exposed: list[tuple[str, dict[str, str]]]) -> None:
    labels = {"job", "instance"} | {label for _, sample in exposed for label in sample}
    for expression in EXPRESSIONS:
        for names in re.findall(r"by \(([^)]*)\)", expression):
            assert {name.strip() for name in names.split(",")} <= labels


def test_every_alert_says_what_to_do() -> None:
    headings = re.findall(r"^### (\w+)$", OPERATIONS, re.MULTILINE)
    assert [alert["alert"] for alert in ALERTS] == headings
    for alert in ALERTS:
        name, notes = alert["alert"], alert["annotations"]
        assert alert["labels"] in ({"severity": "critical"}, {"severity": "warning"})
        assert notes["runbook"] == f"docs/operations.md#{name.lower()}"
        assert set(notes) == {"summary", "description", "runbook"} and len(notes["description"]) > 40
        section = OPERATIONS.split(f"### {name}\n")[1]
        assert section.lower().startswith(alert["labels"]["severity"] + ":")


def test_every_alert_has_a_case_where_it_fires_and_one_where_it_does_not() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for alert in ALERTS:
        fires = {bool(case["exp_alerts"]) for case in cases if case["alertname"] == alert["alert"]}
        assert fires == {True, False}, alert["alert"]


def test_a_stalled_step_is_told_long_before_the_server_gives_up() -> None:
    (alert,) = [alert for alert in ALERTS if alert["alert"] == "QuireStepStalled"]
    threshold = float(alert["expr"].split(">")[1])
    assert 2 * threshold < ServerConfig().step_seconds
    assert f"--step-seconds ({ServerConfig().step_seconds:g})" in alert["annotations"]["description"]


def test_prometheus_asks_the_services_of_compose() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    (job,) = config["scrape_configs"]
    (names,) = job["dns_sd_configs"]
    assert set(names["names"]) == {name for name in compose["services"] if name.startswith("quire")}
    assert names["port"] == ServerConfig().http_port and job["job_name"] == "quire"
    assert job["authorization"]["credentials_file"] == "/run/secrets/metrics_key"
    assert "metrics_key" in compose["services"]["prometheus"]["secrets"]
    assert float(config["global"]["scrape_timeout"].rstrip("s")) > 2 * PATIENCE_SECONDS
    assert "./prometheus:/etc/prometheus:ro" in compose["services"]["prometheus"]["volumes"]
    assert all((PROMETHEUS / file).is_file() for file in config["rule_files"])


def test_grafana_is_given_the_dashboard_and_its_data() -> None:
    provisioning = DOCKER / "grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/quire.yml").read_text())["providers"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090" and "prometheus" in services


def test_the_dashboard_has_its_form() -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(DASHBOARD)
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {"datasource", "instance"} == {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(references)) == len(references)


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed; Debian's package prometheus has it")
    done = subprocess.run([program, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_configuration() -> None:
    promtool("check", "config", "--syntax-only", "prometheus.yml")
    promtool("check", "rules", "alerts.yml")


def test_promtool_finds_that_alerts_fire_as_they_should() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_promtool_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(path))
