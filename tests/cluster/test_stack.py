"""The whole stack on a real cluster: installed from `k8s`, used by the SDK, disturbed, removed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import pytest

from tests.chaos.experiments import Experiment
from tests.cluster import settings
from tests.cluster.installation import Installation, installed
from tests.support.stacks import TIED
from tests.support.waiting import wait_until

STEPS = 40
STRIKE_AFTER = 5
_SECONDS = 600.0

pytestmark = [
    pytest.mark.skipif(bool(settings.NO_NODES), reason=settings.NO_NODES),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def tandem(tmp_path_factory) -> Iterator[Installation]:
    with installed(tmp_path_factory.mktemp("installation")) as installation:
        yield installation


@pytest.fixture(autouse=True)
def told(tandem, request) -> Iterator[None]:
    """Shows and keeps the state of the cluster when a test fails."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(tandem.tell())
        tandem.keep(request.node.name)


def test_the_demo_reaches_its_last_step_through_pods(tandem, tmp_path):
    out = tmp_path / "out"
    command = [str(Path(sys.executable).with_name("tandem")), "demo", "--base-url", tandem.url]
    done = subprocess.run(
        [*command, "--out", str(out), "--data-dir", str(tmp_path / "data")],
        env={**os.environ, "TINKER_API_KEY": tandem.key},
        capture_output=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    lines = (out / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward_mean"] for line in lines]
    assert len(rewards) == 10
    assert rewards[-1] >= 0.995, rewards
    tandem.nothing_left()


@pytest.mark.skipif("trl" not in settings.IMAGES["trainer"], reason="trainers have no TRL")
def test_a_job_trains_in_a_pod_and_continues_after_its_pod_is_deleted(tandem):
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(9)]
    body = {
        "backend": "trl",
        "model": TIED,
        "configuration": {"method": "sft", "lora_rank": 8, "steps": 60, "save_steps": 5},
        "data": {"train": "\n".join(map(json.dumps, rows))},
        "max_restarts": 1,
    }
    job = tandem.ask("api/tandem/v1/jobs", body=body)["id"]

    def about() -> dict:
        return tandem.ask(f"api/tandem/v1/jobs/{job}")

    def began() -> bool:
        return (about()["progress"] or {"step": 0})["step"] > 5

    wait_until(began, what="the job has a state", timeout=_SECONDS)
    tandem.kubectl("delete", "pod", tandem.worker("job")["metadata"]["name"])
    wait_until(lambda: about()["state"] == "ended", what="the job ends", timeout=_SECONDS)
    ended = about()
    assert ended["result"] is not None, ended["reason"]
    assert ended["attempt"] == 2
    tandem.nothing_left()


# --- Two experiments ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tandem) -> Callable[[str], Experiment]:
    """Returns the result of a kind of experiment that had the cluster to itself."""
    return cache(partial(finished, tandem))


def test_two_experiments_on_one_claim_are_those_that_each_is_alone(tandem, alone):
    expected = {kind: alone(kind) for kind in ("rl", "rl-full")}
    with running(tandem, "rl") as one, running(tandem, "rl-full") as other:
        wait_until(lambda: one.steps and other.steps, what="both train", timeout=_SECONDS)
        assert len(tandem.kubectl.names("pods", "tandem.dev/session")) == 4
        claims = tandem.kubectl.names("resourceclaims.resource.k8s.io")
        assert len(claims) == (1 if settings.DEVICE_CLASS else 0), claims
    same(one, expected["rl"])
    same(other, expected["rl-full"])
    tandem.nothing_left()


# --- Faults in the middle of training -------------------------------------------------------------


def test_a_run_goes_on_whose_trainers_pod_is_evicted(tandem, alone):
    trainer_replaced(tandem, alone, lambda pod: evict(tandem, pod), because="EvictionByEvictionAPI")


def test_a_run_goes_on_whose_trainer_exceeds_its_memory(tandem, alone):
    said = "tandem.host_memory raises that"
    trainer_replaced(tandem, alone, lambda pod: fill_memory(tandem, pod), because=said)


def test_a_run_goes_on_when_the_gateway_that_serves_is_killed(tandem, alone):
    with running(tandem, "rl") as experiment:
        until_step(STRIKE_AFTER, experiment)
        trainer, gateway = tandem.worker("trainer"), tandem.serving()
        tandem.kubectl("delete", "pod", gateway, "--grace-period=0", "--force")
        wait_until(lambda: tandem.serving() != gateway, what="another serves", timeout=_SECONDS)
        assert uid(tandem.worker("trainer")) == uid(trainer)
    same(experiment, alone("rl"))
    tandem.nothing_left()


@pytest.mark.skipif(not settings.LOSE_NODE, reason="TANDEM_TEST_LOSE_NODE has no command")
def test_a_run_goes_on_whose_trainers_node_is_lost(tandem, alone):
    lost = ""

    def lose(pod: dict) -> None:
        nonlocal lost
        lost = pod["spec"]["nodeName"]
        assert lost != tandem.node_of("database"), "nothing keeps the database"
        command(settings.LOSE_NODE, lost)

    try:
        trainer_replaced(tandem, alone, lose, because="node")
    finally:
        if lost:
            command(settings.RETURN_NODE, lost)
            ready = ("--for=condition=Ready", f"node/{lost}", "--timeout=120s")
            tandem.kubectl("wait", *ready, seconds=130)
    tandem.nothing_left()


# --- The end --------------------------------------------------------------------------------------


def test_the_end_of_the_deployment_is_that_of_all_that_it_made(tandem):
    service = tandem.service()  # never closed: no gateway is left to answer
    service.create_lora_training_client(TIED, rank=8)
    tandem.worker("trainer")
    tandem.kubectl("delete", "deployment", "tandem", "--timeout=120s", seconds=130)
    wait_until(lambda: not tandem.made(), what="no object is left", timeout=_SECONDS)


# --- Experiments ----------------------------------------------------------------------------------


@contextmanager
def running(tandem: Installation, kind: str) -> Iterator[Experiment]:
    """Run an experiment beside the block. The end of the block waits for it."""
    experiment = Experiment(kind)

    def work() -> None:
        with tandem.service() as service:
            experiment.run(service, exactly=STEPS)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield experiment
    finally:
        thread.join(_SECONDS)
    assert not thread.is_alive(), f"it stands still after {len(experiment.steps)} steps"
    if experiment.fault is not None:
        said = f"it failed after {len(experiment.steps)} steps"
        raise AssertionError(said) from experiment.fault


def finished(tandem: Installation, kind: str) -> Experiment:
    with running(tandem, kind) as experiment:
        pass
    tandem.nothing_left()
    return experiment


def same(one: Experiment, other: Experiment) -> None:
    """Both had equal bytes in each step, samples and rewards included, and equal final weights."""
    steps = enumerate(zip(one.steps, other.steps, strict=True), 1)
    different = [number for number, (here, there) in steps if here != there]
    assert not different, f"steps {different} differ"
    assert one.weights == other.weights


# --- Faults ---------------------------------------------------------------------------------------


def trainer_replaced(
    tandem: Installation,
    alone: Callable[[str], Experiment],
    strike: Callable[[dict], None],
    *,
    because: str,
) -> None:
    """Strike at the trainer's pod in the middle of an experiment.

    The gateway names the cause. The experiment ends with another pod and the undisturbed result."""
    with running(tandem, "rl") as experiment:
        until_step(STRIKE_AFTER, experiment)
        pod = tandem.worker("trainer")
        strike(pod)
        at = len(experiment.steps)
        assert at < STEPS - 2, "it was not in the middle"
        until_step(at + 2, experiment)
        assert uid(tandem.worker("trainer")) != uid(pod)
    same(experiment, alone("rl"))
    assert because in tandem.logs()
    tandem.nothing_left()


def until_step(number: int, experiment: Experiment) -> None:
    """Wait for the results of so many steps."""

    def there() -> bool:
        if experiment.fault is not None:
            raise AssertionError("it failed") from experiment.fault
        return len(experiment.steps) >= number

    wait_until(there, what=f"step {number} is done", timeout=_SECONDS)


def uid(pod: dict) -> str:
    return pod["metadata"]["uid"]


def evict(tandem: Installation, pod: dict) -> None:
    metadata = {key: pod["metadata"][key] for key in ("name", "namespace")}
    about = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    url = "/api/v1/namespaces/{namespace}/pods/{name}/eviction".format(**metadata)
    tandem.kubectl("create", "--raw", url, "--filename", "-", given=json.dumps(about).encode())


_EAT = """
import os, pathlib, signal
# The kernel chooses the trainer, because the container's other processes are small.
pathlib.Path("/proc/1/oom_score_adj").write_text("1000")
read, write = os.pipe()
while True:
    if not os.fork():
        held = b"x" * 2**24
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
"""


def fill_memory(tandem: Installation, pod: dict) -> None:
    """Fill the memory of a trainer's pod until the kernel kills the trainer."""
    name = pod["metadata"]["name"]
    done = tandem.kubectl.run("exec", name, "--container", "worker", "--", "python", "-c", _EAT)
    assert done.returncode == 137, done.stderr.decode()


def command(template: str, node: str) -> None:
    """Run a command of the cluster's owner."""
    parts = [part.format(node=node) for part in shlex.split(template)]
    subprocess.run(parts, check=True, capture_output=True, timeout=120)
