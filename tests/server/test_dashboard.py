"""The dashboard shows what the server counts, and all of it."""

import json
import re
from pathlib import Path

from knnstore.server.engine import Observed
from knnstore.server.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "knnstore.json"


def test_the_dashboard_names_the_metrics_that_there_are():
    metrics = Metrics()
    metrics.record_request("/v1/models", 200, 0.1, 0.1)
    metrics.record_turn(Observed(rows=1, tokens=1, waiting=0, seconds=0.1))
    series = set(re.findall(r"^(\w+)[ {]", metrics.format_metrics().decode(), re.M))
    panels = json.loads(DASHBOARD.read_text())["panels"]
    named = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"\b(?:gen_ai|knnstore)_\w+", target["expr"])
    }
    assert named <= series
    families = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in series}
    assert families == {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in named}
