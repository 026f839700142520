"""`make bench-takeover`: the pause of a training client when a standby replaces its gateway.

Two gateways share a PostgreSQL database, an agent and a trainer. The SDK trains through a load
balancer that asks both for `readyz`. The active gateway is stopped, killed or frozen, and becomes
the next standby. Then an undisturbed run must have the same losses. With another checkout as the
argument, both are measured in turn."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import tinker
from tinker import types

from benchmarks import record
from benchmarks.recovery import batch
from tandem.demo.tiny_model import write_tiny_model
from tandem.protocol.own_machine import http_client
from tests.support.ports import known_port
from tests.support.postgres import Postgres, running_postgres
from tests.support.processes import end_at_signal

HERE = Path(__file__).resolve().parent.parent
MODEL, KEY = "bench/model", "tml-bench-key"
FAULTS = {"stopped": signal.SIGTERM, "killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
_LOOK, _PATIENCE = 0.1, 60.0
_STEPS = 10
"""Steps before each fault, and after the takeover."""


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "a gateway did not become ready"
        time.sleep(0.02)


class LoadBalancer:
    """Passes TCP connections to the ready gateway, or to one that answers.

    It asks each for `readyz` ten times a second. It breaks the connections to a gateway that does
    not answer for a second."""

    def __init__(self, ports: tuple[int, int]) -> None:
        self.ports = ports
        self.url = ""
        self.ready: int | None = None
        self._silent: set[int] = set()
        self._open: dict[int, set[asyncio.StreamWriter]] = {port: set() for port in ports}
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        thread.start()
        wait(lambda: bool(self.url))
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._over.set)
            thread.join()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        looking = [asyncio.create_task(self._look(port)) for port in self.ports]
        await self._over.wait()
        server.close()
        for task in looking:
            task.cancel()
        for port in self.ports:
            self._break(port)
        await asyncio.sleep(_LOOK)

    async def _look(self, port: int) -> None:
        with http_client(f"http://127.0.0.1:{port}", timeout=1.0) as client:
            while True:
                ready = False
                try:
                    answer = await asyncio.to_thread(client.get, "/api/v1/readyz")
                    ready = answer.is_success
                    self._silent.discard(port)
                except httpx.TimeoutException:
                    self._silent.add(port)
                    self._break(port)
                except httpx.HTTPError:
                    pass
                if ready:
                    self.ready = port
                elif self.ready == port:
                    self.ready = None
                await asyncio.sleep(_LOOK)

    def _break(self, port: int) -> None:
        for writer in self._open[port]:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for port in sorted(self.ports, key=lambda port: (port != self.ready, port in self._silent)):
            try:
                theirs, there = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                continue
        else:
            writer.transport.abort()
            return
        pair = {writer, there}
        self._open[port] |= pair
        with suppress(OSError):
            await asyncio.gather(_pass_on(reader, there), _pass_on(theirs, writer))
        self._open[port] -= pair


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


class Rig:
    """An agent, two gateways of a checkout and a client that trains, beside `idle` LoRA runs."""

    def __init__(
        self, checkout: Path, folder: Path, *, database: str, balancer: LoadBalancer, idle: int
    ):
        self.balancer = balancer
        self._idle = idle
        self._checkout, self._folder = checkout, folder
        self._environment = os.environ | {
            "PYTHONPATH": str(checkout),
            "TANDEM_DATA_DIR": str(folder / "data"),
            "TANDEM_DATABASE_URL": database,
            "TANDEM_API_KEY": KEY,
            "TANDEM_TRAINER_RANKS": "1",
            "TANDEM_MODELS": json.dumps({MODEL: str(folder / "model")}),
        }
        self._gateways: dict[int, subprocess.Popen[bytes]] = {}
        self._data = batch()
        self.losses: list[float] = []
        self.results: list[float] = []
        """The time of each result."""

    @contextmanager
    def running(self) -> Iterator[None]:
        write_tiny_model(self._folder / "model", seed=0)
        (self._folder / "data").mkdir()
        agent = self._start("agent", "tandem.agent", "--data-dir", str(self._folder / "data"))
        try:
            for port in self.balancer.ports:
                self._start_gateway(port)
            with self.balancer.serving():
                wait(lambda: self.balancer.ready is not None)
                self._service = tinker.ServiceClient(base_url=self.balancer.url, api_key=KEY)
                with self._service:
                    for _ in range(self._idle):
                        run = self._service.create_lora_training_client(MODEL, rank=8).result()
                        run.forward_backward(self._data, "cross_entropy").result()
                    self._training = self._new_run()
                    for _ in range(_STEPS):
                        self.step()
                    yield
        finally:
            for gateway in self._gateways.values():
                gateway.kill()
            agent.terminate()
            agent.wait(_PATIENCE)

    def _start(self, log: str, *module: str, **more: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{log}.log").open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", *module],
                cwd=self._checkout,
                env=self._environment | more,
                stdout=file,
                stderr=file,
            )

    def _start_gateway(self, port: int) -> None:
        self._gateways[port] = self._start(f"gateway-{port}", "gateway", TANDEM_PORT=str(port))

        def answers() -> bool:
            try:
                return client.get("/api/v1/healthz").is_success
            except httpx.HTTPError:
                return False

        with http_client(f"http://127.0.0.1:{port}", timeout=5) as client:
            wait(answers)

    def _new_run(self) -> tinker.TrainingClient:
        return self._service.create_lora_training_client(f"{MODEL}:full").result()

    def step(self) -> None:
        begun = self._training.forward_backward(self._data, "cross_entropy")
        stepped = self._training.optim_step(types.AdamParams(learning_rate=1e-3))
        self.losses.append(begun.result().metrics["loss:sum"])
        self.results.append(time.perf_counter())
        stepped.result()
        self.results.append(time.perf_counter())

    def pause(self, fault: str) -> dict[str, float]:
        """Do a fault to the active gateway while the client trains. Return the longest time between
        two results, and the usual one, in seconds."""
        port = self.balancer.ready
        assert port is not None
        gateway, others = self._gateways[port], {*self.balancer.ports} - {port}
        first = len(self.results)
        for _ in range(_STEPS):
            self.step()
        timer = threading.Timer(random.uniform(0, 0.1), gateway.send_signal, [FAULTS[fault]])
        began = time.perf_counter()
        timer.start()
        while self.balancer.ready not in others:
            self.step()
        for _ in range(_STEPS):
            self.step()
        times = self.results[first:]
        gaps = {later: later - earlier for earlier, later in itertools.pairwise(times)}
        if fault == "frozen":
            gateway.send_signal(signal.SIGCONT)
        status = gateway.wait(_PATIENCE)
        assert status == {"stopped": 0, "killed": -9, "frozen": 1}[fault], status
        self._start_gateway(port)
        longest = max(gap for later, gap in gaps.items() if later > began)
        return {"pause": longest, "usual": statistics.median(gaps.values())}

    def has_lost_or_repeated(self) -> int:
        """Return the number of steps whose losses differ from an undisturbed run's."""
        disturbed, self.losses = self.losses, []
        self._training = self._new_run()
        for _ in disturbed:
            self.step()
        return sum(ours != theirs for ours, theirs in zip(disturbed, self.losses, strict=True))


