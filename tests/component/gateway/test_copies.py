"""Copies of checkpoints are independent of their source."""

from __future__ import annotations

import datetime as dt
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker
from tinker import types

from tests.support.gateway.checkpoints import listed, place, step
from tests.support.waiting import wait_until


def run_of(path: str) -> str:
    return path.removeprefix("tinker://").partition("/")[0]


def test_a_copied_state_outlives_its_source_and_continues_it(gate, service, training, rest):
    step(training, 2)
    path = training.save_state("mine", user_metadata={"a": "b"}).result().path
    copy = rest.copy_weights(path, "archive", ttl_seconds=3600).result()
    assert run_of(copy) != training.model_id
    assert copy.endswith("/weights/mine")
    (source,), (target,) = place(gate, training.model_id), place(gate, run_of(copy))
    for name in ("rank-0-0.safetensors", "checkpoint.json"):
        assert (target / name).stat().st_ino == (source / name).stat().st_ino, "no byte is copied"
    found = listed(rest, run_of(copy))[copy]
    assert (found.size_bytes, found.user_metadata, found.public) == (15, {"a": "b"}, False)
    assert found.expires_at - found.time == dt.timedelta(hours=1)

    rest.delete_checkpoint_from_tinker_path(path).result()
    wait_until(lambda: place(gate, training.model_id) == [])
    unrestored = {"tandem.recovery": "off"}  # a replay could load it again
    service.create_training_client_from_state_with_optimizer(
        copy, user_metadata=unrestored
    ).result()
    _, trainer = gate.worker("trainer")
    assert trainer.step == 2
    rest.delete_checkpoint_from_tinker_path(copy).result()
    wait_until(lambda: place(gate, run_of(copy)) == [])


def test_copied_weights_for_sampling_are_served_under_their_own_name(gate, training, rest):
    path = training.save_weights_for_sampler("mine").result().path
    copy = rest.copy_weights(path, "archive").result()
    with gate.service() as other:
        client = other.create_sampling_client(model_path=copy).result()
        prompt = types.ModelInput.from_ints([1, 2])
        client.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result()
        _, sampler = gate.worker("sampler")
        version = sampler.requests[-1].version
    assert version.name.startswith(run_of(copy) + "/v000001-")
    assert version.run_id == run_of(copy)
    (folder,) = place(gate, run_of(copy), "weights")
    assert version.path == str(folder)
    assert f'"version": "{version.name}"' in (folder / "manifest.json").read_text()


def test_a_copy_of_external_weights_can_be_downloaded(training, rest):
    path = training.save_weights_external("mine").result().path
    copy = rest.copy_weights(path, "archive").result()
    urls = rest.get_external_weights_urls(copy).result().urls
    assert set(urls) == {"model.safetensors", "config.json"}


def test_a_copys_run_is_there_and_cannot_be_trained(gate, service, training, rest):
    path = training.save_state("mine").result().path
    session_id = training.model_id.partition(":")[0]
    with gate.http() as client:
        body = {"source_path": path, "session_id": session_id, "model_seq_id": 77}
        answer = client.post("/api/v1/copy_weights", json=body)
        assert answer.json() == {"tinker_path": f"tinker://{session_id}:train:77/weights/mine"}
        again = client.post("/api/v1/copy_weights", json=body)
        assert again.json() == answer.json()
        refused = client.post(
            "/api/v1/optim_step",
            json={"model_id": f"{session_id}:train:77", "seq_id": 1, "adam_params": {}},
        )
        assert refused.status_code == 410
        assert f"holds a copy of {path}" in refused.json()["error"]
        taken = client.post("/api/v1/copy_weights", json={**body, "model_seq_id": 0})
        assert (taken.status_code, taken.json()["type"]) == (400, "invalid_request")
    copy = rest.copy_weights(path, "archive").result()
    run = rest.get_training_run(run_of(copy)).result()
    assert run.base_model == "tiny"
    with pytest.raises(tinker.NotFoundError):
        service.create_training_client_from_state(copy.replace("mine", "other")).result()


def test_a_copy_that_is_being_made_is_not_collected_for_an_earlier_try(
    gate, training, rest, monkeypatch
):
    path = training.save_state("mine").result().path
    run_id = f"{training.model_id.partition(':')[0]}:train:78"
    link, complete = os.link, []

    def link_while_collected(file, target):
        if not complete:
            complete.append(gate.run(gate.gateway.collect(run_id)))
        link(file, target)

    monkeypatch.setattr("os.link", link_while_collected)
    session_id, _, number = run_id.partition(":train:")
    body = {"source_path": path, "session_id": session_id, "model_seq_id": int(number)}
    with gate.http() as client:
        answer = client.post("/api/v1/copy_weights", json=body)
    assert answer.json() == {"tinker_path": f"tinker://{run_id}/weights/mine"}
    assert complete == [False], "there is something that is worth another look"


def test_one_key_makes_one_copy_however_often_it_is_sent(gate, training, rest):
    path = training.save_state("mine").result().path
    body = {"source_path": path, "destination_project_id": "archive"}

    def ask(key: str) -> str:
        with gate.http() as client:
            answer = client.post(
                "/api/v1/copy_weights", json=body, headers={"X-Idempotency-Key": key}
            )
            return answer.json()["tinker_path"]

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(ask, ["one"] * 8))
    assert len(found) == 1
    assert ask("one") in found
    assert ask("two") not in found


def test_a_copy_needs_a_destination(gate, training):
    path = training.save_state("mine").result().path
    with gate.http() as client:
        for more in ({}, {"session_id": training.model_id.partition(":")[0]}):
            answer = client.post("/api/v1/copy_weights", json={"source_path": path, **more})
            assert answer.status_code == 400
        gone = client.post(
            "/api/v1/copy_weights",
            json={"source_path": path, "destination_project_id": "p", "ttl_seconds": 5},
        )
        assert (gone.status_code, "ten years" in gone.json()["error"]) == (400, True)
