"""The worker of a job: torchrun below it, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tandem.backends.jobs import STOPPED, JobEnd
from tandem.protocol.worker import JobSpec, WorkerSpec
from tests.support.processes import marked, small_disk
from tests.support.waiting import wait_until
from tests.support.worker_process import RUN, SECRET, SESSION, WorkerClient, worker_process
from trainer_service.jobs.runner import environment_of

MARK = "TEST_OF_JOBS"

RANKS = """
import os, subprocess, sys
code = "import sys; from tandem.protocol.worker import die_with_parent; "
code += "die_with_parent(int(sys.argv[1])) if sys.argv[2] == 'asks' else None; "
code += "print('a rank', flush=True); import time; time.sleep(600)"
command = [sys.executable, "-c", code, str(os.getpid()), sys.argv[1]]
ranks = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
"""
"""Starts ranks in sessions of their own, as torch elastic does."""


@pytest.fixture
def mark(tmp_path):
    return f"{MARK}={tmp_path}"


def specification(folder: Path, code: str, *arguments: str, **about) -> WorkerSpec:
    """The specification of a worker whose program is this code, in place of torchrun."""
    environment = {MARK: str(folder)} | about.pop("environment", {})
    return WorkerSpec(
        worker_id="job-s-0",
        kind="job",
        secret=SECRET,
        model_name="tiny",
        model_path="models/tiny",
        session_id=SESSION,
        run_id=RUN,
        job=JobSpec(
            framework="test",
            folder=str(folder),
            attempt=about.pop("attempt", 1),
            processes=about.pop("processes", 2),
            argv=about.pop("argv", (sys.executable, "-c", code, *arguments)),
            environment=environment,
        ),
        **about,
    )


@contextmanager
def job(folder: Path, code: str, *arguments: str, **about):
    with worker_process(specification(folder, code, *arguments, **about)) as started:
        yield started
        started.process.wait(timeout=60)


def end_of(folder: Path, attempt: int = 1) -> JobEnd:
    return JobEnd.model_validate_json((folder / f"attempt-{attempt}/end.json").read_bytes())


def ended(folder: Path, code: str, *arguments: str, **about) -> JobEnd:
    with job(folder, code, *arguments, **about) as started:
        assert started.process.wait(timeout=60) == 0
    return end_of(folder)


def test_the_worker_imports_no_torch():
    code = "import sys, trainer_service.jobs.__main__ as _; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_shell_reads_the_program_and_its_arguments(tmp_path):
    code = "import json, sys; json.dump(sys.argv[1:], open('said.json', 'w'))"
    arguments = ("a b", "$HOME", "; exit 3", "*", "", '"', "ü\n")
    assert ended(tmp_path, code, *arguments).status == 0
    assert json.loads((tmp_path / "said.json").read_text()) == list(arguments)


def test_torchrun_gets_the_number_of_processes_and_the_chosen_devices_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("PYTHONPATH", "/of/another/interpreter")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = "import json, os; json.dump(dict(os.environ), open('said.json', 'w'))"
    own = {"FRAMEWORK": "1", "PET_NNODES": "3", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    devices = ("cuda:GPU-a", "cuda:GPU-b")
    assert ended(tmp_path, code, environment=own, devices=devices).status == 0
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert (said["PET_NNODES"], said["PET_NPROC_PER_NODE"], said["PET_STANDALONE"]) == (
        "1",
        "2",
        "1",
    )
    assert said["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert said["FRAMEWORK"] == "1" and "PYTHONPATH" not in said


@pytest.mark.parametrize(("processes", "said"), [(1, "0"), (2, None)])
def test_torch_takes_no_pause_of_a_single_rank_for_a_hang(tmp_path, processes, said):
    job = JobSpec(framework="test", folder=str(tmp_path), argv=("x",), processes=processes)
    environment = environment_of(job, {}, error_file=tmp_path / "error.json", grace=1.0)
    for name in ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        assert environment.get(name) == said


def test_the_ranks_share_the_cores_of_their_devices(tmp_path):
    core = max(os.sched_getaffinity(0))
    code = "import os; open('said', 'w').write(str(os.sched_getaffinity(0)))"
    assert ended(tmp_path, code, processes=1, devices=(f"cpu:{core}",)).status == 0
    assert (tmp_path / "said").read_text() == f"{{{core}}}"


def test_the_worker_serves_health_with_its_secret_while_the_job_runs(tmp_path):
    code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    with job(tmp_path, code) as started:
        with WorkerClient(started) as client:
            client.wait_until_serving()
        assert not (tmp_path / "attempt-1/end.json").exists()
        (tmp_path / "go").touch()
        assert started.process.wait(timeout=60) == 0
    assert end_of(tmp_path).status == 0


def test_the_end_of_a_finished_job_leaves_none_of_its_processes(tmp_path, mark):
    assert ended(tmp_path, RANKS, "stays").status == 0
    assert not marked(mark)


@pytest.mark.parametrize("victim", ["worker", "torchrun"])
def test_no_rank_outlives_a_killed_worker_or_torchrun(tmp_path, mark, victim):
    with job(tmp_path, RANKS + "import time; time.sleep(600)", "asks") as started:
        wait_until(lambda: len(marked(mark)) == 3, what="two ranks run")
        (torchrun,) = psutil.Process(started.process.pid).children()
        os.kill(torchrun.pid if victim == "torchrun" else started.process.pid, signal.SIGKILL)
        status = started.process.wait(timeout=60)
    wait_until(lambda: not marked(mark), what="nothing is left")
    if victim == "worker":
        assert not (tmp_path / "attempt-1/end.json").exists()
    else:
        assert status == 0
        assert end_of(tmp_path).status == -signal.SIGKILL
        assert end_of(tmp_path).reason.startswith("torchrun was killed by SIGKILL")


def test_a_job_that_was_asked_to_end_has_a_status_of_its_own(tmp_path, mark):
    code = "import signal, time; signal.signal(15, lambda *_: exit(3)); print('up', flush=True)"
    with job(tmp_path, RANKS + code + "\ntime.sleep(600)", "stays") as started:
        wait_until(lambda: len(marked(mark)) == 3, what="two ranks run")
        with WorkerClient(started) as client:
            client.wait_until_serving()
        started.process.terminate()
        assert started.process.wait(timeout=60) == 0
    assert (end_of(tmp_path).status, end_of(tmp_path).reason) == (STOPPED, "it was asked to end")
    assert not marked(mark)


def test_a_job_that_does_not_end_when_it_is_asked_is_killed_before_the_stop_timeout(tmp_path, mark):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); open('deaf', 'w')"
    with job(tmp_path, RANKS + code + "\ntime.sleep(600)", "stays", stop_timeout=4.0) as started:
        wait_until((tmp_path / "deaf").exists, what="it ignores the signal")
        with WorkerClient(started) as client:
            client.wait_until_serving()
        started.process.terminate()
        assert started.process.wait(timeout=60) == 0
    assert end_of(tmp_path).status == STOPPED
    assert not marked(mark)


def test_the_reason_of_a_failure_is_the_recorded_error_of_the_first_failed_rank(tmp_path):
    code = """
