"""`make bench-history`: a gateway with millions of past operations beside one without any.

SQL writes the past: ended sessions of one run each, with operations as large as the SDK's. One run
measures both gateways: the start with a cold page cache, and an empty operation, before, during and
after the removal of the past."""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import tinker
from rich.console import Console

from benchmarks import record
from benchmarks.overhead import empty_operation_seconds
from tandem.demo.tiny_model import write_tiny_model
from tandem.protocol.own_machine import http_client
from tandem.stack import Stack

MODEL = "bench/model"
_OPERATIONS_OF_A_RUN = 10_000
_ROWS_AT_ONCE = 500_000
_HOUR, _DAY = 3600.0, 86_400.0
_ROUND = 100
"""Operations of one gateway in its turn."""

Measure = Callable[[], list[float]]


def past(count: int, *, now: float) -> Iterator[tuple[str, int, bytes, float, float]]:
    """Yield operations that ended between 29 days and two hours ago."""
    oldest = now - 29 * _DAY
    gap = (now - 2 * _HOUR - oldest) / count
    params = {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    about = json.dumps(
        {"model_id": "RUN", "seq_id": 0, "adam_params": params, "type": "optim_step"}
    )
    for number in range(count):
        run_id, seq_id = _run_id(number), number % _OPERATIONS_OF_A_RUN
        request = about.replace("RUN", run_id).encode()
        accepted = oldest + number * gap
        yield run_id, seq_id, request, accepted, accepted + 0.01


def _run_id(number: int) -> str:
    return f"s-{number // _OPERATIONS_OF_A_RUN:012x}:train:0"


def fill(file: Path, count: int) -> None:
    now = time.time()
    operations = past(count, now=now)
    runs = [_run_id(number) for number in range(0, count, _OPERATIONS_OF_A_RUN)]
    old = now - 3 * _HOUR
    with closing(sqlite3.connect(file)) as database:
        for pragma in ("synchronous=OFF", "journal_mode=OFF", "cache_size=-500000"):
            database.execute(f"PRAGMA {pragma}")
        for left in range(count, 0, -_ROWS_AT_ONCE):
            some = (next(operations) for _ in range(min(left, _ROWS_AT_ONCE)))
            with database:
                database.executemany(
                    "INSERT INTO operations (run_id, seq_id, kind, state, request, accepted_at, "
                    "ended_at, digest, error_type, error, media) "
                    "VALUES (?, ?, 'optim_step', 'done', ?, ?, ?, x'', '', '', '')",
                    some,
                )
        with database:
            database.executemany(
                "INSERT INTO runs (id, session_id, base_model, training, host, owner, project_id, "
                "state, error_type, reason, parent, newest, replay_after, created_at, ended_at) "
                "VALUES (?, ?, 'bench/model', '{}', '', 'local', '', 'ended', '', '', '', '', -1, "
                "?, ?)",
                [(run, run.partition(":")[0], old, old) for run in runs],
            )
            database.executemany(
                "INSERT INTO sessions (id, state, reason, detail, project_id, owner, sdk_version, "
                "created_at, ended_at) "
                "VALUES (?, 'finished', 'success', '', '', 'local', '', ?, ?)",
                [(run.partition(":")[0], old, old) for run in runs],
            )


class Place:
    """The data directory of one of the two gateways."""

    def __init__(self, data_dir: Path, model: Path) -> None:
        self.data_dir = data_dir
        self.file = data_dir / "tandem.db"
        with self.stack() as stack:  # makes the tables
            stack.add_model(name=MODEL, path=model)

    def stack(self, **settings: str) -> Stack:
        return Stack(data_dir=self.data_dir, settings={"port": "0", **settings}, start_timeout=600)

    def start_seconds(self) -> tuple[float, float]:
        """Start and stop a gateway with a cold page cache. Return seconds until it answered, and of
        processors."""
        with self.file.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with self.stack() as stack:
            took, times = time.perf_counter() - began, psutil.Process(stack.process.pid).cpu_times()
            return round(took, 2), round(times.user + times.system, 2)

    def rows(self) -> dict[str, int]:
        with closing(sqlite3.connect(self.file)) as database:
            return {
                table: database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("operations", "runs", "sessions")
            }

    def megabytes(self) -> float:
        return round(self.file.stat().st_size / 1e6, 1)

    def vacuum(self) -> None:
        with closing(sqlite3.connect(self.file)) as database:
            database.execute("VACUUM")


@contextmanager
def serving(place: Place, **settings: str) -> Iterator[Measure]:
    """Start a gateway with a run. Yield a function that times its operations, in seconds."""
    with ExitStack() as opened:
        stack = opened.enter_context(place.stack(**settings))
        url, key = stack.endpoint.url, stack.endpoint.api_key
        service = opened.enter_context(tinker.ServiceClient(base_url=url, api_key=key))
        training = service.create_lora_training_client(f"{MODEL}:full").result()
        run_id = training.get_info().model_id
        client = opened.enter_context(http_client(f"{url}/api/v1", headers={"X-API-Key": key}))
        seq_ids = iter(range(1, 2**31))

        def measure() -> list[float]:
            return [
                empty_operation_seconds(client, run_id=run_id, seq_id=next(seq_ids))
                for _ in range(_ROUND)
            ]

        measure()  # warm-up
        yield measure


def in_turn(
    here: Measure,
    there: Measure,
    *,
    go_on: Callable[[int], bool],
) -> tuple[list[float], list[float]]:
    """Measure rounds of both, A B B A …, while `go_on` is true for the round's number."""
    ours: list[float] = []
    theirs: list[float] = []
    number = 0
    while go_on(number):
        for measure, found in [(here, ours), (there, theirs)][:: -1 if number % 2 else 1]:
            found += measure()
        number += 1
    return ours, theirs


def row(what: str, seconds: Sequence[float]) -> dict[str, object]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        "empty operation": what,
        "operations": len(seconds),
        **{f"p{p}_ms": round(cuts[p - 1] * 1e3, 2) for p in (50, 95, 99)},
    }


