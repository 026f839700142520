"""A sandbox for code that a policy writes, on this machine.

It uses the strongest isolation that the machine allows:

- `bubblewrap` (the program `bwrap`): no network, own processes, and a file system with only the
  system's programs, this Python and the folder of the run.
- `unshare`: no network and own processes. The code reads and writes the user's files.
- `limits`: only limits. **This is no security boundary**: the code is an ordinary process of the
  user. It reaches the network and the user's files, and can kill the user's processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from tandem.rl.environments import supervisor

Isolation = Literal["bubblewrap", "unshare", "limits"]
Reason = Literal["exited", "timeout", "memory", "processes", "disk", "output", "killed"]

_GRACE = 10.0
"""Seconds after the timeout for the supervisor's own start and end."""
_CHUNK = 2**16
_INSIDE = "/sandbox"
"""The folder of a run in bubblewrap's file system."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives")


class SandboxFailed(Exception):
    """The sandbox could not run the code: the fault is the machine's, not the code's."""


@dataclasses.dataclass(frozen=True)
class SandboxResult:
    """The end of a run. `exit_code` is that of the program, or minus a signal's number, or -1
    if the sandbox ended it. `reason` names the broken limit. "killed" means that the code killed
    its supervisor."""

    stdout: str
    stderr: str
    exit_code: int
    reason: Reason

    @property
    def succeeded(self) -> bool:
        return self.reason == "exited" and self.exit_code == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Runs programs in a new folder, which is deleted at the end with everything in it.

    `timeout` is in seconds of wall time. `memory_bytes` bounds the address space of a process, and
    the resident memory of all. `disk_bytes` bounds the folder. `output_bytes` bounds each of stdout
    and stderr. `readable` are more paths to read under bubblewrap. `isolation` None takes the
    strongest one that works."""

    timeout: float = 10.0
    memory_bytes: int = 2**30
    disk_bytes: int = 2**26
    processes: int = 32
    output_bytes: int = 2**20
    network: bool = False
    readable: Sequence[str | Path] = ()
    isolation: Isolation | None = None
    _search: list[asyncio.Task[Isolation]] = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False
    )

    async def python(
        self, code: str, *, stdin: str = "", files: Mapping[str, str | bytes] | None = None
    ) -> SandboxResult:
        """Run code with this process's Python and its packages."""
        files = {**(files or {}), "main.py": code}
        return await self.run_program([sys.executable, "-B", "main.py"], stdin=stdin, files=files)

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
    ) -> SandboxResult:
        """Run a program. `files` are written to its folder first, by relative path.

        Raises `SandboxFailed` if the machine cannot start it."""
        isolation = await self.find_isolation()
        folder = Path(tempfile.mkdtemp(prefix="tandem-sandbox-"))
        try:
            _write(folder, files or {})
            return await self._run_in(folder, list(argv), stdin.encode(), isolation)
        finally:
            await asyncio.shield(asyncio.to_thread(_remove, folder))

    async def find_isolation(self) -> Isolation:
        """Return the isolation of runs. The first call tries the stronger ones."""
        if self.isolation is not None:
            return self.isolation
        if not self._search:
            self._search.append(asyncio.create_task(self._strongest()))
        return await asyncio.shield(self._search[0])

    async def _strongest(self) -> Isolation:
        tried: tuple[Isolation, ...] = ("bubblewrap", "unshare")
        for each in tried:
            if await self._works(each):
                return each
        return "limits"

    async def _works(self, isolation: Isolation) -> bool:
        try:
            result = await dataclasses.replace(self, isolation=isolation).run_program(["true"])
        except SandboxFailed:
            return False
        return result.succeeded

    async def _run_in(
        self, folder: Path, argv: list[str], stdin: bytes, isolation: Isolation
    ) -> SandboxResult:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process = None
        try:
            with theirs:
                command = self._command(folder, argv, isolation, theirs.fileno())
                process = await _start(command, folder, theirs.fileno(), isolation)
            streams = asyncio.gather(
                _feed(process, stdin),
                self._read(process.stdout, ours),
                self._read(process.stderr, ours),
                _report(ours, isolation),
            )
            try:
                async with asyncio.timeout(self.timeout + _GRACE):
                    _fed, stdout, stderr, lines = await streams
            except TimeoutError:
                raise SandboxFailed(
                    f"the sandbox ({isolation}) did not end {_GRACE:g} s after its timeout"
                ) from None
        finally:
            ours.close()  # the supervisor kills all, and ends
            if process is not None:
                await _end(process)
        return self._result(stdout, stderr, lines, isolation)

    def _result(
        self, stdout: bytes, stderr: bytes, lines: list[str], isolation: Isolation
    ) -> SandboxResult:
        out, err = (each[: self.output_bytes].decode(errors="replace") for each in (stdout, stderr))
        reason: Reason
        if not lines:
            raise SandboxFailed(f"the sandbox ({isolation}) did not start: {err.strip()}")
        if max(len(stdout), len(stderr)) > self.output_bytes:
            code, reason = -1, "output"
        elif len(lines) < 2:
            code, reason = -1, "killed"
        else:
            report = json.loads(lines[1])
            code, reason = report["exit_code"], report["reason"]
        return SandboxResult(stdout=out, stderr=err, exit_code=code, reason=reason)

    def _command(self, folder: Path, argv: list[str], isolation: Isolation, fd: int) -> list[str]:
        inside = _INSIDE if isolation == "bubblewrap" else str(folder)
        task = supervisor.SandboxTask(
            argv=argv,
            folder=inside,
            control=fd,
            outside=supervisor.process_namespace(),
            timeout=self.timeout,
            memory_bytes=self.memory_bytes,
            disk_bytes=self.disk_bytes,
            processes=self.processes,
        )
        program = Path(supervisor.__file__).read_text(encoding="utf-8")
        # -S and -I: neither site packages nor files of the folder are imported.
        ending = [sys.executable, "-I", "-S", "-c", program, json.dumps(dataclasses.asdict(task))]
        if isolation == "limits":
            return ending
        if isolation == "unshare":
            network = [] if self.network else ["--net"]
            return [
                *("unshare", "--user", "--map-root-user", "--ipc", "--uts", "--pid", "--fork"),
                *("--kill-child", "--mount-proc", *network, "--"),
                *ending,
            ]
        read_only = {*_SYSTEM, *self.readable, sys.prefix, sys.base_prefix}
        read_only |= {os.path.realpath(each) for each in (sys.base_prefix, sys.executable)}
        binds = [part for each in sorted(map(str, read_only)) for part in _bind(each)]
        # A Python below /tmp needs a folder there.
        has_tmp = any(each.startswith("/tmp/") for each in binds)
        temporary = [] if has_tmp else ["--symlink", _INSIDE, "/tmp"]
        return [
            *("bwrap", "--unshare-all", *(["--share-net"] if self.network else [])),
            *("--die-with-parent", "--new-session", "--bind", str(folder), _INSIDE, *temporary),
            *(*binds, "--proc", "/proc", "--dev", "/dev", "--chdir", _INSIDE, "--"),
            *ending,
        ]

    async def _read(self, stream: asyncio.StreamReader | None, control: socket.socket) -> bytes:
        """Return the output up to its bound and a little more. Beyond it, the run stops."""
        assert stream is not None
        found = bytearray()
        while chunk := await stream.read(_CHUNK):
            if len(found) <= self.output_bytes:
                found += chunk
                if len(found) > self.output_bytes:
                    control.shutdown(socket.SHUT_WR)
        return bytes(found)


