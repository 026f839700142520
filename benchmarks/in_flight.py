"""`make bench-in-flight`: 131,072 samples in flight through one gateway, beside 128 training runs.

The gateway, the agent and the protocol are real. A fake engine holds all samples until the
benchmark lets it answer, and fake trainers host the runs. The clients send the SDK's requests, and
hold a long poll for as many of them as the gateway has connections. Meanwhile another owner's runs
send heartbeats, and healthz is asked over new connections. With another checkout as the argument,
this file measures both in turn."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.raw_http import Connection
from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.protocol.own_machine import http_client
from tandem.stack import Endpoint, read_endpoint
from tandem.wire.v1 import tinker_pb2
from tests.support.processes import end_at_signal

HERE = Path(__file__).resolve().parent
MODEL = "bench/model"
SAMPLES, OWNERS, PROCESSES, RUNS = 131_072, 16, 4, 128
TOKENS = 128
"""Of a prompt, and of each answer, which is the prompt in reverse."""
CONNECTIONS = 7936
"""A gateway takes 8,192, and some are not for samples."""
_DIGITS, _BASE = 6, 64
_HEARTBEAT, _HEALTH = 10.0, 0.02
"""Seconds between a session's heartbeats, as in the SDK, and between questions for healthz."""
_PATIENCE = 600.0
_ELSEWHERE = 10
"""The niceness of clients, which have machines of their own. Fake workers have the same."""


# --- Clients -------------------------------------------------------------------------------------


async def _post(connection: Connection, path: str, body: object) -> dict[str, str]:
    status, content = await connection.post(path, body)
    assert status == 200, (path, status, content[:300])
    found: dict[str, str] = json.loads(content)
    return found


async def _new_session(connection: Connection) -> str:
    body = {"tags": [], "sdk_version": "bench"}
    return (await _post(connection, "/api/v1/create_session", body))["session_id"]


