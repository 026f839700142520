"""Debian's Prometheus with the configuration, alerts and dashboard of `deploy/`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import yaml

from tandem.stack import Endpoint
from tests.support.ports import known_port
from tests.support.waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus/rules.yml"
DASHBOARD = DEPLOY / "grafana/tandem.json"
PROGRAM = Path("/usr/bin/prometheus")
_COMPARED = re.compile(r"\s(?:==|>|<)\s[-+.e0-9]+$")


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict]:
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30)
        assert answer.status_code == 200, (expression, answer.text)
        return answer.json()["data"]["result"]

    def alerts(self) -> set[str]:
        """Return the names of firing alerts."""
        firing = self.query('ALERTS{alertstate="firing"}')
        return {each["metric"]["alertname"] for each in firing}


@contextmanager
def running_prometheus(folder: Path, endpoint: Endpoint) -> Iterator[Prometheus]:
    """Scrape a stack every second."""
    key = folder / "key"
    made = httpx.post(
        f"{endpoint.url}/api/tandem/v1/keys",
        json={"owner": "prometheus", "role": "metrics"},
        headers={"X-API-Key": endpoint.api_key},
        timeout=30,
    )
    key.write_text(made.json()["key"])
    text = (DEPLOY / "prometheus/prometheus.yml").read_text()
    text = text.replace("gateway:8000", urlsplit(endpoint.url).netloc)
    text = text.replace("/etc/tandem/prometheus/key", str(key)).replace(" 15s", " 1s")
    config = yaml.safe_load(text)
    config["global"]["evaluation_interval"] = "1s"
    config["rule_files"] = [str(RULES)]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{known_port()}"
    command = [str(PROGRAM), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
    try:
        wait_until(lambda: _is_ready(address), what="Prometheus answers")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/-/ready", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def panel_expressions() -> dict[str, list[str]]:
    """Return the expressions of each panel, by its title."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        panel["title"]: [
            target["expr"].replace("$__rate_interval", "1m") for target in panel["targets"]
        ]
        for panel in panels
        if panel["type"] != "row"
    }


def alert_values() -> dict[str, str]:
    """Return the value of each alert, without the comparison that makes it fire."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found = {}
    for rule in group["rules"]:
        value, compared = _COMPARED.subn("", rule["expr"].strip())
        assert compared == 1, f"{rule['alert']} does not end in a comparison with a number"
        found[rule["alert"]] = value
    return found
