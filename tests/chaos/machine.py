"""`tandem up` on a small disk of its own, behind a proxy."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import tinker

from tandem.stack import Endpoint, read_endpoint
from tests.support.processes import Process, marked, small_disk
from tests.support.stacks import SMALL
from tests.support.waiting import wait_until

_UP = """
import sys
from tandem.protocol.worker import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from tandem.cli import main
main()
"""
_START_SECONDS = 120.0
_DISK = 256
"""Megabytes. Two experiments use less than a tenth of them."""


class Machine:
    """`processes` finds all processes and their children by an environment mark."""

    def __init__(
        self, folder: Path, *, models: dict[str, Path], settings: dict[str, str], own_disk: bool
    ) -> None:
        self.data_dir = folder / "data"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.own_disk = own_disk
        self.log_path = folder / "up.log"
        self.mark = f"chaos-{uuid.uuid4().hex}"
        self.proxy = Proxy(lambda: read_endpoint(self.data_dir))
        self._models = [f"--model={name}={path}" for name, path in models.items()]
        self._environment = {f"TANDEM_{k.upper()}": v for k, v in {**SMALL, **settings}.items()}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = ["up", "--port", "0", "--data-dir", str(self.data_dir), *self._models]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _UP, str(os.getpid()), *arguments],
                env={
                    **os.environ,
                    **self._environment,
                    "TANDEM_TEST_CHAOS_MARK": self.mark,
                    "TMPDIR": str(self.temporary),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process = self._process

        def serves() -> bool:
            assert process.poll() is None, f"tandem up ended: {self.log_path.read_text()[-2000:]}"
            endpoint = read_endpoint(self.data_dir)
            return endpoint is not None and endpoint.pid in {each.pid for each in self.processes()}

        wait_until(serves, what="tandem up serves", timeout=_START_SECONDS)

    def stop(self) -> None:
        """Stop it as Ctrl-C does."""
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(_START_SECONDS) == 0, self.log_path.read_text()[-2000:]
        self._nothing_runs()

    def crash(self) -> None:
        """Kill `tandem up`, which ends all its processes."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._nothing_runs()

    def _nothing_runs(self) -> None:
        wait_until(lambda: not self.processes(), what="all processes have ended")

    def processes(self) -> list[Process]:
        return sorted(marked(self.mark), key=lambda process: process.pid)

    def found(self, *parts: str) -> list[int]:
        """Return the ids of processes with one of the parts in their command."""
        return [p.pid for p in self.processes() if any(part in p.command for part in parts)]

    def service(self) -> tinker.ServiceClient:
        """The unmodified SDK, through the proxy."""
        endpoint = read_endpoint(self.data_dir)
        assert endpoint is not None
        return tinker.ServiceClient(base_url=self.proxy.url, api_key=endpoint.api_key)

    def ask(self, path: str) -> httpx.Response:
        endpoint = read_endpoint(self.data_dir)
        assert endpoint is not None
        headers = {"X-API-Key": endpoint.api_key}
        return httpx.get(f"{endpoint.url}/{path}", headers=headers, timeout=60).raise_for_status()

    def keep_for_a_look(self, folder: Path) -> None:
        """Copy logs and database to a folder that outlives the disk."""
        shutil.copytree(self.data_dir / "logs", folder / "logs", dirs_exist_ok=True)
        for file in self.data_dir.glob("tandem.db*"):
            shutil.copy(file, folder)


@contextmanager
def machine(
    folder: Path, *, models: dict[str, Path], settings: dict[str, str]
) -> Iterator[Machine]:
    with small_disk(folder / "data", megabytes=_DISK) as mounted:
        found = Machine(folder, models=models, settings=settings, own_disk=mounted)
        try:
            found.start()
            with found.proxy.serving():
                yield found
                found.stop()
        except BaseException:
            found.keep_for_a_look(folder)
            raise
        finally:
            found.crash()


class Proxy:
    """A proxy between the SDK and the gateway."""

    def __init__(self, target: Callable[[], Endpoint | None]) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._carried: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._refuses = False
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        wait_until(lambda: self.url, what="the proxy serves")
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._over.set)
            thread.join()

    def cut(self) -> None:
        """Break all connections, and new ones until `mend`."""
        self._refuses = True
        self._loop.call_soon_threadsafe(self._abort_all)

    def mend(self) -> None:
        self._refuses = False

    def _abort_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await self._over.wait()
        server.close()
        self._refuses = True
        self._abort_all()
        await asyncio.gather(*self._carried)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, ends = asyncio.current_task(), [writer]
        assert task is not None
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)
        self._open.add(writer)
        try:
            endpoint = self._target()
            if self._refuses or endpoint is None:
                return
            url = httpx.URL(endpoint.url)
            there = await asyncio.open_connection(url.host, url.port)
            ends.append(there[1])
            self._open.add(there[1])
            both = [
                asyncio.create_task(_pump(reader, there[1])),
                asyncio.create_task(_pump(there[0], writer)),
            ]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for each in both:
                each.cancel()
        except OSError:
            pass  # the gateway is away
        finally:
            for each in ends:
                self._open.discard(each)
                each.transport.abort()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await source.read(2**16):
            target.write(part)
            await target.drain()
