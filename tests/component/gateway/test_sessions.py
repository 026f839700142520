"""Keys, sessions, runs and checkpoints, with fake workers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading

import pytest
import tinker
from sqlalchemy import select
from tinker import types

from gateway.storage.tables import sessions
from tests.support.files import entries
from tests.support.gateway.requests import asample, finish, new_sampler, optim_step
from tests.support.gateway.running import KEY, make_model, running_gateway
from tests.support.waiting import PATIENCE, wait_until

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=3)


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with running_gateway(
        tmp_path_factory.mktemp("sessions"), session_ttl=600, max_waiting_samples=3
    ) as gate:
        yield gate


def training_client(service):
    return service.create_lora_training_client("tiny:full").result()


def versions_of(gate, run_id: str) -> set[str]:
    folder = gate.settings.data_dir / "weights" / run_id.replace(":", "_")
    return {child.name for child in entries(folder)}


# --- Keys, paths, bodies ------------------------------------------------------------------


def test_every_refusal_is_json_with_a_sentence(gate):
    with gate.http() as client:
        for answer, status in (
            (client.get("/api/v1/no_such_thing"), 404),
            (client.get("/api/v1/asample"), 405),
            (client.post("/api/v1/asample", content=b"{"), 400),
            (client.post("/api/v1/create_model", json={}), 400),
            (client.post("/api/v1/optim_step", json={"model_id": "x", "seq_id": 1}), 404),
            (client.post("/api/v1/retrieve_future", json={"request_id": "nonsense"}), 404),
            (client.post("/api/v1/retrieve_future", json={"request_id": "s-1:train:0:1"}), 404),
        ):
            assert answer.status_code == status
            assert answer.json()["error"]
            assert answer.json()["category"] == "user"


# --- Sessions -----------------------------------------------------------------------------


def test_an_unknown_session_is_404_and_a_finished_one_410(gate):
    with gate.http() as client:
        session = gate.session_id()
        create = {"session_id": "s-none", "model_seq_id": 0, "base_model": "tiny:full"}
        assert client.post("/api/v1/create_model", json=create).status_code == 404
        for reason in ("errored", "success"):
            assert finish(client, session, reason).status_code == 204
        beat = client.post("/api/v1/session_heartbeat", json={"session_id": session})
        assert beat.status_code == 410
        assert "errored" in beat.json()["error"]
        unknown = client.post("/api/v1/session_heartbeat", json={"session_id": "s-none"})
        assert unknown.status_code == 404


def test_a_session_without_heartbeat_ends_and_its_operations_fail(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        session = gate.session_id()
        run_id = gate.run_id(session)
        _, trainer = gate.worker("trainer")
        gate.run(trainer.gate.clear)
        partial = gate.settings.data_dir / "weights" / run_id.replace(":", "_") / ".partial-v1"
        partial.mkdir(parents=True)
        optim_step(client, run_id, 1)
        gate.gateway.sessions.get(session).seen_at -= 601  # the last heartbeat is long ago
        wait_until(lambda: not gate.gateway.runs.all())
        assert gate.retrieve(f"{run_id}:1").json()["type"] == "session_finished"
        wait_until(lambda: not partial.exists())
        assert [w.partition("-")[0] for w in gate.launcher.stopped] == ["trainer"]
        assert optim_step(client, run_id, 2).status_code == 410


_ENDS_WITHOUT_A_WORD = """
import os, sys, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
print(service.create_lora_training_client("tiny:full").result().model_id, flush=True)
os._exit(0)
"""
"""The SDK's threads can abort an interpreter that ends in order."""


def test_sessions_end_while_much_is_removed(tmp_path, monkeypatch):
    """An earlier gateway left a large folder in its trash."""
    removing, go_on, remove = threading.Event(), threading.Event(), shutil.rmtree

    def slow(path, **options):
        if path.parent.name == ".trash":
            removing.set()
            assert go_on.wait(PATIENCE)
        remove(path, **options)

    monkeypatch.setattr("shutil.rmtree", slow)
    large = tmp_path / "data" / "weights" / ".trash" / "0123456789abcdef"
    large.mkdir(parents=True)
    with running_gateway(tmp_path, session_ttl=0.5) as gate:
        try:
            assert removing.wait(PATIENCE)
            session_id = gate.session_id()
            wait_until(lambda: gate.gateway.sessions.get(session_id) is None)
            assert large.exists()
        finally:
            go_on.set()
        wait_until(lambda: list(large.parent.iterdir()) == [])


