"""Two owners' sessions share a group. Each sees its own use and its reasons to wait."""

from __future__ import annotations

import json
import re
import threading

import pytest
from typer.testing import CliRunner

from gateway.owners.auth.keys import NewKey
from tandem.cli.main import app
from tandem.errors import UnknownGroup
from tests.support.audit_log import audit_log
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.fake_trainer import FakeTrainer
from tests.support.gateway.running import forward_backward_bytes, running_gateway
from tests.support.gateway.runs import SELDOM, undisturbed
from tests.support.waiting import until, wait_until

GROUPS = [
    {"name": "gpu", "devices": ["cpu:0"], "roles": ["trainer", "sampler"]},
    {"name": "spare", "devices": ["cpu:1"], "roles": ["trainer"]},
]
PROTO = {"Content-Type": "application/x-protobuf"}
OWN = "/api/tandem/v1"


class Experiment:
    """A session with a run on the group `gpu`, over HTTP."""

    def __init__(self, gate, owner: str) -> None:
        self.gate = gate
        key = gate.run(gate.gateway.keys.create(NewKey(owner=owner, role="member")))[1]
        self.client = gate.http(key)
        body = {"tags": [], "sdk_version": "test"}
        self.session = self.post("create_session", **body)["session_id"]
        answer = self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=0,
            base_model="tiny:full",
            user_metadata={"tandem.group": "gpu"},
        )
        self.run = answer["model_id"]
        gate.retrieve(answer["request_id"])
        self.seq_id = 0

    @property
    def trainer(self):
        return self.gate.worker(f"trainer-{self.session}")[1]

    def post(self, route: str, **body: object) -> dict:
        answer = self.client.post(f"/api/v1/{route}", json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def get(self, path: str) -> dict:
        answer = self.client.get(f"{OWN}/{path}")
        assert answer.is_success, answer.text
        return answer.json()

    def step(self) -> str:
        """Send a batch and a step. Return the step's request id."""
        self.seq_id += 2
        body = forward_backward_bytes(self.run, self.seq_id - 1)
        self.client.post("/api/v1/forward_backward", content=body, headers=PROTO)
        step = {"model_id": self.run, "seq_id": self.seq_id, "adam_params": {}}
        return self.post("optim_step", **step)["request_id"]

    def sample(self) -> str:
        sampler = self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=0,
            base_model="tiny",
        )
        return self.post(
            "asample",
            sampling_session_id=sampler["sampling_session_id"],
            seq_id=0,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            sampling_params={"max_tokens": 2},
        )["request_id"]

    def asked(self, request_id: str):
        return self.client.post("/api/v1/retrieve_future", json={"request_id": request_id})

    def why_without_devices(self, request_id: str) -> str:
        """Return the reason once a request waits for devices."""

        def why() -> str:
            answer = self.asked(request_id)
            assert answer.status_code == 408
            told = answer.json()["queue_state_reason"]
            waits = (
                answer.json()["queue_state"] == "paused_capacity" and "for the devices of" in told
            )
            return told if waits else ""

        return wait_until(why)

    def done(self, request_id: str) -> None:
        wait_until(lambda: self.asked(request_id).status_code == 200)

    def at_work(self) -> str:
        """Hold the devices while the trainer's gate is closed."""
        self.done(self.step())  # takes the devices
        self.gate.run(self.trainer.gate.clear)
        return self.step()

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def start(tmp_path):
    def started(**changes):
        sharing = {"quantum": 600, "max_wait": 600}
        return running_gateway(
            tmp_path, **({"groups": GROUPS, "session_ttl": 600, "sharing": sharing} | changes)
        )

    return started


@pytest.fixture
def gate(start):
    with start() as gate:
        yield gate


@pytest.fixture
def ann(gate):
    experiment = Experiment(gate, "ann")
    yield experiment
    experiment.close()


@pytest.fixture
def ben(gate):
    experiment = Experiment(gate, "ben")
    yield experiment
    experiment.close()