def prompt_of(owner: int, number: int) -> list[int]:
    """Return a prompt that no other request has."""
    whole = owner * 2**20 + number
    digits = [whole // _BASE**place % _BASE for place in range(_DIGITS)]
    return [*digits, *[number % _BASE] * (TOKENS - _DIGITS)]


class Owner:
    """An owner's client. It counts the outcomes of its requests in `found`."""

    def __init__(self, endpoint: Endpoint, key: str, number: int, *, samples: int) -> None:
        self._number = number
        self._samples = samples
        self._open = partial(Connection, url=endpoint.url, key=key)
        self.found: Counter[str] = Counter()
        self.accepting: list[float] = []

    async def begin(self) -> None:
        """Open a session, and draw one sample, which starts the engine."""
        async with self._open() as connection:
            self._session = await _new_session(connection)
            body = {"session_id": self._session, "sampling_session_seq_id": 0, "base_model": MODEL}
            made = await _post(connection, "/api/v1/create_sampling_session", body)
            self._sampler = made["sampling_session_id"]
            await self._fetch(connection, *await self._ask(connection, 10**6))
        assert self.found.pop("right") == 1, self.found
        self.accepting.clear()

    async def sample(self, count: int, *, connections: int, accept: Callable[[], None]) -> None:
        numbers = iter(range(count))

        async def use(connection: Connection) -> None:
            async with connection:
                asked = []
                for number in numbers:
                    asked.append(await self._ask(connection, number))
                    accept()
                    if len(asked) * connections >= count:
                        break
                for each in asked:
                    await self._fetch(connection, *each)

        heart = asyncio.create_task(self._beat())
        await asyncio.gather(*(use(self._open()) for _ in range(connections)))
        heart.cancel()

    async def _ask(self, connection: Connection, number: int) -> tuple[int, str]:
        body = {
            "sampling_session_id": self._sampler,
            "seq_id": number,
            "num_samples": self._samples,
            "prompt": {
                "chunks": [{"type": "encoded_text", "tokens": prompt_of(self._number, number)}]
            },
            "sampling_params": {"max_tokens": TOKENS, "seed": number, "stop": []},
        }
        while True:
            began = time.monotonic()
            status, content = await connection.post("/api/v1/asample", body)
            if status != 429:
                break
            self.found["refused for now"] += 1
            await asyncio.sleep(1)
        assert status == 200, (status, content[:300])
        self.accepting.append(time.monotonic() - began)
        return number, json.loads(content)["request_id"]

    async def _fetch(self, connection: Connection, number: int, request_id: str) -> None:
        while True:
            status, content = await connection.post(
                "/api/v1/retrieve_future", {"request_id": request_id}
            )
            if status != 408:
                break
            self.found["polls without news"] += 1
        if status != 200 or content[:1] == b"{":
            self.found[f"lost: {status} {content[:100]!r}"] += 1
            return
        answer = tinker_pb2.SampleResponse.FromString(content)
        expected = np.array(prompt_of(self._number, number)[::-1], np.int32).tobytes()
        right = [sequence.tokens for sequence in answer.sequences] == [expected] * self._samples
        self.found["right" if right else "wrong"] += 1

    async def _beat(self) -> None:
        async with self._open() as connection:
            while True:
                await asyncio.sleep(_HEARTBEAT)
                with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                    await connection.post(
                        "/api/v1/session_heartbeat", {"session_id": self._session}, timeout=10
                    )


def run_clients(
    endpoint: Endpoint,
    keys: dict[int, str],
    load: dict[str, int],
    begin: Event,
    progress: multiprocessing.Queue[tuple[str, Any]],
) -> None:
    async def run() -> None:
        owners = [
            Owner(endpoint, key, number, samples=load["samples"]) for number, key in keys.items()
        ]
        for owner in owners:
            await owner.begin()
        progress.put(("ready", 0))
        await asyncio.to_thread(begin.wait)
        accepted: Counter[str] = Counter()

        def accept() -> None:
            accepted["requests"] += 1
            if accepted["requests"] == load["requests"] * len(owners):
                progress.put(("accepted", 0))

        sampling = (
            owner.sample(load["requests"], connections=load["connections"], accept=accept)
            for owner in owners
        )
        await asyncio.gather(*sampling)
        found: Counter[str] = sum((owner.found for owner in owners), Counter())
        accepting = [each for owner in owners for each in owner.accepting]
        progress.put(("ended", (found, accepting)))

    os.nice(_ELSEWHERE)
    asyncio.run(run())


def run_others(
    endpoint: Endpoint,
    key: str,
    runs: int,
    events: tuple[Event, Event],
    progress: multiprocessing.Queue[tuple[str, Any]],
) -> None:
    """Make the runs, send their heartbeats, and ask for healthz. At the end, each run takes a
    step."""
    beats: list[tuple[float, float]] = []
    healthz: list[tuple[float, float]] = []
    missed: Counter[str] = Counter()
    begin, done = events
    over = asyncio.Event()

    async def make(_number: int) -> tuple[Connection, str, str]:
        connection = Connection(url=endpoint.url, key=key)
        await connection.__aenter__()
        session = await _new_session(connection)
        made = await _post(
            connection,
            "/api/v1/create_model",
            {
                "session_id": session,
                "model_seq_id": 0,
                "base_model": MODEL,
                "lora_config": {"rank": 8},
                "user_metadata": {"tandem.share": "always"},
            },
        )
        await _until_done(connection, made["request_id"])
        return connection, session, made["model_id"]

    async def _until_done(connection: Connection, request_id: str) -> bool:
        while True:
            body = {"request_id": request_id}
            status, content = await connection.post("/api/v1/retrieve_future", body)
            if status not in (408, 429):
                assert status == 200, (status, content[:300])
                return "error" not in json.loads(content)

    async def beat(connection: Connection, session: str, offset: float) -> None:
        await asyncio.sleep(offset)
        while not over.is_set():
            began = time.monotonic()
            try:
                status, _ = await connection.post(
                    "/api/v1/session_heartbeat", {"session_id": session}, timeout=10
                )
                if status != 200:
                    missed[f"status {status}"] += 1
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                missed[type(error).__name__] += 1
                await connection.__aexit__(None, None, None)
                connection._streams = None
            beats.append((began, time.monotonic() - began))
            with suppress(TimeoutError):
                async with asyncio.timeout(began + _HEARTBEAT - time.monotonic()):
                    await over.wait()

    async def ask_health() -> None:
        host, _, port = endpoint.url.removeprefix("http://").rpartition(":")
        began = time.monotonic()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        healthz.append((began, time.monotonic() - began))
        writer.close()

    async def health() -> None:
        async with asyncio.TaskGroup() as asking:  # a late answer delays no further question
            while not done.is_set():
                asking.create_task(ask_health())
                await asyncio.sleep(_HEALTH)
        over.set()

    async def step(connection: Connection, run_id: str) -> bool:
        body = {"model_id": run_id, "seq_id": 1, "adam_params": {}}
        return await _until_done(
            connection, (await _post(connection, "/api/v1/optim_step", body))["request_id"]
        )

    async def run() -> None:
        made = await asyncio.gather(*map(make, range(runs)))
        beating = [
            asyncio.create_task(beat(connection, session, _HEARTBEAT * number / len(made)))
            for number, (connection, session, _) in enumerate(made)
        ]
        progress.put(("ready", 0))
        await asyncio.to_thread(begin.wait)
        beats.clear()
        await asyncio.gather(health(), *beating)
        steps = (step(connection, run_id) for connection, _, run_id in made)
        stepped = sum(await asyncio.gather(*steps))
        progress.put(("others", (healthz, beats, missed, stepped)))

    asyncio.run(run())


# --- The measurement -----------------------------------------------------------------------------


@contextmanager
def running(work: Path) -> Iterator[tuple[Endpoint, psutil.Process]]:
    cores = sorted(os.sched_getaffinity(0))
    groups = [
        {"name": kind, "devices": [f"cpu:{core}"], "roles": [kind], "workers": RUNS}
        for kind, core in (("trainer", cores[0]), ("sampler", cores[-1]))
    ]
    data = work / "data"
    data.mkdir()
    write_tiny_model(work / "tiny", seed=0, shape=TinyShape(layers=1, ffn=128))
    environment = os.environ | {
        "GRPC_VERBOSITY": "ERROR",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        "TANDEM_DATA_DIR": str(data),
        "TANDEM_PORT": "0",
        "TANDEM_POOL_PROCESSES": "0",
        "TANDEM_STOP_TIMEOUT": "0",
        "TANDEM_GROUPS": json.dumps(groups),
        "TANDEM_SHARING_ACROSS_OWNERS": "true",
        "TANDEM_MODELS": json.dumps({MODEL: str(work / "tiny")}),
    }

    def start(log: str, *command: str) -> subprocess.Popen[bytes]:
        with (work / f"{log}.log").open("ab") as file:
            return subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=file, stderr=file
            )

    agent = start("agent", str(HERE / "fake_workers.py"), "agent", str(data))
    gateway = start("gateway", "-m", "gateway")
    try:
        deadline = time.monotonic() + 60
        while (endpoint := read_endpoint(data)) is None:
            assert time.monotonic() < deadline and gateway.poll() is None
            time.sleep(0.05)
        yield endpoint, psutil.Process(gateway.pid)
    finally:
        gateway.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            gateway.wait(60)
        agent.terminate()
        with suppress(subprocess.TimeoutExpired):
            agent.wait(60)
        for each in (gateway, agent):
            each.kill()
            each.wait()


def _memory(process: psutil.Process) -> dict[str, int]:
    text = Path(f"/proc/{process.pid}/status").read_text()
    found = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB", text, re.MULTILINE))
    return {name: int(found[name]) // 1024 for name in ("VmHWM", "VmRSS")}


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    found = {f"p{p}_ms": round(cuts[p - 1] * 1e3, 1) for p in (50, 99)}
    return {"count": len(seconds), **found, "max_ms": round(max(seconds) * 1e3, 1)}


def measure(*, requests: int, hold: float, keep: Path | None) -> dict[str, object]:
    each, samples = requests // OWNERS, SAMPLES // requests
    load = {"requests": each, "samples": samples, "connections": min(each, CONNECTIONS // OWNERS)}
    context = multiprocessing.get_context("spawn")
    done, begin = context.Event(), context.Event()
    progress: multiprocessing.Queue[tuple[str, Any]] = context.Queue()

    def expect(name: str, count: int) -> list[Any]:
        found = []
        for _ in range(count):
            said, value = progress.get(timeout=_PATIENCE)
            assert said == name, (said, value)
            found.append(value)
        return found

    with tempfile.TemporaryDirectory() as folder, running(keep or Path(folder)) as found:
        endpoint, gateway = found
        work = keep or Path(folder)
        with endpoint.client() as client:

            def key(owner: str) -> str:
                made = client.post("keys", json={"owner": owner, "role": "member"})
                return str(made.raise_for_status().json()["key"])

            others = (endpoint, key("trainer"), RUNS, (begin, done), progress)
            processes = [context.Process(target=run_others, args=others, daemon=True)]
            processes[0].start()
            expect("ready", 1)
            for number in range(PROCESSES):
                keys = {owner: key(f"owner-{owner}") for owner in range(number, OWNERS, PROCESSES)}
                arguments = (endpoint, keys, load, begin, progress)
                processes.append(context.Process(target=run_clients, args=arguments, daemon=True))
                processes[-1].start()
            expect("ready", PROCESSES)
            workers = client.get("status").raise_for_status().json()["workers"]
            (engine,) = [each["pid"] for each in workers if each["kind"] == "sampler"]
        os.kill(engine, signal.SIGUSR2)
        memory, cpu = {"before": _memory(gateway)}, [_cpu(gateway)]
        times = [time.monotonic()]

        def end_phase(name: str) -> None:
            times.append(time.monotonic())
            cpu.append(_cpu(gateway))
            memory[name] = _memory(gateway)
            print(name, round(times[-1] - times[-2], 1), memory[name], flush=True, file=sys.stderr)

        begin.set()
        expect("accepted", PROCESSES)
        end_phase("sent")
        time.sleep(hold)
        end_phase("held")
        os.kill(engine, signal.SIGUSR1)
        ended = expect("ended", PROCESSES)
        end_phase("answered")
        time.sleep(1)
        done.set()
        ((healthz, beats, missed, stepped),) = expect("others", 1)
        for process in processes:
            process.join(_PATIENCE)
        received = json.loads((work / "received.json").read_text())
        with http_client(endpoint.url) as http:
            metrics = http.get("metrics").text
    outcomes: Counter[str] = sum((counts for counts, _ in ended), Counter())
    counted = re.search(r'^tandem_gateway_samples_total\{outcome="done"\} (\S+)', metrics, re.M)
    tokens = re.search(r"^tandem_gateway_sampled_tokens_total (\S+)", metrics, re.M)
    assert counted is not None and tokens is not None
    warm_up = OWNERS
    phases = {}
    for number, name in enumerate(("sent", "held", "answered")):
        first, last = times[number], times[number + 1]
        phases[name] = {
            "seconds": round(last - first, 1),
            "gateway_cpu_seconds": round(cpu[number + 1] - cpu[number], 1),
            "rss_mib": memory[name]["VmRSS"],
            "healthz": percentiles([took for at, took in healthz if first <= at < last]),
        }
    return {
        "requests": each * OWNERS,
        "samples": each * OWNERS * samples,
        "long_polls": load["connections"] * OWNERS,
        "owners": OWNERS,
        "outcomes": dict(outcomes),
        "lost": each * OWNERS - outcomes["right"] - outcomes["wrong"],
        "engine_received": received["requests"] - warm_up,
        "engine_received_different": received["different"] - warm_up,
        "gateway_counted": int(float(counted[1])) - warm_up,
        "gateway_counted_samples": round(float(tokens[1]) / TOKENS) - warm_up * samples,
        "rss_mib_before": memory["before"]["VmRSS"],
        "peak_rss_mib": memory["answered"]["VmHWM"],
        "phases": phases,
        "healthz": percentiles([took for _, took in healthz]),
        "accepting": percentiles([each for _, found in ended for each in found]),
        "runs": RUNS,
        "heartbeats": percentiles([took for _, took in beats]),
        "heartbeats_missed": dict(missed),
        "runs_that_stepped_afterwards": stepped,
    }


def measure_checkout(checkout: Path, *, requests: int, hold: float) -> dict[str, object]:
    command = [sys.executable, str(HERE / "in_flight.py"), "--alone", "--hold", str(hold)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [*command, "--requests", str(requests)],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=4 * _PATIENCE,
    )
    row: dict[str, object] = json.loads(done.stdout)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="in_flight", description=__doc__)
    parser.add_argument("other", nargs="?", type=Path, help="a checkout to measure in turn")
    parser.add_argument("--requests", type=int, nargs="+", default=[SAMPLES // 16, SAMPLES // 4])
    parser.add_argument("--hold", type=float, default=35.0, help="seconds, all in flight")
    parser.add_argument("--keep", type=Path, help="an empty folder for the logs, with --alone")
    parser.add_argument("--alone", action="store_true", help="print JSON, and write nothing")
    arguments = parser.parse_args()
    end_at_signal()
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if arguments.alone:
        (requests,) = arguments.requests
        print(json.dumps(measure(requests=requests, hold=arguments.hold, keep=arguments.keep)))
        return
    from benchmarks import record  # missing if this file runs alone

    checkouts = {"this checkout": HERE.parent}
    if arguments.other is not None:
        checkouts["another checkout"] = arguments.other.resolve()
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in checkouts}
    for number, requests in enumerate(arguments.requests):
        for name in list(checkouts)[:: -1 if number % 2 else 1]:
            row = measure_checkout(checkouts[name], requests=requests, hold=arguments.hold)
            rows[name].append(row)
            print(name, json.dumps(row, indent=1), flush=True)
    about = {"tokens": TOKENS, "load": os.getloadavg()}
    path = record.save({"machine": record.machine(), "about": about, "in flight": rows})
    print(f"Written to {path.name}")


if __name__ == "__main__":
    main()
