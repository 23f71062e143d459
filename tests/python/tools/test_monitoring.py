"""Compare the dashboard, the alerts and the table of metrics with what /metrics returns."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fake_engine import make_engine
from prometheus_client.parser import text_string_to_metric_families
from serving import CHAT, post, serving

from lmdeploy.serve.metrics import VLLM_NAMES, ServerMetrics

DOCS = Path(__file__).resolve().parents[3] / "docs"
METRIC_NAME = re.compile(r"\b(?:lmdeploy|vllm):\w+")
GRID_COLUMNS = 24


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Return the labels of every sample that a server returns after a request."""
    with serving(make_engine()) as url:
        assert post(url, "/v1/chat/completions", CHAT).status_code == 200
        assert post(url, "/v1/chat/completions", {}).status_code == 400
        text = httpx.get(f"{url}/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    text = (DOCS / "monitoring/grafana_dashboard.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((DOCS / "monitoring/alerts.yml").read_text("utf-8"))
    (group,) = loaded["groups"]
    assert group.keys() == {"name", "rules"}
    listed: list[dict[str, Any]] = group["rules"]
    return listed


def check_expression(expression: str, exposed: dict[str, set[str]]) -> None:
    """Check that a PromQL expression names only metrics and labels that exist."""
    names = METRIC_NAME.findall(expression)
    assert names
    for name in names:
        assert name in exposed, name
    known = set().union(*(exposed[name] for name in names)) | {"instance"}  # Prometheus adds it
    for name, selector in re.findall(r"((?:lmdeploy|vllm):\w+)\{([^}]*)\}", expression):
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert used <= exposed[name] | {"instance"}, expression
    for by in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in by.split(",")} <= known, expression
    assert expression.count("(") == expression.count(")")


def test_dashboard_has_what_grafana_needs(dashboard: dict[str, Any]) -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= dashboard.keys()
    assert dashboard["schemaVersion"] >= 36
    variables = {v["name"]: v for v in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for item in (*panels, *(t for panel in panels for t in panel["targets"])):
        assert item["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard)))
    assert used - {"__rate_interval", "__all"} == set(variables)


def test_panels_of_the_dashboard_do_not_overlap(dashboard: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    for place in places:
        assert place["x"] >= 0 and place["x"] + place["w"] <= GRID_COLUMNS
    for a, b in itertools.combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (a, b)


def test_dashboard_reads_metrics_that_exist(
    dashboard: dict[str, Any], exposed: dict[str, set[str]]
) -> None:
    for panel in dashboard["panels"]:
        assert panel["targets"]
        for target in panel["targets"]:
            check_expression(target["expr"], exposed)


def test_dashboard_shows_every_pool(
    dashboard: dict[str, Any], exposed: dict[str, set[str]]
) -> None:
    pools = {
        name for name in exposed if re.match(r"lmdeploy:(kv_cache\w*_blocks|state_chec)", name)
    }
    assert len(pools) == 8
    assert pools <= set(METRIC_NAME.findall(json.dumps(dashboard)))


def test_alerts_read_metrics_that_exist(
    rules: list[dict[str, Any]], exposed: dict[str, set[str]]
) -> None:
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        if rule["expr"] != 'up{job="lmdeploy"} == 0':  # a metric of Prometheus itself
            check_expression(rule["expr"], exposed)


@pytest.mark.parametrize(
    "expression",
    [
        "lmdeploy:absent > 0",
        "vllm:absent_total > 0",
        'lmdeploy:http_errors_total{code="500"} > 0',
        "sum by (status) (lmdeploy:num_requests_running)",
        "no_metric > 0",
    ],
)
def test_wrong_expression_is_found(expression: str, exposed: dict[str, set[str]]) -> None:
    with pytest.raises(AssertionError):
        check_expression(expression, exposed)


def metric_table() -> str:
    """Return the table of docs/monitoring.md."""
    lines = ["| metric | type | meaning |", "| --- | --- | --- |"]
    engine = make_engine()
    try:
        families = sorted(ServerMetrics(engine, "m").registry.collect(), key=lambda f: f.name)
    finally:
        engine.close()
    for family in families:
        short = family.name.removeprefix("lmdeploy:")
        end = "_total" if family.type == "counter" else ""
        if not family.name.startswith("vllm:"):
            names = [family.name, *(f"vllm:{name}" for name in VLLM_NAMES.get(short, ()))]
            cell = "<br>".join(f"`{name}{end}`" for name in names)
            lines.append(f"| {cell} | {family.type} | {family.documentation} |")
    return "\n".join(lines)


def test_table_of_metrics_equals_code() -> None:
    assert f"\n\n{metric_table()}\n\n" in (DOCS / "monitoring.md").read_text("utf-8")