def group(caller, name: str = "gpu") -> dict:
    return next(group for group in caller.get("groups")["groups"] if group["name"] == name)


def test_an_operation_that_waits_for_devices_says_its_position_and_why(gate, ann, ben):
    first = ann.at_work()
    second = ben.step()
    why = ben.why_without_devices(second)
    assert why.startswith("1st in the queue for the devices of group gpu: 1 workers are awake")
    gate.run(ann.trainer.gate.set)
    ann.done(first)
    ben.done(second)
    assert ann.trainer.switches[-1] == "sleep"


def test_a_trainer_that_cannot_sleep_is_suspended_and_resumed_by_its_host(gate, ann, ben):
    ann.done(ann.step())  # it is awake
    ann.trainer.knows_how = False
    for experiment in (ben, ann):
        experiment.done(experiment.step())
    moves, workers, leases = zip(*gate.launcher.suspended, strict=True)
    assert moves == ("suspend", "resume")
    assert len(set(workers)) == 1 and workers[0].startswith(f"trainer-{ann.session}")
    assert 0 < leases[0] < leases[1]


def test_a_trainer_that_cannot_be_suspended_is_killed_before_another_has_its_devices(
    gate, ann, ben
):
    ann.done(ann.step())
    ann.trainer.knows_how = False
    gate.launcher.suspend_error = "not supported"
    ben.done(ben.step())
    (killed,) = set(gate.launcher.stopped)
    assert killed.startswith(f"trainer-{ann.session}")
    ann.done(ann.step())  # in a new process


def test_a_restored_trainer_gives_way_in_the_middle_of_its_replay(start):
    """Another run's step comes after the first replayed one."""
    held, released, applied = threading.Event(), threading.Event(), []

    class Trainer(FakeTrainer):
        async def OptimStep(self, request, context):
            if trainers.index(self) == 2 and request.header.seq_id - 1 == 2:
                held.set()
                await until(released.is_set)
            return await super().OptimStep(request, context)

        async def _apply(self, kind, run, request):
            applied.append((trainers.index(self), request.header.seq_id - 1))
            await super()._apply(kind, run, request)

    trainers: list[FakeTrainer] = []

    def made(spec):
        trainers.append(Trainer(spec))
        return trainers[-1]

    sharing = {"quantum": 0, "max_wait": 600}
    with start(sharing=sharing, recovery=SELDOM, launcher=FakeLauncher(made)) as gate:
        ann, ben = Experiment(gate, "ann"), Experiment(gate, "ben")
        for _ in range(3):
            ann.done(ann.step())
        ben.done(ben.step())
        applied.clear()
        gate.run(gate.launcher.kill(ann.trainer.spec.worker_id, "it was killed by SIGKILL"))
        fourth = ann.step()
        assert held.wait(30)
        other = ben.step()
        wait_until(lambda: group(ann)["workers"][0]["state"] == "giving_way")
        released.set()
        for experiment, step in ((ben, other), (ann, fourth)):
            experiment.done(step)
        before = [(2, 1), (2, 2), (1, 3), (1, 4)]
        assert applied == [*before, *((2, seq_id) for seq_id in range(3, 9))]
        assert ann.trainer.history == undisturbed(4)
        ann.close(), ben.close()


def test_a_sample_that_waits_for_devices_says_so(gate, ann, ben):
    training = ann.at_work()
    sample = ben.sample()
    why = ben.why_without_devices(sample)
    assert re.match(r"the sampler is not started yet \(\d+ s\): 1st in the queue for the dev", why)
    assert "0 samples before this one" in why
    gate.run(ann.trainer.gate.set)
    ann.done(training)
    ben.done(sample)


