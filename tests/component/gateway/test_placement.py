"""Clients ask for places on device groups, and see the waits of their runs."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path

import pytest
import tinker

from gateway.core import Gateway
from gateway.metrics import Metrics
from gateway.workers.epoch import Epoch
from gateway.workers.launchers.base import for_each_kind
from gateway.workers.launchers.kubernetes.resources import pod_request
from tandem.errors import InvalidRequest
from tandem.protocol.worker import Layout
from tandem.settings.cluster import ClaimPoolSettings
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.requests import create_run, finish, retrieve_future, why_waiting
from tests.support.gateway.running import running_gateway, settings_for
from tests.support.model_files import write_weights
from tests.support.waiting import PATIENCE, wait_until

GROUPS = [
    {
        "name": "train",
        "devices": ["cpu:0", "cpu:1"],
        "roles": ["trainer"],
        "workers": 1,
        "awake": 0,
    },
    {"name": "sample", "devices": ["cpu:2"], "roles": ["sampler"], "awake": 0},
]


@pytest.fixture
def start(tmp_path):
    """Start a gateway on the same directory with these groups."""

    def started(**changes):
        return running_gateway(tmp_path, **({"groups": GROUPS, "session_ttl": 600} | changes))

    return started


def trainers(gate) -> list[str]:
    return [spec.session_id for spec in gate.launcher.specs if spec.kind == "trainer"]


def keys(gate) -> set[str]:
    return set(gate.placed())


def test_a_run_waits_for_its_place_tells_its_position_and_starts_when_another_session_ends(start):
    with start() as gate, gate.http() as client:
        first, second, third = (gate.session_id() for _ in range(3))
        gate.run_id(first)
        waiting = create_run(client, second).json()["request_id"]
        later = create_run(client, third).json()["request_id"]
        assert retrieve_future(client, waiting).json()["queue_state"] == "paused_capacity"
        assert why_waiting(client, waiting).startswith(
            "1st in the queue for a place on group train and a place on group sample: "
            "1 workers are there (TANDEM_GROUPS workers)"
        )
        assert why_waiting(client, later).startswith("2nd in the queue")
        assert trainers(gate) == [first], "who waits has no worker"
        finish(client, first)
        assert gate.retrieve(waiting).status_code == 200
        assert why_waiting(client, later).startswith("1st in the queue")
        assert trainers(gate) == [first, second]
        assert [spec.devices for spec in gate.launcher.specs] == [("cpu:0",)] * 2


def test_the_sdk_waits_for_a_place_as_for_any_start(start):
    with start() as gate, gate.http() as client, gate.service() as service:
        first = gate.session_id()
        gate.run_id(first)
        found: list[tinker.TrainingClient] = []
        thread = threading.Thread(
            target=lambda: found.append(service.create_lora_training_client("tiny:full").result())
        )
        thread.start()
        wait_until(gate.waiting_for_places)
        finish(client, first)
        thread.join(PATIENCE)
        assert found[0].get_info().model_id.endswith(":train:0")


def test_the_end_of_a_session_ends_its_waiting(start):
    with start() as gate, gate.http() as client:
        first, second = gate.session_id(), gate.session_id()
        run = gate.run_id(first)
        waiting = create_run(client, second).json()["request_id"]
        wait_until(gate.waiting_for_places)
        finish(client, second)
        assert gate.waiting_for_places() == []
        assert "has ended" in gate.retrieve(waiting).json()["error"]
        assert keys(gate) == {run, f"{first}/tiny/0"}
        finish(client, first)
        assert keys(gate) == set()
        assert trainers(gate) == [first]


def test_places_and_the_queue_survive_a_restart(start):
    with start() as gate, gate.http() as client:
        first, second = gate.session_id(), gate.session_id()
        run = gate.run_id(first)
        waiting = create_run(client, second).json()["request_id"]
        wait_until(gate.waiting_for_places)
    with start() as gate, gate.http() as client:
        assert keys(gate) == {run, f"{first}/tiny/0"}
        for session in (first, second):
            client.post("/api/v1/session_heartbeat", json={"session_id": session})
        wait_until(lambda: trainers(gate) == [first] and gate.waiting_for_places())
        assert why_waiting(client, waiting).startswith("1st in the queue")
        finish(client, first)
        assert gate.retrieve(waiting).status_code == 200


def test_a_run_whose_group_is_gone_after_a_restart_gets_another_place(start):
    with start() as gate:
        session = gate.session_id()
        run = gate.run_id(session)
    renamed = [GROUPS[0] | {"name": "other"}, GROUPS[1]]
    with start(groups=renamed) as gate, gate.http() as client:
        client.post("/api/v1/session_heartbeat", json={"session_id": session})
        wait_until(lambda: trainers(gate) == [session])
        assert gate.placed()[run] == "other"


def test_what_a_run_asks_for_is_what_its_worker_is_started_with(start):
    with start() as gate, gate.http() as client:
        session = gate.session_id()
        asks = {"ranks": "2", "dtype": "bfloat16", "start_timeout": "900", "sampler": "none"}
        gate.retrieve(create_run(client, session, **asks).json()["request_id"])
        (spec,) = gate.launcher.specs
        assert (spec.devices, spec.start_timeout) == (("cpu:0", "cpu:1"), 900)
        assert (spec.trainer.ranks, spec.trainer.dtype) == (2, "bfloat16")
        assert keys(gate) == {spec.run_id}


def test_an_engine_has_the_place_that_its_run_has_taken_for_it(start):
    with start() as gate, gate.http() as client:
        session = gate.session_id()
        run = gate.run_id(session)
        before = keys(gate)
        save = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0}
        request = client.post("/api/v1/save_weights_for_sampler", json=save).json()["request_id"]
        assert gate.retrieve(request).status_code == 200
        (spec,) = [spec for spec in gate.launcher.specs if spec.kind == "sampler"]
        assert spec.devices == ("cpu:2",)
        assert keys(gate) == before


def test_what_cannot_be_given_is_refused_at_once_with_the_reason(start):
    divided = {"ranks": "2", "tensor_parallel": "2"}
    with start(host_memory_bytes=2**30) as gate, gate.http() as client:
        (model,) = client.get("/api/tandem/v1/models").json()["models"]
        config = Path(model["path"]) / "config.json"
        about = json.loads(config.read_text()) | {"num_attention_heads": 9, "num_experts": 1}
        config.write_text(json.dumps(about))
        session = gate.session_id()
        for number, (asks, why) in enumerate(
            (
                ({"ranks": "3"}, "there is: train (2 devices)"),
                ({"group": "sample"}, "known: train"),
                ({"host_memory": "2GiB"}, "it needs 2 GiB of the host's memory"),
                ({"gpus": "1"}, "tandem.gpus is unknown; known: tandem.backend, "),
                ({"dtype": "int8"}, "tandem.dtype is 'int8'; it is auto, float32 or bfloat16"),
                (divided, "tandem.tensor_parallel is 2, and the model tiny cannot be divided"),
                (divided, "so many ranks: its 9 attention heads are not a multiple of it. Choose"),
                ({"ranks": "2"}, "tiny cannot be on 2 ranks: it has 1 experts, and a rank without"),
            )
        ):
            answer = create_run(client, session, number, **asks)
            assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")
            assert why in answer.json()["error"]
        assert gate.gateway.runs.all() == [] and keys(gate) == set()


def test_a_session_asks_for_all_its_runs_and_is_refused_where_it_cannot(start):
    with start() as gate, gate.http() as client:
        wrong = {"tags": [], "sdk_version": "test", "user_metadata": {"tandem.ranks": "many"}}
        answer = client.post("/api/v1/create_session", json=wrong)
        assert answer.status_code == 400
        assert "user_metadata of the session: tandem.ranks is 'many'" in answer.json()["error"]
        right = {"tandem.ranks": "2", "tandem.sampler": "none"}
        gate.run_id(gate.session_id(user_metadata=right))
        assert gate.launcher.specs[0].trainer.ranks == 2


def test_the_states_and_the_layout_that_a_run_asks_for_are_part_of_what_it_trains(start):
    with start() as gate, gate.http() as client:
        asks = {"states": "bfloat16", "offload": "moments", "ranks": "2", "shards": "1"}
        request = create_run(client, gate.session_id(), **asks).json()["request_id"]
        assert gate.retrieve(request).status_code == 200
        (spec,) = [spec for spec in gate.launcher.specs if spec.kind == "trainer"]
        (run,) = gate.gateway.runs.all()
        for training in (spec.training, run.training):
            assert (training.states, training.offload) == ("bfloat16", "moments")
            assert training.layout == Layout(replicas=2)
        about = client.get(f"/api/tandem/v1/runs/{run.id}/steps").json()["run"]
        assert (about["ranks"], about["replicas"], about["tensor_parallel"]) == (2, 2, 1)


def test_a_priority_above_zero_is_for_administrators(start):
    with start() as gate, gate.http() as admin:
        key = admin.post("/api/tandem/v1/keys", json={"owner": "ann", "role": "member"}).json()
        with gate.http(key["key"]) as ann:
            session = gate.session_id(key["key"])
            refused = create_run(ann, session, priority="1")
            assert (refused.status_code, refused.json()["type"]) == (403, "permission_denied")
            assert create_run(ann, session, priority="-1").status_code == 200
        assert create_run(admin, gate.session_id(), priority="1").status_code == 200


async def test_a_gateway_does_not_start_with_groups_that_the_host_cannot_have(tmp_path):
    wrong = [{"name": "g", "devices": ["cpu:0-99"], "roles": ["trainer", "sampler"]}]
    for changes, why in (
        ({"groups": wrong}, "TANDEM_GROUPS: group 'g': cpu:0-99 is not there"),
        ({"model_defaults": {"m": {"ranks": 0}}}, "TANDEM_MODEL_DEFAULTS of m: tandem.ranks is"),
    ):
        gateway = Gateway.open(
            settings_for(tmp_path, **changes),
            launchers=for_each_kind(FakeLauncher()),
            metrics=Metrics(),
            epoch=Epoch(number=1, superseded=lambda: None),
        )
        with pytest.raises(InvalidRequest, match=why):
            async with gateway:
                pass


def test_the_status_says_why_a_run_has_no_place_and_the_groups_who_has_one(start):
    with start() as gate, gate.http() as admin:
        first, second = gate.session_id(), gate.session_id()
        run = gate.run_id(first)
        waiting = create_run(admin, second).json()["model_id"]
        wait_until(gate.waiting_for_places)
        status = admin.get("/api/tandem/v1/status").json()
        reasons = {each["id"]: each["reason"] for each in status["runs"]}
        assert reasons[waiting].startswith("1st in the queue") and reasons[run] == ""
        shown = admin.get("/api/tandem/v1/groups").json()
        train, sample = shown["groups"]
        assert (train["name"], [each["worker"] for each in train["workers"]]) == ("train", [run])
        assert (sample["placed"], [each["worker"] for each in shown["queue"]]) == (1, [waiting])


def test_the_places_of_pods_count_what_they_request_of_their_node(start, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_LAUNCHER", "kubernetes")
    for role in ("TRAINER", "SAMPLER"):
        monkeypatch.setenv(f"TANDEM_KUBERNETES_{role}_IMAGE", "image")
    pool = {"name": "cpu", "roles": ["trainer", "sampler"], "claims": 2, "awake": 0}
    gib = 2**30
    pools = [ClaimPoolSettings(**pool, node_memory_bytes=16 * gib)]
    launcher = FakeLauncher(prepare=partial(pod_request, pools=pools))
    with start(groups=[], claim_pools=pools, launcher=launcher) as gate, gate.http() as client:
        session = gate.session_id()
        (tmp_path / "tiny" / "model.safetensors").unlink()
        refused = create_run(client, session)
        assert refused.status_code == 400
        assert "has no safetensors" in refused.text
        write_weights(tmp_path / "tiny", "weight", [1024, 1024])
        gate.run_id(session)
        (spec,) = gate.launcher.specs
        request = gate.gateway.supervisor.roster.rows[spec.run_id].request
        assert (spec.group, spec.devices) == ("cpu-0", ())
        assert spec.host_memory == request.host_bytes > 4 * 2**20 * 7
        small = {"memory": "1GiB", "sampler_host_memory": "1GiB"}
        large = create_run(client, session, 1, host_memory="15GiB", **small)
        wait_until(lambda: len(gate.launcher.specs) == 2)
        assert gate.launcher.specs[1].group == "cpu-1"  # there is no room for it on the first
        assert gate.launcher.specs[1].host_memory == 15 * gib
        assert large.is_success
        refused = create_run(client, session, 2, host_memory="17GiB")
        assert refused.status_code == 400
        assert "it needs 17 GiB of its node's memory" in refused.text
