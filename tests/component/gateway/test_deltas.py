"""The gateway's handling of versions that may be deltas."""

from __future__ import annotations

import json

import pytest
import tinker
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.errors import LoadFailed

RUNS = "/api/tandem/v1/runs"


def run_with(service, **asks: str) -> tinker.TrainingClient:
    metadata = {f"tandem.{name}": value for name, value in asks.items()}
    return service.create_lora_training_client("tiny:full", user_metadata=metadata).result()


def publish(training: tinker.TrainingClient) -> None:
    training.save_weights_and_get_sampling_client().result()


def weights(gate, training: tinker.TrainingClient) -> dict:
    with gate.http() as client:
        return client.get(f"{RUNS}/{training.model_id}/steps").json()["weights"]


def test_what_a_delta_has_beside_what_a_reader_gets_is_told(gate, service):
    training = run_with(service, delta="on")
    assert weights(gate, training) == {"deltas": True, "published": None}
    publish(training)
    whole = weights(gate, training)["published"]
    assert whole["delta_of"] == "" and whole["bytes"] == whole["written_bytes"] > 3
    publish(training)
    delta = weights(gate, training)["published"]
    assert delta["delta_of"] == whole["version"] and delta["version"] != whole["version"]
    assert delta["bytes"] == whole["bytes"] > delta["written_bytes"]

    command = ["runs", "show", training.model_id, "--data-dir", str(gate.settings.data_dir)]
    shown = CliRunner().invoke(app, command).stdout
    of = whole["version"].rpartition("/")[2]
    assert "deltas are on; the last version has 0 MiB, of which 0 were written" in shown
    assert f"it is a delta of {of}" in shown
    told = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert told["weights"]["published"] == delta


def test_after_a_load_that_failed_the_next_version_is_whole(gate, service):
    training = run_with(service, delta="on")
    publish(training)
    _, sampler = gate.worker("sampler")
    sampler.load_error = LoadFailed("v2 holds changes of v1, which cannot be read")
    with pytest.raises(tinker.RequestFailedError, match="load_failed"):
        publish(training)
    assert weights(gate, training)["published"]["delta_of"]
    sampler.load_error = None
    publish(training)
    whole = weights(gate, training)["published"]
    assert whole["delta_of"] == ""
    publish(training)
    assert weights(gate, training)["published"]["delta_of"] == whole["version"]


def test_adapters_are_whole_and_a_run_that_asks_for_deltas_of_them_is_refused(gate, service):
    metadata = {"tandem.delta": "on"}
    with pytest.raises(tinker.APIStatusError, match=r"tandem\.delta is on.*trains adapters"):
        service.create_lora_training_client("tiny", user_metadata=metadata).result()
    metadata["tandem.delta"] = "auto"
    training = service.create_lora_training_client("tiny", user_metadata=metadata).result()
    assert weights(gate, training)["deltas"] is False
