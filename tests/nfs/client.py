"""The program of a client: it publishes, loads and collects versions in a mounted folder.

`python -m tests.nfs.client NAME CALLS FOLDER TRACE`. CALLS is a device with one call a line, as
JSON. Functions of the product do the work, and a `Recorder` writes each file operation to TRACE."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import astuple
from pathlib import Path

from gateway.checkpoints.versions import WeightVersion
from gateway.identifiers import relative_version_folder
from tandem.errors import LoadFailed
from tandem.weights import Manifest, PartialVersion, checksum_file, open_version, version_path
from tandem.weights.store import write_synced
from tests.support.file_trace import Operation, Recorder
from tests.support.gateway.checkpoint_store import Store, checkpoint

_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def shards(name: str) -> dict[str, bytes]:
    """Return the content of a version's files, which follows from its name."""
    numbers = random.Random(name)
    return {each: numbers.randbytes(numbers.randint(1, 200_000)) for each in _SHARDS}


class Client:
    """`folder` is the data directory, and `private` holds the database."""

    def __init__(self, folder: Path, private: Path) -> None:
        self._folder = folder
        private.mkdir(exist_ok=True)
        url = f"sqlite:///{private / 'tandem.db'}"
        self._store = Store(folder, url=url, private_dir=private)
        self._served: dict[str, ExitStack] = {}

    async def open(self) -> None:
        await self._store.database.open()

    async def close(self) -> None:
        await self._store.database.close()

    # --- The trainer ------------------------------------------------------------------------------

    async def publish(self, name: str, *, die: bool = False) -> dict:
        """Return the files' entries. With `die`, leave the partial folder of a killed trainer."""
        return await asyncio.to_thread(self._publish, name, die)

    def _publish(self, name: str, die: bool) -> dict:
        partial = PartialVersion(version_path(self._folder, name))
        partial.create()
        for file, content in shards(name).items():
            write_synced(partial.path / file, content)
            if die:
                return {}
        files = [checksum_file(partial.path / each) for each in _SHARDS]
        run_id = name.rpartition("/")[0]
        manifest = Manifest(
            version=name, run_id=run_id, step=1, dtype="float32", tensors=2, created="", files=files
        )
        partial.commit(manifest)
        return {each.name: each.checksum for each in files}

    # --- The sampler ------------------------------------------------------------------------------

    async def peek(self, name: str) -> bool:
        """Look for a version, perhaps too early."""
        return await asyncio.to_thread(version_path(self._folder, name).exists)

    async def load(self, name: str) -> dict:
        """Verify a version, and return its files' checksums, or the reason of the failure."""
        try:
            path = version_path(self._folder, name)
            manifest = await asyncio.to_thread(open_version, path, name=name)
        except LoadFailed as error:
            return {"failed": error.message}
        return {each.name: each.checksum for each in manifest.files}

    # --- The gateway ------------------------------------------------------------------------------

    async def serve(self, name: str, *, keep: bool) -> None:
        """Register a version, and pin it instead of the run's last one. `keep`: as a checkpoint."""
        run_id = name.rpartition("/")[0]
        relative = relative_version_folder(name)
        pinned = ExitStack()
        pinned.enter_context(self._store.checkpoints.pins.pinned(relative))
        version = WeightVersion(name=name, path="", run_id=run_id, step=1, base_model="tiny")
        await self._store.versions.add_version(version)
        if keep:
            path = f"tinker://{run_id}/sampler_weights/{name.rpartition('/')[2]}"
            await self._store.checkpoints.put(
                checkpoint(self._store, relative, path=path, version=name)
            )
        self._served.pop(run_id, ExitStack()).close()
        self._served[run_id] = pinned

    async def collect(self, run_id: str, *, ended: bool = False) -> list[str]:
        """Collect, and return the names in the run's folder after the end of the run."""
        if ended:
            self._served.pop(run_id, ExitStack()).close()
        await self._store.collector.collect(run_id, ended=ended)
        if not ended:
            return []
        await self._store.collector.empty_trash()
        folder = version_path(self._folder, f"{run_id}/v").parent
        with suppress(FileNotFoundError):
            return sorted(each.name for each in folder.iterdir())
        return []

    async def trash(self) -> int:
        return len(self._store.trash())


async def serve(name: str, calls: Path, folder: Path, trace: Path) -> None:
    """Answer calls until `end`. Several calls may run at once."""
    loop, incoming = asyncio.get_running_loop(), asyncio.Queue()
    with calls.open("r+b", buffering=0) as wire, trace.open("w", buffering=1 << 16) as lines:
        lock = threading.Lock()  # a text file writes garbage if threads write at once

        def note(operation: Operation) -> None:
            line = f"{json.dumps(astuple(operation), separators=(',', ':'))}\n"
            with lock:
                lines.write(line)

        def read() -> None:
            rest = b""
            while True:
                if not (block := wire.read(4096)):  # nobody has connected yet
                    time.sleep(0.05)
                *whole, rest = (rest + (block or b"")).split(b"\n")
                for line in whole:
                    loop.call_soon_threadsafe(incoming.put_nowait, json.loads(line))

        threading.Thread(target=read, daemon=True).start()
        client = Client(folder, Path("/tmp/private"))
        await client.open()
        print("CALLS", flush=True)

        async def answer(asked: dict) -> None:
            number, call, arguments = asked["number"], asked["call"], asked["arguments"]
            began = time.monotonic()
            try:
                value = began if call == "clock" else await getattr(client, call)(**arguments)
                told: dict = {"number": number, "value": value}
            except Exception as error:  # noqa: BLE001 - told to the caller
                told = {"number": number, "error": f"{type(error).__name__}: {error}"}
            if call != "clock":
                path, more = arguments.get("name", ""), arguments.get("run_id", "")
                outcome = told.get("value", told.get("error"))
                now = time.monotonic()
                note(Operation(name, began, now, f"call {call}", path, more, 0, outcome))
            wire.write(f"{json.dumps(told)}\n".encode())

        tasks: set[asyncio.Task] = set()
        with Recorder(folder, client=name, note=note):
            while (asked := await incoming.get())["call"] != "end":
                tasks.add(task := asyncio.create_task(answer(asked)))
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        await client.close()
        lines.flush()
        wire.write(f"{json.dumps({'number': asked['number'], 'value': None})}\n".encode())


if __name__ == "__main__":
    asyncio.run(
        serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])), debug=False
    )
