from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.settings.gateway import GatewaySettings, settings_fault

GPUS = {"name": "train", "roles": ["trainer"], "device_class": "gpu.nvidia.com"}


def with_pools(monkeypatch, *pools: dict[str, object]) -> GatewaySettings:
    monkeypatch.setenv("TANDEM_CLAIM_POOLS", json.dumps(pools))
    return GatewaySettings()


def test_a_pool_without_a_device_class_makes_no_claims(monkeypatch):
    gpus, cpus = with_pools(monkeypatch, GPUS, {"name": "cpu", "roles": ["sampler"]}).claim_pools
    assert gpus.has_claims
    assert not cpus.has_claims


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"roles": ["sampler"], "nodes": 2}, "pool 'train' has 2 nodes; only a pool for trainers"),
        ({"roles": ["trainer", "sampler"], "nodes": 2}, "a sampler is one pod"),
        ({"roles": []}, "TANDEM_CLAIM_POOLS_0_ROLES: List should have at least 1 item"),
        ({"devices": 33}, "less than or equal to 32"),
        ({"claims": 0}, "greater than or equal to 1"),
        ({"name": "Train"}, "TANDEM_CLAIM_POOLS_0_NAME is 'Train': String should match"),
        ({"name": "train-0"}, "it must not end like that of a claim, NAME-0"),
        ({"device_class": "gpu_nvidia"}, "TANDEM_CLAIM_POOLS_0_DEVICE_CLASS is 'gpu_nvidia'"),
        ({"selectors": [" "]}, "TANDEM_CLAIM_POOLS_0_SELECTORS_0 is ' '"),
        ({"selectors": ["true"] * 33}, "at most 32 items"),
        ({"device_class": "", "selectors": ["true"]}, "has no device_class"),
        ({"alternatives": [{"device_class": "a"}]}, "device_class and selectors are said in each"),
        ({"device_class": "", "alternatives": []}, "at least 1 item"),
        ({"device_class": "", "alternatives": [{"device_class": "a"}] * 9}, "at most 8 items"),
        ({"device_class": "", "alternatives": [{"device_class": ""}]}, "DEVICE_CLASS is ''"),
        ({"sharing": "half"}, "'exclusive', 'time_slice' or 'mps'"),
        ({"workers": 257}, "less than or equal to 256"),
        ({"gpus": 1}, "TANDEM_CLAIM_POOLS_0_GPUS is '1': Extra inputs are not permitted"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_what_is_wrong(monkeypatch, changes, fault):
    with pytest.raises(ValidationError) as raised:
        with_pools(monkeypatch, GPUS | changes)
    assert fault in settings_fault(raised.value)


@pytest.mark.parametrize(
    "name",
    [
        "NAMESPACE",
        "INSTANCE",
        "VOLUME_CLAIM",
    ],
)
def test_what_is_no_name_in_kubernetes_is_refused(monkeypatch, name):
    monkeypatch.setenv(f"TANDEM_KUBERNETES_{name}", "No_Name")
    with pytest.raises(ValidationError) as raised:
        GatewaySettings()
    assert settings_fault(raised.value).startswith(f"TANDEM_KUBERNETES_{name} is 'No_Name': ")


def test_the_configuration_shows_pools_and_what_concerns_pods(monkeypatch):
    with_pools(monkeypatch, GPUS)
    monkeypatch.setenv("TANDEM_KUBERNETES_TRAINER_IMAGE", "registry.test/trainer:1")
    said = CliRunner().invoke(app, ["config"]).stdout
    assert "TANDEM_KUBERNETES_TRAINER_IMAGE=registry.test/trainer:1" in said
    (line,) = [each for each in said.splitlines() if each.startswith("TANDEM_CLAIM_POOLS=")]
    assert json.loads(line.partition("=")[2])[0]["device_class"] == "gpu.nvidia.com"