def removed(place: Place) -> bool:
    return "history_removed" in (place.data_dir / "logs" / "gateway.log").read_text()


def run(
    work: Path, *, count: int, rounds: int, removal: float, console: Console
) -> dict[str, object]:
    model = work / "model"
    write_tiny_model(model, seed=0)
    empty, full = (Place(work / name, model) for name in ("empty", "full"))
    began = time.perf_counter()
    fill(full.file, count)
    console.print(f"{count:,} operations written in {time.perf_counter() - began:.0f} s")
    results: dict[str, object] = {"past": full.rows() | {"megabytes": full.megabytes()}}
    console.print(results["past"])
    starts = [(empty.start_seconds(), full.start_seconds()) for _ in range(5)]
    results["start, seconds until it answers and of a processor"] = {
        "without a past": [without for without, _ in starts],
        "with it": [with_it for _, with_it in starts],
    }
    console.print(results)
    rows: list[dict[str, object]] = []
    with serving(empty) as without:

        def compare(what: str, other: Measure, go_on: Callable[[int], bool]) -> None:
            found = in_turn(without, other, go_on=go_on)
            pair = [row(f"without a past, beside that {what}", found[0]), row(what, found[1])]
            for each in pair:
                console.print(each)
            rows.extend(pair)

        with serving(full) as with_past:
            compare("with it", with_past, lambda number: number < rounds)
        began = time.perf_counter()
        end = began + removal
        with serving(full, history_ttl=str(_HOUR)) as removing:
            compare(
                "while it is removed",
                removing,
                lambda number: not number or not (removed(full) or time.perf_counter() > end),
            )
            took = time.perf_counter() - began
            if removed(full):
                compare("after it was removed", removing, lambda number: number < rounds)
    results["latency"] = rows
    left = full.rows() | {"megabytes, reused by later rows": full.megabytes()}
    full.vacuum()
    results["left"] = left | {
        "megabytes after VACUUM": full.megabytes(),
        "seconds of removal": round(took),
    }
    console.print(results["left"])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.history", description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=20, help=f"of {_ROUND} operations each")
    parser.add_argument(
        "--removal", type=float, default=7200, help="seconds after which not to wait for its end"
    )
    parser.add_argument("--no-save", action="store_true", help="only print")
    arguments = parser.parse_args()
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as work:
        results = run(
            Path(work),
            count=arguments.operations,
            rounds=arguments.rounds,
            removal=arguments.removal,
            console=console,
        )
    if not arguments.no_save:
        console.print(f"Written to {record.save({'machine': record.machine()} | results).name}")


if __name__ == "__main__":
    main()