def test_the_session_of_a_script_that_ended_without_closing_ends_when_it_is_silent(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        command = [sys.executable, "-c", _ENDS_WITHOUT_A_WORD, gate.url, KEY]
        run_id = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        gate.age_sessions(600)
        wait_until(lambda: not gate.gateway.runs.all())
        (ended,) = gate.run(gate.gateway.database.read(select(sessions)))
        assert (ended["id"], ended["state"]) == (run_id.partition(":")[0], "expired")
        assert ended["detail"] == "no heartbeat for 600 s"
        assert [w.partition("-")[0] for w in gate.launcher.stopped] == ["trainer"]


def test_a_session_that_ends_while_its_workers_start_leaves_none(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        gate.run(gate.launcher.start_gate.clear)
        session = gate.session_id()
        create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny:full"}
        created = client.post("/api/v1/create_model", json=create).json()
        wait_until(lambda: gate.launcher.specs)
        polled = client.post("/api/v1/retrieve_future", json={"request_id": created["request_id"]})
        assert polled.status_code == 408
        assert polled.json()["queue_state"] == "paused_capacity"
        assert "the trainer is starting" in polled.json()["queue_state_reason"]
        finish(client, session)
        outcome = gate.retrieve(created["request_id"]).json()
        assert outcome["type"] == "session_finished"
        assert gate.gateway.processes.list_records() == []


# --- Runs and checkpoints -----------------------------------------------------------------


def test_an_unknown_model_is_refused_at_once_and_the_known_are_named(gate):
    with (
        gate.service() as service,
        pytest.raises(tinker.NotFoundError, match=r"unknown model 'huge'; known: tiny"),
    ):
        service.create_lora_training_client("huge:full").result()


@pytest.mark.parametrize(
    ("model", "metadata"), [("tiny:full", None), ("tiny", {"tandem_training": "full"})]
)
def test_full_training_is_asked_for_by_suffix_or_metadata(gate, model, metadata):
    with gate.service() as service:
        training = service.create_lora_training_client(model, user_metadata=metadata).result()
        info = training.get_info()
        assert (info.is_lora, info.lora_rank) == (False, None)
        assert gate.worker("trainer")[1].spec.training.lora is None


def test_an_unknown_kind_of_training_is_refused(gate):
    with gate.service() as service:
        with pytest.raises(tinker.BadRequestError, match="the suffix 'huge'"):
            service.create_lora_training_client("tiny:huge").result()
        with pytest.raises(tinker.BadRequestError, match="tandem_training is 'half'"):
            service.create_lora_training_client(
                "tiny", user_metadata={"tandem_training": "half"}
            ).result()


def test_named_weights_are_sampled_from_by_their_path_and_outlive_the_session(gate):
    with gate.service() as service:
        training = training_client(service)
        path = training.save_weights_for_sampler("best").result().path
        with pytest.raises(tinker.RequestFailedError, match="name_taken"):
            training.save_weights_for_sampler("best").result()
        unnamed = training.save_weights_and_get_sampling_client().result()
        assert unnamed.sample(PROMPT, 1, PARAMS).result().sequences
        assert len(versions_of(gate, training.model_id)) == 2
    assert len(versions_of(gate, training.model_id)) == 1
    with gate.service() as service:
        sampling = service.create_sampling_client(model_path=path).result()
        assert sampling.get_base_model() == "tiny"
        assert sampling.sample(PROMPT, 1, PARAMS).result().sequences
        session = sampling._sampling_session_id.partition(":")[0]
        request = gate.worker(f"sampler-{session}")[1].requests[-1]
        assert request.version.run_id == training.model_id
        with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
            service.create_sampling_client(model_path=path + "x").result()


# --- Sampling sessions --------------------------------------------------------------------


def test_inflight_samplers_follow_the_newest_inflight_save(gate):
    with gate.service() as service:
        training = training_client(service)
        first = training.save_weights_and_get_sampling_client(kind="inflight").result()
        frozen = training.save_weights_and_get_sampling_client().result()
        training.optim_step(types.AdamParams()).result()
        training.save_weights_and_get_sampling_client(kind="inflight").result()
        _, sampler = gate.worker(f"sampler-{training.model_id.partition(':')[0]}")
        first.sample(PROMPT, 1, PARAMS).result()
        assert sampler.requests[-1].version.name == sampler.loaded[2]
        assert sampler.requests[-1].version.step == 1
        assert sampler.requests[-1].in_flight
        frozen.sample(PROMPT, 1, PARAMS).result()
        assert sampler.requests[-1].version.name == sampler.loaded[1]
        assert not sampler.requests[-1].in_flight


def test_the_versions_of_the_tokens_of_a_request_that_was_in_flight_can_be_asked_for(gate):
    with gate.service() as service, gate.http() as client:
        training = training_client(service)
        sampling = training.save_weights_and_get_sampling_client(kind="inflight").result()
        frozen = training.save_weights_and_get_sampling_client().result()
        requests = []
        for each in (sampling, frozen):
            first, second = each.sample(PROMPT, 2, PARAMS).result().sequences
            request_id, _, index = second.sequence_id.rpartition(":")
            assert first.sequence_id == f"{request_id}:0" and index == "1"
            requests.append(request_id)
        found, alike = (
            client.get(f"/api/tandem/v1/samples/{each}/versions").json() for each in requests
        )
        run = {"version": found["weight_version"], "step": 0, "tokens": 3}
        assert found["samples"] == [[run], [run]]
        assert alike["weight_version"] != found["weight_version"] and alike["samples"] == []
        unknown = client.get(f"/api/tandem/v1/samples/{requests[0]}0/versions")
        assert unknown.status_code == 404 and unknown.json()["type"] == "unknown_request"


@pytest.fixture
def house_is_kept_often(monkeypatch):
    monkeypatch.setattr("gateway.housekeeping._HOUSEKEEPING_INTERVAL", 0.05)


@pytest.mark.usefixtures("house_is_kept_often")
def test_idle_snapshots_expire_but_the_newest_stays(tmp_path):
    with (
        running_gateway(tmp_path, session_ttl=600, sampler_idle_ttl=0.01) as gate,
        gate.service() as service,
    ):
        training = training_client(service)
        clients = [training.save_weights_and_get_sampling_client().result() for _ in range(3)]
        wait_until(lambda: len(versions_of(gate, training.model_id)) == 1)
        assert clients[2].sample(PROMPT, 1, PARAMS).result().sequences
        with pytest.raises(tinker.NotFoundError, match="has ended"):
            clients[0].sample(PROMPT, 1, PARAMS).result()


@pytest.mark.usefixtures("house_is_kept_often")
def test_of_many_copies_of_the_model_the_newest_and_the_used_ones_stay(tmp_path):
    kept = {"sampler_newest_kept": 2, "sampler_superseded_ttl": 100}
    with running_gateway(tmp_path, session_ttl=600, **kept) as gate, gate.service() as service:
        full, lora = (
            service.create_lora_training_client(model).result() for model in ("tiny:full", "tiny")
        )
        clients = [full.save_weights_and_get_sampling_client().result() for _ in range(6)]
        for _ in range(6):
            lora.save_weights_and_get_sampling_client().result()
        wait_until(lambda: len(versions_of(gate, lora.model_id)) == 6)

        def time_passes(seconds: float) -> None:
            for session in gate.gateway.sampling.all():
                session.used_at -= seconds

        def kept_numbers() -> list[int]:
            return sorted(int(name[1:7]) for name in versions_of(gate, full.model_id))

        gate.run(lambda: time_passes(70))
        clients[1].sample(PROMPT, 1, PARAMS).result()
        gate.run(lambda: time_passes(40))
        sampled_from_and_newest_two = [2, 5, 6]
        wait_until(lambda: kept_numbers() == sampled_from_and_newest_two)
        wait_until(lambda: len(versions_of(gate, lora.model_id)) == 2)
        assert clients[4].sample(PROMPT, 1, PARAMS).result().sequences
        with pytest.raises(tinker.NotFoundError, match="Save weights under a name to keep them"):
            clients[0].sample(PROMPT, 1, PARAMS).result()


def samples_of(gate, sampler_id: str):
    """The requests of a sampling session's session at its engine."""
    session_id = sampler_id.partition(":")[0]
    _, sampler = gate.worker(f"sampler-{session_id}")
    return [request for request in sampler.requests if request.session_id == session_id]


def test_a_repeated_sample_is_the_same_request(gate):
    with gate.http() as client:
        sampler_id = new_sampler(gate)
        first = asample(client, sampler_id, 5, num_samples=2).json()
        assert asample(client, sampler_id, 5, num_samples=2).json() == first
        assert len(first["sample_sequence_ids"]) == 2
        answer = gate.retrieve(first["request_id"])
        assert answer.headers["content-type"] == "application/x-protobuf"
        assert answer.headers["x-tandem-weight-version"] == "base/tiny"
        assert len(samples_of(gate, sampler_id)) == 1


def test_another_sample_with_a_taken_seq_id_is_refused_by_name(gate):
    with gate.http() as client:
        sampler_id = new_sampler(gate)
        first = asample(client, sampler_id, 5).json()

        def refused() -> None:
            other = asample(client, sampler_id, 5, sampling_params={"max_tokens": 1})
            assert (other.status_code, other.json()["type"]) == (400, "sequence_taken")
            assert other.json()["error"].startswith(
                f"sample 5 of {sampler_id} is already another request"
            )

        refused()
        gate.retrieve(first["request_id"])
        refused()
        assert asample(client, sampler_id, 5).json() == first
        assert len(samples_of(gate, sampler_id)) == 1


def test_another_sampling_session_with_a_taken_number_is_refused_by_name(gate, service):
    training = service.create_lora_training_client("tiny").result()
    path = training.save_weights_for_sampler("kept").result().path
    session = gate.session_id()
    new = {"session_id": session, "sampling_session_seq_id": 3}
    named, base = new | {"model_path": path}, new | {"base_model": "tiny"}
    with gate.http() as client:

        def ask(body):
            return client.post("/api/v1/create_sampling_session", json=body)

        for first, other in ((base, named), (named, base)):
            created = ask(first).json()
            assert ask(first).json() == created
            refused = ask(other)
            assert (refused.status_code, refused.json()["type"]) == (400, "sequence_taken")
            first["sampling_session_seq_id"] = other["sampling_session_seq_id"] = 4
        by_path = {"base_model": gate.gateway.models.get("tiny").path + "/"}
        base["sampling_session_seq_id"] = 3
        assert ask(base | by_path).json() == ask(base).json()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"prompt_alt_tokens_k": 2000}, "invalid_request"),
        ({"prompt_alt_tokens_k": -1}, "invalid_request"),
        ({"prompt_logprobs_last_n": 1}, "invalid_request"),
        ({"prompt_logprobs_last_n": 0, "prompt_logprobs": True}, "invalid_request"),
        ({"target_prompt_logprobs": {"data": [1]}}, "invalid_request"),
        ({"target_prompt_logprobs": {"data": [1.0], "dtype": "float32"}}, "invalid_request"),
        (
            {"target_prompt_logprobs": {"data": [2**70], "dtype": "int64", "shape": [1, 1]}},
            "token_out_of_vocabulary",
        ),
        ({"topk_prompt_logprobs": 1001}, "invalid_request"),
        ({"topk_sample_logprobs": -1}, "invalid_request"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "unsupported_input"),
        ({"prompt": {"chunks": [{"type": "dmel", "dmel": ""}]}}, "unsupported_input"),
        ({"prompt": {"chunks": []}}, "empty_batch"),
        (
            {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**40]}]}},
            "token_out_of_vocabulary",
        ),
        ({"num_samples": 0}, "invalid_request"),
        ({"sampling_params": {"temperature": -1}}, "invalid_request"),
    ],
)
def test_what_a_sample_may_not_ask_for_is_refused_with_its_type(gate, changes, kind):
    with gate.http() as client:
        answer = asample(client, new_sampler(gate), 1, **changes)
        assert answer.status_code == 400
        assert answer.json()["type"] == kind


