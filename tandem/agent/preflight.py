"""Checks whether a job could start on this machine, before it asks for devices.

`tandem doctor --worker` prints the checks. The agent runs this module as a program, because a
shared folder may hang: `python -m tandem.agent.preflight` reads `JobNeeds` in JSON from standard
input, and writes checks to standard output. Its exit code is that of the first fault. In a pod, it
has an argument and a report file instead.

No check reserves or uses a device. The checks import nothing of the framework: they ask its
interpreter for the metadata of its packages. To add a check, yield it from one of the three parts,
and its fault into `CODES`."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tandem.agent.environment import inherited
from tandem.agent.host import Accelerator, accelerators, driver_cuda_version, driver_version
from tandem.backends.frameworks import framework_missing, installed_frameworks
from tandem.backends.registry import known_backends
from tandem.errors import FrameworkMissing, InvalidRequest, WorkerStartFailed, describe
from tandem.protocol.worker import LOOPBACK

SOFTWARE, DEVICES, STORAGE = 10, 20, 30
CODES: Mapping[str, int] = {
    "backend_unknown": SOFTWARE,
    "interpreter_unusable": SOFTWARE,
    "package_missing": SOFTWARE,
    "package_version": SOFTWARE,
    "image_unavailable": SOFTWARE,
    "driver_missing": DEVICES,
    "device_missing": DEVICES,
    "device_memory": DEVICES,
    "cuda_mismatch": DEVICES,
    "folder_unwritable": STORAGE,
    "disk_full": STORAGE,
    "model_unreadable": STORAGE,
    "port_unavailable": STORAGE,
    "volume_unavailable": STORAGE,
    "timed_out": STORAGE,
}
"""The exit code of each fault. 0 means that the job can start."""

_PROBE_SECONDS = 30.0
_PROBE_BYTES = 2**16
_REPORT = 1000
"""The longest advice in a report file. Kubernetes reads 4 KiB of it."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"](\d[\d.]*)", re.MULTILINE)
_PROBE = """
import importlib.metadata, importlib.util, json, os, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
spec = importlib.util.find_spec("torch")
file = os.path.join(os.path.dirname(spec.origin), "version.py") if spec and spec.origin else ""
text = open(file).read() if file and os.path.exists(file) else ""
print(json.dumps({"packages": {n: version(n) for n in sys.argv[1:]}, "torch": text}))
"""
"""Runs in the framework's environment. It imports only the standard library of that interpreter."""


