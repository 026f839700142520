"""Each fault that a job would meet at its start has a type and a code."""

from __future__ import annotations

import errno
import json
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from gateway.workers.epoch import Epoch
from gateway.workers.launchers.agent import AgentLauncher
from tandem.agent.host import Accelerator, accelerators, driver_cuda_version, driver_version
from tandem.agent.launcher import ProcessLauncher
from tandem.agent.preflight import (
    CODES,
    DEVICES,
    SOFTWARE,
    STORAGE,
    JobNeeds,
    check_job,
    exit_code,
    run_preflight,
)
from tandem.agent.service import serving
from tandem.errors import WorkerStartFailed
from tests.support.fake_nvml import pynvml

GIB = 2**30
H100S = tuple(Accelerator(n, f"GPU-{n}", "H100", 80 * GIB) for n in range(2))


class Machine:
    """A machine with two devices, on which the job can start. Tests damage it."""

    def __init__(self, folder: Path) -> None:
        self.packages = folder / "packages"
        self.package("trl", "1.16.2")
        self.torch("'13.0'")
        model, job = folder / "model", folder / "job"
        for each in (model, job):
            each.mkdir()
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"weights")
        self.needs = JobNeeds(
            framework="trl",
            backend="trl-sft",
            python=sys.executable,
            packages={"trl": "1.16"},
            folder=str(job),
            model=str(model),
            devices=2,
            device_bytes=40 * GIB,
        )
        self.found = H100S
        self.driver = "580.95.05"
        self.driver_cuda = (13, 0)
        self.backends = {"fsdp2": "", "trl-sft": ""}

    def package(self, name: str, version: str) -> None:
        folder = self.packages / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")

    def torch(self, cuda: str) -> None:
        folder = self.packages / "torch"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("raise SystemExit('a check imports no torch')")
        (folder / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: str | None = {cuda}\n")

    def need(self, **changes: object) -> None:
        self.needs = self.needs.model_copy(update=changes)

    def faults(self) -> tuple[int, list[str]]:
        checks = tuple(
            check_job(
                self.needs,
                found=lambda: self.found,
                driver=lambda: self.driver,
                driver_cuda=lambda: self.driver_cuda,
                backends=lambda: self.backends,
            )
        )
        return exit_code(checks), [each.fault for each in checks if each.fault]


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(machine.packages))
    return machine


def test_a_job_that_can_start_has_no_fault_and_leaves_no_file(machine):
    assert machine.faults() == (0, [])
    assert not any(Path(machine.needs.folder).iterdir())


def _other_python(machine: Machine, text: str) -> None:
    program = machine.packages / "python"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o700)
    machine.need(python=str(program))


def _full(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)