def test_an_unknown_sampling_session_is_404(gate):
    with gate.http() as client:
        answer = asample(client, "s-none:sample:0")
        assert answer.status_code == 404
        assert answer.json()["type"] == "unknown_sampler"
        assert client.get("/api/v1/samplers/s-none:sample:0").status_code == 404


# --- Our own routes -----------------------------------------------------------------------


def test_models_are_added_listed_and_removed(gate, tmp_path):
    with gate.http() as client:
        own = "/api/tandem/v1"
        path = str(make_model(tmp_path / "model"))
        added = client.post(f"{own}/models", json={"name": "org/other", "path": path})
        assert added.json() == {"name": "org/other", "path": path, "max_length": 64, "note": ""}
        variant = client.post(f"{own}/models", json={"name": "org/other/v2", "path": path}).json()
        assert "'org/other/v2' in 'org/other'" in variant["note"]
        assert f"{path}/" in variant["note"], "the name that works"
        assert client.delete(f"{own}/models/org/other/v2").status_code == 204
        names = [m["name"] for m in client.get(f"{own}/models").json()["models"]]
        assert names == ["tiny", "org/other"]
        assert client.delete(f"{own}/models/org/other").status_code == 204
        assert client.delete(f"{own}/models/org/other").status_code == 404
        for wrong in ({"name": "x", "path": "relative"}, {"name": "x:y", "path": path}):
            answer = client.post(f"{own}/models", json=wrong)
            assert answer.status_code == 400
        nowhere = client.post(f"{own}/models", json={"name": "x", "path": "/nowhere"})
        assert "it has no config.json" in nowhere.json()["error"]


def test_status_shows_runs_workers_and_queues_and_config_no_secret(gate):
    with gate.service() as service, gate.http() as client:
        training = training_client(service)
        training.save_weights_and_get_sampling_client().result()
        status = client.get("/api/tandem/v1/status").json()
        run = next(r for r in status["runs"] if r["id"] == training.model_id)
        assert (run["state"], run["queued"]) == ("ready", 0)
        session = training.model_id.partition(":")[0]
        workers = {w["kind"]: w for w in status["workers"] if w["session_id"] == session}
        assert set(workers) == {"trainer", "sampler"}
        config = client.get("/api/tandem/v1/config")
        assert config.json()["min_free_bytes"] == 0
        assert KEY not in config.text
        assert client.get("/api/tandem/v1/version").json()["version"]