class JobNeeds(BaseModel):
    """The needs of a job on its machine.

    Example: `{"framework": "trl", "backend": "trl-sft", "python": "/opt/trl/bin/python",
    "packages": {"trl": "1.16"}, "folder": "/data/jobs/s-ab12_train_0", "model":
    "/data/models/tiny", "devices": 2}`.

    - `framework`: the name of its environment. `backend`: a name of the registry, or "" to leave
      that check out.
    - `python`: the interpreter of the framework's environment. "" means that of this machine.
    - `packages`: packages of that environment, as in `JobConfiguration`.
    - `devices`, `device_bytes`: the number of NVIDIA devices, and the memory of each in bytes. 0
      devices means the cores.
    - `devices_visible`: False in a pod without its claim, which checks only torch's build.
    - `disk_bytes`: free bytes that the job's folder must have.
    - `port`: the loopback port of the rendezvous. 0 means any free one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    framework: str
    backend: str = ""
    python: str = ""
    packages: dict[str, str] = Field(default_factory=dict)
    folder: str
    model: str
    devices: int = Field(0, ge=0)
    device_bytes: int = Field(0, ge=0)
    devices_visible: bool = True
    disk_bytes: int = Field(0, ge=0)
    port: int = Field(0, ge=0, le=65535)


@dataclass(frozen=True)
class PreflightCheck:
    """One result. `fault` is a key of `CODES`, or "" for a good result. `about` gives advice."""

    name: str
    value: str
    about: str = ""
    fault: str = ""

    @property
    def code(self) -> int:
        return CODES.get(self.fault, SOFTWARE) if self.fault else 0

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.name, self.value, self.about)))


_CHECKS = TypeAdapter(tuple[PreflightCheck, ...])


def check_job(
    needs: JobNeeds,
    *,
    found: Callable[[], tuple[Accelerator, ...]] = accelerators,
    driver: Callable[[], str] = driver_version,
    driver_cuda: Callable[[], tuple[int, int]] = driver_cuda_version,
    backends: Callable[[], Mapping[str, str]] = known_backends,
) -> Iterator[PreflightCheck]:
    """`found` returns the devices, `driver` and `driver_cuda` the driver's version and its newest
    CUDA version. `backends` returns the known backends, each with a reason against it, or ""."""
    cuda = yield from _software(needs, backends())
    if needs.devices and needs.devices_visible:
        yield from _devices(needs, found, driver(), driver_cuda(), cuda)
    elif needs.devices and cuda == "":
        yield _built_for_cores()
    yield from _storage(needs)


def exit_code(checks: tuple[PreflightCheck, ...]) -> int:
    return next((each.code for each in checks if each.fault), 0)


# --- Software -------------------------------------------------------------------------------------


def _software(
    needs: JobNeeds, backends: Mapping[str, str]
) -> Generator[PreflightCheck, None, str | None]:
    """Returns torch's CUDA version, such as "13.0", "" if it was built for cores, and None if that
    is unknown."""
    name = f"backend {needs.backend}"
    if needs.backend and (why_not := backends.get(needs.backend, "unknown")):
        about = f"known: {', '.join(backends)}" if why_not == "unknown" else why_not
        yield PreflightCheck(name, "unusable", about, "backend_unknown")
    elif needs.backend:
        yield PreflightCheck(name, "known")
    python = needs.python or "none"
    try:
        python = needs.python or _python_of(needs.framework)
        probe = _probe(python, needs.packages)
    except (FrameworkMissing, FileNotFoundError):
        about = framework_missing(needs.framework).message
        yield PreflightCheck("interpreter", python, about, "interpreter_unusable")
        return None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        about = f"install the environment of {needs.framework}: {describe(error)}"
        yield PreflightCheck("interpreter", python, about, "interpreter_unusable")
        return None
    yield PreflightCheck("interpreter", python)
    for package, wanted in needs.packages.items():
        version = probe["packages"][package]
        if not version:
            about = (
                f"the environment of {needs.framework} lacks it: install {package}{_wanted(wanted)}"
            )
            yield PreflightCheck(package, "not installed", about, "package_missing")
        elif not _begins_with(version, wanted):
            about = f"the backend needs {package}{_wanted(wanted)}"
            yield PreflightCheck(package, version, about, "package_version")
        else:
            yield PreflightCheck(package, version)
    if not probe["torch"]:
        return None
    match = _CUDA.search(probe["torch"])
    return match[1] if match else ""


def _python_of(framework: str) -> str:
    """Return the interpreter of a framework's environment here. Raises `FrameworkMissing`."""
    for found in installed_frameworks((framework,)):
        return found.python
    raise framework_missing(framework)


def _probe(python: str, packages: Iterable[str]) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-c", _PROBE, *packages],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd="/",  # with -c, Python imports from its folder first
        timeout=_PROBE_SECONDS,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _begins_with(version: str, wanted: str) -> bool:
    """Return whether a version such as "1.16.2+cu130" begins with the numbers of "1.16"."""
    parts = version.partition("+")[0].split(".")
    return not wanted or parts[: wanted.count(".") + 1] == wanted.split(".")


def _wanted(version: str) -> str:
    return f" {version}" if version else ""


# --- Devices --------------------------------------------------------------------------------------


def _devices(
    needs: JobNeeds,
    find: Callable[[], tuple[Accelerator, ...]],
    driver: str,
    newest: tuple[int, int],
    cuda: str | None,
) -> Iterator[PreflightCheck]:
    if not driver:
        about = f"the job needs {needs.devices} devices: install NVIDIA's driver"
        yield PreflightCheck("driver", "not found", about, "driver_missing")
        return
    yield PreflightCheck("driver", driver)
    try:
        there = find()
    except InvalidRequest as error:
        yield PreflightCheck("devices", "unusable", error.message, "device_missing")
        return
    large = [each for each in there if each.memory_bytes >= needs.device_bytes]
    value = f"{len(there)} of {needs.devices}"
    if len(there) < needs.devices:
        about = "the job needs more NVIDIA devices than this machine has"
        yield PreflightCheck("devices", value, about, "device_missing")
    elif len(large) < needs.devices:
        gib = f"{needs.device_bytes / 2**30:.1f} GiB"
        about = f"{len(large)} of them have {gib}, which each process needs"
        yield PreflightCheck("device memory", value, about, "device_memory")
    else:
        yield PreflightCheck("devices", value, ", ".join(each.name for each in there))
    if cuda is None:  # there is no torch, and so another fault
        return
    supported = ".".join(map(str, newest))
    if not cuda:
        yield _built_for_cores()
    elif int(cuda.partition(".")[0]) > newest[0]:
        about = f"the driver supports CUDA {supported}: upgrade it, or install an older torch"
        yield PreflightCheck("CUDA", cuda, about, "cuda_mismatch")
    else:
        yield PreflightCheck("CUDA", cuda, f"of torch, and {supported} of the driver")