def test_who_has_the_devices_and_who_waits_is_shown_without_other_owners_names(gate, ann, ben):
    training = ann.at_work()
    waiting = ben.step()
    wait_until(lambda: group(ben)["workers"][1]["state"] == "waiting")
    holder, waiter, *_engines = group(ben)["workers"]
    assert (holder["state"], holder["worker"], holder["owner"]) == ("awake", "", "")
    assert holder["seconds"] == holder["device_seconds"] == holder["device_bytes"] == 0
    assert (waiter["worker"], waiter["owner"], waiter["position"]) == (ben.run, "ben", 1)
    assert waiter["expected_seconds"] > 0
    assert waiter["reason"].startswith("1st in the queue for the devices of group gpu")
    for secret in (ann.session, "ann"):
        assert secret not in json.dumps(ben.get("groups"))
    with gate.http() as admin:
        listed = admin.get(f"{OWN}/groups").json()
        (gpu, spare) = listed["groups"]
    assert listed["memory"]["budget_bytes"] > 0
    assert ben.get("groups")["memory"] is None
    assert [worker["owner"] for worker in gpu["workers"]][:2] == ["ann", "ben"]
    assert (gpu["placed"], gpu["most_workers"], gpu["devices"]) == (4, 16, ["cpu:0"])
    assert gpu["sleeping_bytes"] > 0 and gpu["switches"] > 0
    assert spare["workers"] == []
    metrics = gate.http().get("/metrics").text
    assert 'tandem_gateway_lease_waiters{group="gpu"} 1.0' in metrics
    gate.run(ann.trainer.gate.set)
    ann.done(training)
    ben.done(waiting)


def test_a_drained_group_takes_nobody_lets_what_runs_go_on_and_is_drained_after_a_restart(start):
    with start() as gate, gate.http() as admin:
        ann = Experiment(gate, "ann")
        drained = admin.post(f"{OWN}/groups/gpu/drain").json()
        assert (drained["drained"], drained["policy"]) == (True, "eager")
        ann.done(ann.step())
        wait_until(lambda: ann.trainer.asleep)
        refused = ann.client.post(f"{OWN}/groups/gpu/drain")
        assert (refused.status_code, group(ann)["drained"]) == (403, True)
        answer = admin.post(f"{OWN}/groups/nowhere/drain")
        assert (answer.status_code, answer.json()["type"]) == (404, "unknown_group")
        assert "known: gpu, spare" in answer.json()["error"]
    with start() as gate, gate.http() as admin:
        session = gate.session_id()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny:full"}
        waiting = admin.post("/api/v1/create_model", json=body).json()["request_id"]
        wait_until(gate.waiting_for_places)
        listed = admin.get(f"{OWN}/groups").json()
        assert [group["drained"] for group in listed["groups"]] == [True, False]
        (queued,) = listed["queue"]
        assert queued["worker"].startswith(session)
        assert "group gpu is drained, and takes no more workers" in queued["reason"]
        assert admin.delete(f"{OWN}/groups/gpu/drain").json()["drained"] is False
        assert gate.retrieve(waiting).status_code == 200
        events = {entry["event"] for entry in audit_log(admin)}
        assert {"group_drain", "group_undrain"} <= events


def test_the_commands_show_and_drain(gate, ann, ben):
    for experiment in (ann, ben, ann):
        experiment.done(experiment.step())
    listed = json.loads(tandem(gate, "groups", "list", "--json"))["groups"]
    assert [group["name"] for group in listed] == ["gpu", "spare"]
    said = tandem(gate, "top", "--once")
    assert ann.run in said and ben.run in said and "device seconds" in said
    assert len(json.loads(tandem(gate, "top", "--json"))["groups"]) == 2
    assert "takes no more workers" in tandem(gate, "groups", "drain", "spare")
    assert group(ann, "spare")["drained"]
    tandem(gate, "groups", "drain", "spare", "--undo")
    assert not group(ann, "spare")["drained"]
    with pytest.raises(UnknownGroup, match="there is no group 'nowhere'; known: gpu, spare"):
        tandem(gate, "groups", "drain", "nowhere")


def tandem(gate, *arguments: str) -> str:
    directory = ["--data-dir", str(gate.settings.data_dir)]
    done = CliRunner().invoke(app, [*arguments, *directory], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout
