from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from tandem import __version__
from tandem.agent.worker_process import group_members
from tandem.protocol.worker import (
    PROTOCOL,
    PROTOCOL_METADATA_KEY,
    SECRET_METADATA_KEY,
    VERSION_METADATA_KEY,
    WorkerReport,
    WorkerSpec,
)
from tandem.protocol.worker_link import FileLink, PipeLink
from tandem.settings.workers import SamplerSettings
from tests.support.ports import known_port
from tests.support.waiting import wait_until

DUMMY = str(Path(__file__).parents[2] / "support" / "dummy_worker.py")

AT_ONCE = [(f"grpc.{bound}_reconnect_backoff_ms", 100) for bound in ("initial", "min", "max")]
"""Reconnects soon. By default, calls back off during a worker's start."""

CHILD = """
child = subprocess.Popen([sys.executable, '-c', 'import signal\\nwhile True: signal.pause()'])
"""


def run(code: str, **options) -> subprocess.Popen[bytes]:
    imports = "import ctypes, os, signal, subprocess, sys\nfrom tandem.protocol.worker import *\n"
    code = imports + "from tandem.protocol.worker_link import *\n" + code
    options = {"start_new_session": True, "stdin": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **options)


def ends(process: subprocess.Popen[bytes]) -> int:
    """The exit status. Fails if anything in the group survives."""
    status = process.wait(60)
    wait_until(lambda: not group_members(process.pid), what="the group has ended")
    process.stdout.close()
    return status


def running(pid: int) -> bool:
    return pid in group_members(os.getpgid(pid))


def test_the_whole_group_dies_when_the_lifeline_closes():
    worker = run("hold_lifeline()" + CHILD + "print('up', flush=True)\nchild.wait()")
    assert worker.stdout.readline() == b"up\n"
    assert len(group_members(worker.pid)) == 2
    worker.stdin.close()
    assert ends(worker) == -signal.SIGKILL


def test_a_native_call_that_keeps_the_interpreter_lock_does_not_keep_the_worker_alive():
    worker = run("hold_lifeline()\nprint('up', flush=True)\nctypes.PyDLL(None).sleep(600)")
    assert worker.stdout.readline() == b"up\n"
    worker.stdin.close()
    assert ends(worker) == -signal.SIGKILL


def test_a_lifeline_that_closed_before_it_was_held_kills_as_well():
    code = "sys.stdin.buffer.readline()\nprint('up', flush=True)\nos.read(int(sys.argv[1]), 1)\n"
    code = code.replace("sys.argv[1]", "os.environ['GO']") + CHILD + "hold_lifeline()\nchild.wait()"
    there, here = os.pipe()
    worker = run(code, pass_fds=(there,), env={**os.environ, "GO": str(there)})
    worker.stdin.write(b"{}\n")
    worker.stdin.flush()
    assert worker.stdout.readline() == b"up\n"
    worker.stdin.close()
    os.close(here)
    os.close(there)
    assert ends(worker) == -signal.SIGKILL


def test_a_process_that_does_not_lead_its_group_ends_alone():
    inner = "from tandem.protocol.worker_link import *; hold_lifeline(); print('up', flush=True)\n"
    inner += "import time\n"
    inner += "while True: time.sleep(60)"
    outer = run(
        f"inner = subprocess.Popen([sys.executable, '-c', {inner!r}])\n"
        "print(inner.wait(), flush=True)"
    )
    assert outer.stdout.readline() == b"up\n"
    outer.stdin.close()
    assert int(outer.stdout.readline()) == -signal.SIGKILL
    assert ends(outer) == 0


def test_standard_input_that_is_no_pipe_ends_the_group_when_it_is_at_its_end():
    worker = run("hold_lifeline()\nwhile True: signal.pause()", stdin=subprocess.DEVNULL)
    assert ends(worker) == -signal.SIGKILL


def test_a_held_lifeline_does_not_stand_in_the_way_of_a_normal_exit():
    worker = run("hold_lifeline()\nsys.exit(7)")
    assert ends(worker) == 7
    worker.stdin.close()


def test_the_specification_is_read_and_the_lifeline_stays_open():
    code = "link = launcher_link(['--report-fd', '1'])\nspec = link.read_spec()\n"
    code += "link.hold_lifeline()\nprint(spec.worker_id, spec.secret, flush=True)\n"
    worker = run(code + "signal.pause()")
    worker.stdin.write(specification().model_dump_json().encode() + b"\n")
    worker.stdin.flush()
    assert worker.stdout.readline() == b"w s3cret\n"
    assert running(worker.pid)
    worker.stdin.close()
    assert ends(worker) == -signal.SIGKILL


def specification() -> WorkerSpec:
    return WorkerSpec(
        worker_id="w",
        kind="sampler",
        secret="s3cret",
        model_name="tiny",
        model_path="models/tiny",
        session_id="s-1",
        sampler=SamplerSettings(max_num_seqs=3),
    )