def _taken(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(machine, "held", listening, raising=False)
    machine.need(port=listening.getsockname()[1])


def _weights(machine: Machine) -> Path:
    return Path(machine.needs.model, "model.safetensors")


@pytest.mark.parametrize(
    ("fault", "injure"),
    [
        ("backend_unknown", lambda m, _: m.need(backend="torchtune")),
        ("backend_unknown", lambda m, _: m.backends.update({"trl-sft": "two packages have it"})),
        ("interpreter_unusable", lambda m, _: m.need(python="/nowhere/bin/python")),
        ("interpreter_unusable", lambda m, _: m.need(framework="not-there", python="")),
        ("interpreter_unusable", lambda m, _: _other_python(m, "exit 1")),
        ("interpreter_unusable", lambda m, _: _other_python(m, "echo no answer")),
        ("package_missing", lambda m, _: m.need(packages={"trl": "1.16", "not-there": ""})),
        ("package_version", lambda m, _: m.need(packages={"trl": "1.1"})),
        ("package_version", lambda m, _: m.need(packages={"trl": "1.16.2.1"})),
        ("driver_missing", lambda m, _: setattr(m, "driver", "")),
        ("device_missing", lambda m, _: setattr(m, "found", H100S[:1])),
        ("device_memory", lambda m, _: m.need(device_bytes=81 * GIB)),
        ("cuda_mismatch", lambda m, _: setattr(m, "driver_cuda", (12, 8))),
        ("cuda_mismatch", lambda m, _: m.torch("None")),
        ("folder_unwritable", lambda m, _: Path(m.needs.folder).rmdir()),
        ("folder_unwritable", lambda m, _: m.need(folder=str(_weights(m)))),
        ("disk_full", _full),
        ("disk_full", lambda m, _: m.need(disk_bytes=2**60)),
        ("model_unreadable", lambda m, _: Path(m.needs.model, "config.json").unlink()),
        ("model_unreadable", lambda m, _: _weights(m).unlink()),
        ("model_unreadable", lambda m, _: (_weights(m).unlink(), _weights(m).mkdir())),
        ("port_unavailable", _taken),
    ],
)
def test_each_injected_fault_has_its_type_and_its_code(machine, monkeypatch, fault, injure):
    injure(machine, monkeypatch)
    assert machine.faults() == (CODES[fault], [fault])


def test_each_code_has_its_faults():
    assert {*CODES.values()} == {SOFTWARE, DEVICES, STORAGE} == {10, 20, 30}


def test_the_code_of_several_faults_is_that_of_the_first(machine):
    machine.need(backend="torchtune", port=1, folder="/nowhere")
    machine.found = ()
    code, faults = machine.faults()
    assert faults[:3] == ["backend_unknown", "device_missing", "folder_unwritable"]
    assert code == SOFTWARE


def test_the_interpreter_may_be_that_of_the_frameworks_environment_here(machine):
    machine.need(framework="pydantic", python="")
    assert machine.faults() == (0, [])


def test_a_job_on_cores_needs_no_driver(machine):
    machine.need(devices=0, device_bytes=0)
    machine.driver, machine.found = "", ()
    assert machine.faults() == (0, [])


def test_divided_devices_are_a_fault_of_devices(machine, monkeypatch):
    pynvml.install(monkeypatch, "GPU-a/MIG", "GPU-b")
    checks = tuple(
        check_job(
            machine.needs,
            found=accelerators,
            driver=driver_version,
            driver_cuda=driver_cuda_version,
            backends=lambda: machine.backends,
        )
    )
    assert [each.fault for each in checks if each.fault] == ["device_missing"]
    assert "MIG" in checks[[each.fault for each in checks].index("device_missing")].about


async def test_an_agent_answers_with_the_faults_of_its_own_machine(machine, monkeypatch, tmp_path):
    pynvml.install(monkeypatch, "GPU-a")
    machine.need(backend="fsdp2", device_bytes=0)
    epoch = Epoch(number=1, superseded=lambda: None)
    async with serving(ProcessLauncher(data_dir=tmp_path), data_dir=tmp_path):
        agent = AgentLauncher(data_dir=tmp_path, timeout=60, epoch=epoch)

        async def faults() -> list[tuple[int, str]]:
            checks = await agent.preflight(machine.needs, timeout=30)
            return [(each.code, each.fault) for each in checks if each.fault]

        try:
            assert await faults() == [(DEVICES, "device_missing")]
            machine.need(devices=1)
            assert await faults() == []
            machine.need(packages={"not-there": ""}, model="/nowhere")
            assert await faults() == [(SOFTWARE, "package_missing"), (STORAGE, "model_unreadable")]
        finally:
            await agent.close()


async def test_checks_that_hang_end_with_a_fault(machine):
    _other_python(machine, "sleep 600")
    (check,) = await run_preflight(machine.needs.model_dump_json(), timeout=3)
    assert (check.fault, check.code) == ("timed_out", STORAGE)


async def test_needs_of_another_form_are_an_error_and_no_fault():
    with pytest.raises(WorkerStartFailed, match="the preflight failed"):
        await run_preflight(json.dumps({"python": 1}), timeout=60)
