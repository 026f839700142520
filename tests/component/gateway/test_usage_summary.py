"""`GET /usage` after a client has trained, saved and sampled."""

from __future__ import annotations

from tinker import ModelInput, SamplingParams

from gateway.owners.auth.keys import NewKey
from tests.support.sdk import supervised


def test_training_saving_and_sampling_are_the_usage_of_their_run(gate, training):
    training.forward_backward([supervised([1, 9, 3])], "cross_entropy").result()
    training.save_state("kept").result()
    sampler = training.save_weights_and_get_sampling_client().result()
    sampler.sample(
        ModelInput.from_ints([1, 2]), num_samples=1, sampling_params=SamplingParams(max_tokens=4)
    ).result()
    stranger = gate.run(gate.gateway.keys.create(NewKey(owner="zoe", role="reader")))[1]
    with gate.http() as admin, gate.http(stranger) as other:
        said = admin.get("/api/tandem/v1/usage").json()
        assert other.get("/api/tandem/v1/usage").json() == {"owners": [], "runs": []}
        path = f"/api/tandem/v1/runs/{training.model_id}/usage"
        assert other.get(path).json()["type"] == "unknown_run"
        use = admin.get(path).json()
    mine = next(run for run in said["runs"] if run["run_id"] == training.model_id)
    assert (mine["owner"], mine["base_model"]) == ("local", "tiny")
    assert mine["training_tokens"] > 0
    assert mine["sampled_tokens"] > 0
    assert mine["accelerator_seconds"] >= 0.5
    assert (mine["checkpoints"], mine["checkpoint_bytes"]) == (1, 15)
    (owner,) = [owner for owner in said["owners"] if owner["owner"] == "local"]
    assert owner["training_tokens"] >= mine["training_tokens"]
    assert use["training_tokens"] == mine["training_tokens"]
    assert use["checkpoint_bytes"] == 15
    assert use["trainer"]["run_seconds"] > 0
    assert use["trainer"]["share"] == use["sampler"]["share"] == 1.0
    assert use["trainer"]["gpu_average"] is None  # unknown, and not 0