def test_settings_in_a_specification_win_over_the_environment(monkeypatch):
    line = specification().model_dump_json().encode() + b"\n"
    monkeypatch.setenv("TANDEM_SAMPLER_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("TANDEM_SAMPLER_MAX_MODEL_LEN", "5")
    there, here = os.pipe()
    os.write(here, line)
    os.close(here)
    with os.fdopen(there, "rb") as stream:
        assert PipeLink(report_fd=-1, stdin=stream).read_spec() == specification_as_made(line)


def specification_as_made(line: bytes) -> WorkerSpec:
    spec = WorkerSpec.model_validate_json(line)
    assert spec.sampler is not None
    assert spec.sampler.max_num_seqs == 3
    assert spec.sampler.max_model_len == 0
    return spec


def test_neither_an_error_nor_a_printed_specification_holds_the_secret():
    line = specification().model_dump_json().replace('"sampler"', '"something"', 1).encode()
    with pytest.raises(ValidationError) as caught:
        WorkerSpec.model_validate_json(line)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ValidationError) as caught:
        WorkerSpec.model_validate_json(b'{"secret": "s3cret"')
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in repr(specification())


def test_a_report_longer_than_a_pipe_arrives_whole():
    there, here = os.pipe()
    report = WorkerReport(error_type="worker_died", error="why? " * 100_000 + "\nso")
    sending = threading.Thread(
        target=lambda: (PipeLink(report_fd=here).report(report), os.close(here))
    )
    sending.start()
    with os.fdopen(there, "rb") as stream:
        (line,) = stream.readlines()
    sending.join()
    assert WorkerReport.model_validate_json(line) == report


def test_a_rank_dies_with_the_worker_that_started_it():
    rank = (
        "from tandem.protocol.worker import *; import os, signal; die_with_parent(os.getppid())\n"
    )
    rank += "print(os.getpid(), flush=True)\nwhile True: signal.pause()"
    worker = run(
        f"subprocess.Popen([sys.executable, '-c', {rank!r}], start_new_session=True)\n"
        "while True: signal.pause()"
    )
    pid = int(worker.stdout.readline())
    assert group_members(pid) == [pid]  # a separate group, connected only by the kernel
    worker.kill()
    assert ends(worker) == -signal.SIGKILL
    wait_until(lambda: not group_members(pid), what="the rank has ended")
    worker.stdin.close()


def test_a_rank_whose_worker_is_gone_already_ends_at_once():
    rank = run("die_with_parent(os.getppid() + 1)\nsys.exit(0)")  # not our parent
    assert ends(rank) == -signal.SIGKILL
    rank.stdin.close()


def in_a_container(tmp_path: Path, behaviour: str, **changes: object) -> subprocess.Popen[bytes]:
    """A dummy worker with its specification in a file, as in a pod. `report` gets its end."""
    spec = specification().model_copy(update=changes)
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    files = ["--spec-file", str(tmp_path / "spec.json"), "--report-file", str(tmp_path / "report")]
    command = [sys.executable, DUMMY, behaviour, *files]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)


def test_a_worker_in_a_container_leaves_the_reason_of_its_end_in_a_file(tmp_path):
    assert ends(in_a_container(tmp_path, "refuse")) == 1
    report = WorkerReport.model_validate_json((tmp_path / "report").read_bytes())
    assert (report.error_type, report.error) == ("worker_died", "rank 1 was killed by SIGKILL")


def test_a_gateway_with_another_protocol_is_told_before_anything_else_of_it_is_understood(tmp_path):
    link = FileLink(spec=tmp_path / "spec.json", report=tmp_path / "report")
    (tmp_path / "spec.json").write_text(json.dumps({"protocol": PROTOCOL + 1, "kind": "judge"}))
    with pytest.raises(SystemExit) as ended:
        link.read_spec()
    report = WorkerReport.model_validate_json((tmp_path / "report").read_bytes())
    assert report.error_type == "worker_start_failed"
    assert report.error == ended.value.code
    assert f"and that of its gateway is {PROTOCOL + 1}: the images of gateway" in report.error


def test_a_worker_says_of_which_version_it_is(tmp_path):
    port = known_port()
    worker = in_a_container(tmp_path, "serve", port=port, lifeline=60.0)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=AT_ONCE) as channel:
        _, call = health_pb2_grpc.HealthStub(channel).Check.with_call(
            health_pb2.HealthCheckRequest(),
            metadata=((SECRET_METADATA_KEY, "s3cret"),),
            timeout=60,
            wait_for_ready=True,
        )
    told = dict(call.trailing_metadata())
    assert (told[PROTOCOL_METADATA_KEY], told[VERSION_METADATA_KEY]) == (str(PROTOCOL), __version__)
    worker.kill()
    worker.wait()


def test_a_long_reason_fits_into_what_kubernetes_keeps(tmp_path):
    link = FileLink(spec=tmp_path / "spec.json", report=tmp_path / "report")
    link.report(WorkerReport(address="0.0.0.0:7000"))
    assert not (tmp_path / "report").exists()
    link.report(WorkerReport(error_type="worker_died", error="why? " * 10_000))
    assert len((tmp_path / "report").read_bytes()) <= 4096
    assert WorkerReport.model_validate_json((tmp_path / "report").read_bytes()).error


def test_a_worker_that_no_gateway_calls_any_more_ends_itself(tmp_path):
    port = known_port()
    worker = in_a_container(tmp_path, "serve", port=port, lifeline=4.0)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=AT_ONCE) as channel:
        ask = partial(health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest())
        called_at = time.monotonic()
        ask(metadata=((SECRET_METADATA_KEY, "s3cret"),), timeout=60, wait_for_ready=True)
        while worker.poll() is None:  # a caller without the secret is no gateway
            with suppress(grpc.RpcError):
                ask(metadata=((SECRET_METADATA_KEY, "another"),), timeout=60)
            time.sleep(0.1)
    assert time.monotonic() - called_at >= 4.0
    assert ends(worker) == -signal.SIGKILL