def _built_for_cores() -> PreflightCheck:
    about = "torch is built for cores alone: install its build for CUDA"
    return PreflightCheck("CUDA", "none", about, "cuda_mismatch")


# --- Storage and network --------------------------------------------------------------------------


def _storage(needs: JobNeeds) -> Iterator[PreflightCheck]:
    yield _folder(Path(needs.folder), needs.disk_bytes)
    yield _model(Path(needs.model))
    try:
        socket.create_server((LOOPBACK, needs.port)).close()
    except OSError as error:
        about = f"the ranks of the job could not meet: {error.strerror}"
        yield PreflightCheck("rendezvous", f"{LOOPBACK}:{needs.port}", about, "port_unavailable")
    else:
        yield PreflightCheck("rendezvous", LOOPBACK)


def _folder(folder: Path, needed: int) -> PreflightCheck:
    name = "job's folder"
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".preflight-") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        fault = "disk_full" if error.errno in _FULL else "folder_unwritable"
        return PreflightCheck(name, str(folder), f"user {os.getuid()}: {error.strerror}", fault)
    value = f"{free / 2**30:.1f} GiB free"
    if free < needed:
        about = f"the job needs {needed / 2**30:.1f} GiB in {folder}"
        return PreflightCheck(name, value, about, "disk_full")
    return PreflightCheck(name, value, str(folder))


def _model(folder: Path) -> PreflightCheck:
    try:
        weights = sorted(folder.glob("*.safetensors"))
        for file in (folder / "config.json", *weights):
            with file.open("rb") as opened:
                opened.read(1)
    except OSError as error:
        about = f"user {os.getuid()}: {error.strerror}: {Path(error.filename or folder).name}"
        return PreflightCheck("model", str(folder), about, "model_unreadable")
    if not weights:
        about = "it has no file of weights (*.safetensors)"
        return PreflightCheck("model", str(folder), about, "model_unreadable")
    return PreflightCheck("model", str(folder), f"{len(weights)} files of weights")


# --- As a program ---------------------------------------------------------------------------------


async def run_preflight(needs: str, *, timeout: float) -> tuple[PreflightCheck, ...]:
    """Return the checks of `JobNeeds` in JSON, made in another process with the variables of
    workers. A check that does not end within `timeout` seconds is a fault.

    Raises `WorkerStartFailed` if the process cannot be started or does not answer."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=inherited(os.environ),
            start_new_session=True,
        )
    except OSError as error:
        raise WorkerStartFailed(f"the preflight could not be started: {describe(error)}") from error
    answer = asyncio.create_task(process.communicate(needs.encode()))
    try:
        done, _ = await asyncio.wait({answer}, timeout=timeout)
    finally:
        answer.cancel()  # a killed process may hang in the kernel, on a lost volume
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if not done:
        about = f"no answer within {timeout:g} s: a shared folder may hang"
        return (PreflightCheck("preflight", "", about, "timed_out"),)
    output, errors = answer.result()
    try:
        return _CHECKS.validate_json(output)
    except ValidationError as error:
        last = "".join(errors.decode(errors="replace").strip().splitlines()[-1:])
        raise WorkerStartFailed(f"the preflight failed: {last}") from error


def read_checks(text: str) -> tuple[PreflightCheck, ...]:
    """Return the checks in a report file, or none if it has another text."""
    try:
        return _CHECKS.validate_json(text)
    except ValidationError:
        return ()


def main() -> int:
    """Write all checks to standard output, or the first fault to a report file of a pod."""
    parser = ArgumentParser()
    parser.add_argument("--needs", help="JobNeeds in JSON, instead of standard input")
    parser.add_argument("--report-file", type=Path)
    arguments = parser.parse_args()
    text = arguments.needs or sys.stdin.buffer.read()
    checks = tuple(check_job(JobNeeds.model_validate_json(text)))
    print(json.dumps([asdict(each) for each in checks]))
    if arguments.report_file:
        faults = [replace(each, about=each.about[:_REPORT]) for each in checks if each.fault][:1]
        arguments.report_file.write_text(json.dumps([asdict(each) for each in faults]))
    return exit_code(checks)


if __name__ == "__main__":
    sys.exit(main())
