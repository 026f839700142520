"""`make bench`: all measurements in turn, each beside its floor."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import tinker
from rich.console import Console
from rich.table import Table

from benchmarks import (
    bursts,
    concurrency,
    overhead,
    publish,
    record,
    rl_step,
    training,
    updates,
)
from tandem.demo.run import wait_ready
from tandem.demo.tiny_model import write_tiny_model
from tandem.stack import Stack

_NO_POOL = {"pool_processes": "0"}
"""The measured processes have the cores to themselves. `benchmarks.starts` measures the pool."""
_COMPILED = {"tandem.compile": "on"}
SECTIONS = (
    "bursts",
    "clients",
    "publish",
    "lora",
    "overhead",
    "training",
    "updates",
    "rl_step",
)


class Bench:
    """A working directory, the results so far and the console."""

    def __init__(self, *, work: Path, quick: bool, console: Console) -> None:
        self.work = work
        self.rounds = 3 if quick else 7
        self.console = console
        self.results: dict[str, object] = {"machine": record.machine()}
        self.model = work / "models" / "tiny"
        write_tiny_model(self.model, seed=0)

    @contextmanager
    def stack(
        self, model: Path, *, ranks: int, **others: str
    ) -> Iterator[tuple[Stack, tinker.ServiceClient]]:
        """Start a stack, like `tandem up`, and connect the SDK to it."""
        directory = self.work / f"data-{time.monotonic_ns()}"
        settings = {"port": "0", "trainer_ranks": str(ranks), **_NO_POOL, **others}
        with Stack(data_dir=directory, settings=settings) as stack:
            stack.add_model(name="bench/model", path=model)
            endpoint = stack.endpoint
            with tinker.ServiceClient(base_url=endpoint.url, api_key=endpoint.api_key) as service:
                yield stack, service

    def show(self, title: str, rows: list[dict[str, object]]) -> None:
        self.results[title] = rows
        table = Table(*rows[0], title=title, title_justify="left")
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        self.console.print(table)

    def bursts(self) -> None:
        with (
            bursts.direct_engine(self.model) as engine,
            self.stack(self.model, ranks=1) as (stack, service),
        ):
            client = service.create_sampling_client(base_model="bench/model").result()
            raw = bursts.RawSampling(stack.endpoint, client._sampling_session_id)
            self.show("bursts", bursts.compare(engine, raw, client, rounds=self.rounds))

    def publish(self) -> None:
        rows = []
        for size, shape in publish.SHAPES.items():
            model = self.work / "models" / size.replace(" ", "")
            write_tiny_model(model, seed=0, shape=shape)
            for ranks in (1, 2):
                with (
                    bursts.direct_engine(model) as engine,
                    self.stack(model, ranks=ranks) as (_stack, service),
                ):
                    client = service.create_lora_training_client("bench/model:full").result()
                    measured = publish.publish_to_served(
                        client, model=model, engine=engine, rounds=self.rounds
                    )
                rows.append({"parameters": size, "ranks": ranks, **measured})
        self.show("publish", rows)

    def clients(self) -> None:
        with self.stack(self.model, ranks=1) as (_stack, service):
            sampler = service.create_sampling_client(base_model="bench/model").result()
            row = concurrency.many_clients(sampler, requests=4 * self.rounds)
        self.show("many clients", [row])

    def lora(self) -> None:
        """Measure the time from an adapter in the trainer's memory to samples of it."""
        rows: list[dict[str, object]] = []
        for size, shape in publish.SHAPES.items():
            model = self.work / "models" / size.replace(" ", "")
            if not model.exists():
                write_tiny_model(model, seed=0, shape=shape)
            with self.stack(model, ranks=1) as (stack, service):
                client = service.create_lora_training_client("bench/model", rank=32).result()
                wait_ready(stack.endpoint)
                measured = publish.adapter_to_served(
                    client, weights=stack.data_dir / "weights", rounds=self.rounds
                )
                rows.append({"parameters": size, **measured})
        self.show("lora publish", rows)

    def training(self) -> None:
        ranks_and_asks: dict[str, tuple[str, int, dict[str, str]]] = {
            "1 rank": ("bench/model:full", 1, {}),
            "2 ranks": ("bench/model:full", 2, {}),
            "LoRA 32": ("bench/model", 1, {}),
            "1 rank, compiled": ("bench/model:full", 1, _COMPILED),
            "LoRA 32, compiled": ("bench/model", 1, _COMPILED),
        }
        with ExitStack() as opened:
            ways = opened.enter_context(training.floors(self.model))
            for name, (model, ranks, asks) in ranks_and_asks.items():
                stack, service = opened.enter_context(self.stack(self.model, ranks=ranks))
                client = service.create_lora_training_client(model, user_metadata=asks).result()
                wait_ready(stack.endpoint)
                ways[name] = training.through_tandem(stack, client)
            self.show("training", training.compare(ways, rounds=self.rounds))

    def updates(self) -> None:
        self.show("updates", updates.measure(self.model, rounds=3 * self.rounds))

    def overhead(self) -> None:
        with self.stack(self.model, ranks=1) as (stack, service):
            client = service.create_lora_training_client("bench/model:full").result()
            wait_ready(stack.endpoint)
            run_id = client.get_info().model_id
            rows = overhead.empty_operation(stack, run_id=run_id, rounds=100 * self.rounds)
        self.show("empty operation", [dict(rows)])

    def rl_step(self) -> None:
        """Measure on all cores, then with one core for the trainer, which client and gateway do not
        use."""
        cores = sorted(os.sched_getaffinity(0))
        self._rl_step("rl step", threads=min(2, len(cores)))
        if len(cores) > 1:
            try:
                self._rl_step("rl step, trainers on one core", threads=1, core=cores[0])
            finally:
                rl_step.pin_process(psutil.Process(), set(cores))

    def _rl_step(self, title: str, *, threads: int, core: int | None = None) -> None:
        ways: dict[str, tuple[int, dict[str, str]]] = {
            "tandem": (1, {}),
            "tandem, compiled": (1, _COMPILED),
        }
        if core is None:
            ways["tandem, 2 ranks"] = (2, {})
        floors = {rl_step.FLOOR: False, rl_step.COMPILED_FLOOR: True}
        steps, made = max(3, self.rounds), {}
        with ExitStack() as opened:
            for name, compiled in floors.items():
                floor = rl_step.floor(self.model, threads=threads, compiled=compiled, core=core)
                made[name] = opened.enter_context(floor)
            for name, (ranks, asks) in ways.items():
                running = self.stack(self.model, ranks=ranks, trainer_threads=str(threads))
                stack, service = opened.enter_context(running)
                client = service.create_lora_training_client(
                    "bench/model:full", user_metadata=asks
                ).result()
                wait_ready(stack.endpoint)
                if core is not None:
                    rl_step.pin(stack, core)
                made[name] = rl_step.through_tandem(stack, client)
            self.show(title, rl_step.compare(made, steps=steps))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--no-save", action="store_true", help="only print")
    arguments = parser.parse_args()
    console = Console(width=160)
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(work=Path(work), quick=arguments.quick, console=console)
        try:
            for section in arguments.sections or SECTIONS:
                console.rule(section)
                getattr(bench, section)()
        finally:  # keep earlier results after a failure
            if not arguments.no_save:
                console.print(f"Written to {record.save(bench.results).name}")


if __name__ == "__main__":
    main()
