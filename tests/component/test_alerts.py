"""The alerts and the dashboard of `deploy/`. `tests/integration/test_prometheus.py` runs them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml

from tests.support.prometheus import DASHBOARD, DEPLOY, RULES, alert_values

PAGE = DEPLOY.parent / "docs/watching.md"
TESTS = RULES.with_name("rules_test.yml")
PANELS = [each for each in json.loads(DASHBOARD.read_text())["panels"] if each["type"] != "row"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "--syntax-only", str(RULES.with_name("prometheus.yml"))),
        ("check", "rules", "--lint-fatal", str(RULES)),
        ("test", "rules", str(TESTS)),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_accepts_the_rules_and_their_tests(arguments):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_and_explained():
    explained = re.findall(r"^\| `(Tandem\w+)` \|", PAGE.read_text(), re.M)
    assert explained == list(alert_values())
    assert all(name in TESTS.read_text() for name in alert_values())


def test_the_rule_of_kubernetes_has_the_same_alerts():
    rule = yaml.safe_load(RULES.with_name("prometheus-rule.yaml").read_text())
    assert rule["spec"] == yaml.safe_load(RULES.read_text())


def test_every_panel_has_a_description_and_the_chosen_data_source():
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["legendFormat"]


def test_no_panel_has_a_label_for_a_run_or_an_owner():
    labels = set(re.findall(r"by \(([^)]*)\)", DASHBOARD.read_text() + RULES.read_text()))
    names = {name.strip() for each in labels for name in each.split(",")}
    assert names <= {
        *("le", "kind", "state", "group", "share", "outcome", "instance", "folder"),
        *("statistic", "status", "limit"),
    }
