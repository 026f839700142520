"""Real trainers use only their given devices."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os

import pytest

from tandem.agent.worker_process import group_members
from tandem.errors import WorkerStartFailed
from tests.support.losses.batches import mixed_data
from tests.support.processes import cores_of
from tests.support.trainer_worker import request, trainer_process
from tests.support.waiting import wait_until
from tests.support.worker_process import CALL_SECONDS
from trainer_service.service import rank_processes

CORES = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@needs_two_cores
def test_each_rank_uses_its_own_cores_alone(models, tmp_path):
    first, second = CORES[:2]
    with trainer_process(
        models["qwen3"], tmp_path, ranks=2, threads=0, devices=[f"cpu:{first}", f"cpu:{second}"]
    ) as client:
        client.output(request(mixed_data()))
        rank_0 = client.process.pid
        (rank_1,) = set(group_members(rank_0)) - {rank_0}
        assert cores_of(rank_0) == {first}
        assert cores_of(rank_1) == {second}
        assert client.describe().device == "cpu"


@pytest.mark.parametrize(
    ("devices", "ranks", "sentence"),
    [
        (["cpu:9999"], 1, "cpu:9999 cannot be used: this process may run on the cores"),
        ([f"cpu:{CORES[0]}", "cpu:9999"], 2, "rank 1 failed: WorkerStartFailed: cpu:9999 cannot"),
        ([f"cpu:{CORES[0]}"], 2, "2 ranks were given 1 devices"),
        (["cuda:97"], 1, "rank 0 was given cuda:97, which torch does not find"),
    ],
)
def test_a_trainer_with_devices_that_are_not_there_does_not_start(
    models, tmp_path, devices, ranks, sentence
):
    with trainer_process(
        models["qwen3"], tmp_path, wait=False, ranks=ranks, devices=devices
    ) as client:
        report = client.report if client.report.error else client.next_report()
        assert report.error_type == "worker_start_failed"
        assert sentence in report.error
        assert client.process.wait(timeout=CALL_SECONDS) == 1


def test_ranks_for_which_there_is_no_process_fail_the_start_and_leave_none_behind(monkeypatch):
    """At exit Python waits for its forked processes, and they wait for an assignment."""
    monkeypatch.setattr(rank_processes, "import_before_forks", lambda: None)
    forks, fork = itertools.count(), os.fork

    def fork_once() -> int:
        if next(forks):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", fork_once)
    with pytest.raises(WorkerStartFailed, match=r"process of rank 2 cannot be made: .*unavailable"):
        rank_processes.RankProcesses(ranks=[1, 2], devices=[], on_death=lambda _: None)
    wait_until(lambda: not multiprocessing.active_children(), what="the first one has ended")
