"""A job of TRL and a run of the SDK share one device, and neither changes the other."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tinker import ServiceClient

from gateway.workers.table import OCCUPYING
from tests.support.sdk import TIMEOUT, adam, outputs, sample, sequences, supervised
from tests.support.stacks import GROUPS, TIED, TestStack, running, session_of
from tests.support.trl_jobs import needs_trl
from tests.support.trl_runs import TrlRun
from tests.support.waiting import wait_until

pytestmark = [needs_trl, pytest.mark.nightly]

STEPS = 4
AT = 1
"""The step after which the job runs."""
LONG = "3600"
"""Only idle workers yield."""


class Lesson:
    """A run that learns and samples. `moments` maps a step's moment to its check."""

    def __init__(self, service: ServiceClient) -> None:
        self.training = service.create_lora_training_client(TIED, rank=8, seed=7).result(TIMEOUT)
        self.moments: dict[tuple[int, str], Callable[[], None]] = {}

    def _reach(self, step: int, moment: str) -> None:
        self.moments.get((step, moment), lambda: None)()

    def steps(self) -> list[bytes]:
        """Return each step's logprobs: of the samples, and of the batch."""
        return [self._step(number) for number in range(STEPS)]

    def _step(self, number: int) -> bytes:
        saving = self.training.save_weights_and_get_sampling_client()
        self._reach(number, "asked")
        (drawn,) = sample(saving.result(TIMEOUT), [3, 5, 7], seed=number)
        data = [supervised(tokens) for tokens in sequences(4, seed=number)]
        batch = self.training.forward_backward(data, "cross_entropy").result(TIMEOUT)
        self._reach(number, "gradients")
        self.training.optim_step(adam(1e-3)).result(TIMEOUT)
        self._reach(number, "idle")
        learned = (each.tobytes() for each in outputs(batch))
        return b"".join([np.array(drawn.logprobs, np.float32).tobytes(), *learned])


def workers(stack: TestStack) -> list[dict]:
    """Return the workers of the shared device, its holders first."""
    with stack.stack.client() as client:
        (group,) = client.get("groups").raise_for_status().json()["groups"]
    found: list[dict] = group["workers"]
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("deferred", id="a job waits for an idle run"),
        pytest.param("eager", id="a job finds a run asleep"),
    ],
)
def test_a_job_and_a_run_on_one_device_wait_for_each_other_and_the_run_continues_exactly(
    policy: str, models: dict[str, Path], tmp_path: Path
) -> None:
    settings = {
        "groups": GROUPS["one"],
        "sharing_policy": policy,
        "sharing_quantum": LONG,
        "sharing_max_wait": LONG,
    }
    with running(tmp_path, models={TIED: models[TIED]}, settings=settings) as stack:
        with stack.service() as service:
            undisturbed = Lesson(service).steps()
        with stack.service() as service:
            lesson = Lesson(service)
            job = JobInTheMiddle(stack, lesson)
            if policy == "eager":
                lesson.moments[AT, "idle"] = job.starts_at_once
            else:
                lesson.moments[AT, "gradients"] = job.waits
                lesson.moments[AT, "idle"] = job.starts
            lesson.moments[AT + 1, "asked"] = job.is_waited_for
            assert lesson.steps() == undisturbed
            assert job.submitted().steps() == [1, 2, 3, 4]
        assert stack.reasons_of_ends() == {"it was released"}
    check_that_one_worker_at_a_time_had_the_device(tmp_path)


class JobInTheMiddle:
    def __init__(self, stack: TestStack, lesson: Lesson) -> None:
        self.stack, self.lesson = stack, lesson
        self.run_id = lesson.training.model_id
        self.job: TrlRun | None = None

    def submitted(self) -> TrlRun:
        self.job = self.job or TrlRun(self.stack, processes=1)
        return self.job

    def waits(self) -> None:
        """The run's gradients wait for their step, so its trainer keeps the device."""
        job = self.submitted()
        wait_until(lambda: job.about()["queue_position"] == 1)
        about = job.about()
        assert about["state"] == "queued"
        assert "1st in the queue for the devices of group both" in about["reason"]
        holder = workers(self.stack)[0]
        assert (holder["worker"], holder["state"]) == (self.run_id, "awake")
        assert job.is_gone()

    def starts_at_once(self) -> None:
        session = session_of(self.lesson.training)
        wait_until(
            lambda: all(
                each["state"] == "asleep"
                for each in workers(self.stack)
                if each["session_id"] == session
            )
        )
        self.starts()

    def starts(self) -> None:
        job = self.submitted()
        wait_until(lambda: job.about()["state"] == "running")

    def is_waited_for(self) -> None:
        """The run's next operation waits for the end of the job, and continues after it."""
        job, run_id = self.submitted(), self.run_id

        def waiting() -> dict | None:
            found = [each for each in workers(self.stack) if each["worker"] == run_id]
            return next((each for each in found if each["position"]), None)

        trainer = wait_until(waiting)
        assert f"the job {job.id} holds devices of group both until it ends" in trainer["reason"]
        assert self.stack.run(self.lesson.training)["reason"] == trainer["reason"]
        holder = workers(self.stack)[0]
        assert (holder["worker"], holder["state"]) == (job.id, "awake")
        job.finished()


def check_that_one_worker_at_a_time_had_the_device(data_dir: Path) -> None:
    changes = "SELECT key, kind, state FROM worker_events ORDER BY at, id"
    with closing(sqlite3.connect(data_dir / "tandem.db")) as database:
        events = database.execute(changes).fetchall()
    holders: set[str] = set()
    for key, _kind, state in events:
        holders = holders | {key} if state in OCCUPYING else holders - {key}
        assert len(holders) <= 1
    assert {kind for _key, kind, state in events if state == "awake"} == {
        "trainer",
        "engine",
        "job",
    }