import json, os
message = {"message": "ValueError: /data/models/tiny has no head", "errorCode": 1}
json.dump({"message": message}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
print("Root Cause (first observed failure):\\n  rank      : 1 (local_rank: 1)\\n  exitcode  : 2")
raise SystemExit(1)
"""
    end = ended(tmp_path, code)
    assert (end.status, end.reason) == (
        1,
        "rank 1 ended with status 2: ValueError: tiny has no head",
    )


def test_without_a_recorded_error_the_reason_is_the_last_lines_before_torchruns_report(tmp_path):
    code = """
print("loading\\nFileNotFoundError: '/data/jobs/x/train.jsonl'")
print("W1128 00:00:00.1 7 torch/distributed/elastic/multiprocessing/api.py:9] Sending SIGTERM")
print("E1128 00:00:00.2 7 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: 1)")
print("a table")
raise SystemExit(1)
"""
    said = "torchrun ended with status 1: loading | FileNotFoundError: 'train.jsonl'"
    assert ended(tmp_path, code).reason == said


def test_a_program_that_cannot_be_started_ends_the_attempt_with_the_reason(tmp_path):
    end = ended(tmp_path, "", argv=("/no/such/python", "-m", "x"))
    assert end.status == 127
    assert end.reason == "python could not be started: No such file or directory"


def test_a_repeated_attempt_replaces_its_end_and_forgets_its_error(tmp_path):
    (tmp_path / "attempt-1").mkdir()
    for name in ("end.json", "error.json"):
        (tmp_path / "attempt-1" / name).write_text('{"message": "old", "status": 9}')
    assert ended(tmp_path, "raise SystemExit(1)").reason == "torchrun ended with status 1"


@pytest.mark.parametrize("status", [0, 3])
def test_the_worker_of_a_job_in_a_pod_has_its_specification_in_a_file(tmp_path, status):
    file = tmp_path / "spec.json"
    spec = specification(tmp_path, f"raise SystemExit({status})", lifeline=60.0)
    file.write_text(spec.model_dump_json())
    files = ["--spec-file", str(file), "--report-file", str(tmp_path / "report")]
    command = [sys.executable, "-m", "trainer_service.jobs", *files]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0
    assert end_of(tmp_path).status == status
    assert not (tmp_path / "report").exists()


def test_a_missing_folder_is_reported(tmp_path):
    with job(tmp_path / "none", "pass") as started:
        assert "the job's folder cannot be used: " in started.report.error
        assert started.process.wait(timeout=60) == 1


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=1) as mounted:
        if not mounted:
            pytest.skip("this user may not mount a small disk")
        yield tmp_path / "disk"


def test_a_full_disk_for_the_end_is_reported_and_leaves_no_file(disk):
    code = (
        "import os\nf = open('fill', 'wb')\ntry:\n    while True: os.write(f.fileno(), b'x' * 4096)"
    )
    with job(disk, code + "\nexcept OSError: pass") as started:
        assert "the end of the job cannot be written: " in started.next_report().error
        assert started.process.wait(timeout=60) == 1
    assert list((disk / "attempt-1").iterdir()) == []