async def _start(
    command: list[str], folder: Path, control: int, isolation: Isolation
) -> asyncio.subprocess.Process:
    home = _INSIDE if isolation == "bubblewrap" else str(folder)
    program = shutil.which(command[0])
    if program is None:
        raise SandboxFailed(f"{command[0]} is not installed")
    try:
        return await asyncio.create_subprocess_exec(
            program,
            *command[1:],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(control,),
            start_new_session=True,
            env={
                "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
                "HOME": home,
                "TMPDIR": home,
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
            },
        )
    except OSError as error:
        raise SandboxFailed(f"{command[0]} did not start: {error.strerror}") from error


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # the program did not read all of it
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


async def _report(control: socket.socket, isolation: Isolation) -> list[str]:
    """Return the supervisor's lines. If the code killed it, kill the code."""
    loop = asyncio.get_running_loop()
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := await loop.sock_recv(control, _CHUNK):
            found += chunk
    lines = found.decode().splitlines()
    if len(lines) == 1 and isolation == "limits":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(json.loads(lines[0])["child"], signal.SIGKILL)
    return lines


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for the supervisor, and kill its process group if it is late."""
    try:
        async with asyncio.timeout(_GRACE):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _bind(path: str) -> tuple[str, ...]:
    return ("--ro-bind-try", path, path)


def _write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or PurePosixPath(name).is_absolute():
            raise ValueError(f"the file {name!r} is not inside the sandbox's folder")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _remove(folder: Path) -> None:
    """Delete the folder, also folders in it that their owner must not write."""
    for root, folders, _files in os.walk(folder):
        for name in folders:
            path = Path(root, name)
            if not path.is_symlink():
                path.chmod(stat.S_IRWXU)
    shutil.rmtree(folder)