def row(seconds: list[float]) -> dict[str, object]:
    return {
        "faults": len(seconds),
        "median_seconds": round(statistics.median(seconds), 2),
        "seconds": [round(each, 2) for each in sorted(seconds)],
    }


@contextmanager
def rig(checkout: Path, folder: Path, server: Postgres, *, idle: int) -> Iterator[Rig]:
    folder.mkdir(parents=True)
    balancer = LoadBalancer((known_port(), known_port()))
    database = server.database_for(folder)
    found = Rig(checkout, folder, database=database, balancer=balancer, idle=idle)
    with found.running():
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.takeover", description=__doc__)
    parser.add_argument("other", nargs="?", type=Path, help="a checkout to measure in turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--runs", type=int, default=0, help="idle LoRA runs beside the client's")
    parser.add_argument("--no-save", action="store_true", help="only print")
    parser.add_argument("--keep", type=Path, help="an empty folder for the logs")
    arguments = parser.parse_args()
    end_at_signal()
    checkouts = {"this checkout": HERE}
    if arguments.other is not None:
        checkouts["another checkout"] = arguments.other.resolve()
    pauses: dict[str, dict[str, list[float]]] = {
        name: {fault: [] for fault in arguments.faults} for name in checkouts
    }
    usual: list[float] = []
    results: dict[str, dict[str, object]] = {}
    with ExitStack() as stack:
        work = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(running_postgres())
        rigs = {
            name: stack.enter_context(
                rig(path, work / name.replace(" ", "-"), server, idle=arguments.runs)
            )
            for name, path in checkouts.items()
        }
        for number in range(arguments.rounds):
            for fault in arguments.faults:
                for name in list(rigs)[:: -1 if number % 2 else 1]:
                    found = rigs[name].pause(fault)
                    print(name, fault, {k: round(v, 3) for k, v in found.items()}, flush=True)
                    pauses[name][fault].append(found["pause"])
                    usual.append(found["usual"])
        for name, each in rigs.items():
            steps = len(each.losses)
            differing = each.has_lost_or_repeated()
            rows = {fault: row(seconds) for fault, seconds in pauses[name].items()}
            results[name] = {"steps": steps, "steps_that_differ": differing, **rows}
    about = {
        "idle_runs": arguments.runs,
        "usual_seconds": round(statistics.median(usual), 3),
        "load": os.getloadavg(),
    }
    print(json.dumps(results, indent=1))
    if not arguments.no_save:
        path = record.save({"machine": record.machine(), "about": about} | results)
        print(f"Written to {path.name}")


if __name__ == "__main__":
    main()
