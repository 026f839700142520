"""`python -m tests.fuzz --requests 100000 --seed 1`: exit status 1 if a fault was found.

The real trainer also checks every body of a forward_backward. Requests that find a fault are
printed, and with `--keep` saved in `tests/fuzz/regressions/`."""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from gateway.app import path_operations
from tandem.telemetry import configure_logging
from tests.fuzz.cases import Case, Cases
from tests.fuzz.secrets import Watch
from tests.fuzz.trainer import Checked, bounded_memory, resident_bytes
from tests.fuzz.world import CheckingTrainer, World
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.running import KEY, make_model, running_gateway
from tests.support.waiting import wait_until

REGRESSIONS = Path(__file__).parent / "regressions"
PER_WORLD = 250
GROWTH = 96 * 2**20
"""Bytes that memory may grow after the first quarter. Results and database pages are kept for a
while."""
_MEMORY = 6 * 2**30
"""Bytes that this process may map beyond its start. A request for more is reported as a fault."""
_TRAINER_MEMORY = 2 * 2**30
_TOLD_EVERY = 5000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first request")
    parser.add_argument("--keep", action="store_true", help="keep what found a fault")
    parser.add_argument("--most", type=int, default=1, help="stop after so many faults")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, bounded_memory(_MEMORY):
        run = Run(Path(folder), seed=given.seed, keep=given.keep, most=given.most)
        faults = run.all(first=given.first, requests=given.requests)
    seconds = time.monotonic() - began
    print(
        f"{given.requests} requests of seed {given.seed} in {seconds:.0f} s, {faults} faults; "
        f"answers: {dict(sorted(run.statuses.items()))}; trainer: "
        f"{dict(sorted(run.trainer_answers.items()))}; memory grew by "
        f"{run.growth / 2**20:.0f} MiB; {run.watch.lines} lines of log"
    )
    return 1 if faults else 0


class Run:
    def __init__(self, folder: Path, *, seed: int, keep: bool, most: int) -> None:
        self._folder = folder
        self._seed = seed
        self._keep = keep
        self._most = most
        self._faults = 0
        self._checked = Checked()
        self.statuses: Counter[int] = Counter()
        self.trainer_answers: Counter[str] = Counter()
        self.watch = Watch()
        self.growth = 0

    def all(self, *, first: int, requests: int) -> int:
        """Send the regressions and the requests. Return the number of faults."""
        self.watch.know(KEY)
        configure_logging(service="gateway", level="debug", stream=self.watch)
        launcher = FakeLauncher(trainer=CheckingTrainer)
        make_model(self._folder / "other")
        with running_gateway(
            self._folder,
            launcher=launcher,
            max_payload_bytes=2**20,
            result_ttl=2.0,
            session_ttl=20.0,
            sequence_gap_timeout=0.2,
            long_poll=0.5,
        ) as gate:
            self.watch.know(gate.gateway.signing_key)
            operations = path_operations(gate.server.config.app)
            cases = Cases(operations, seed=self._seed, losses=self._checked.losses)
            world = World(gate, operations, self.watch)
            for text in sorted(REGRESSIONS.glob("*.json")):
                self._try(world, Case.load(text.read_text()))
            warm, warm_at = 0, first + requests // 4
            for number in range(first, first + requests):
                if number == warm_at:
                    warm = resident_bytes()
                if (number - first) % PER_WORLD == PER_WORLD - 1:
                    self._change(world, cases)
                    world = World(gate, operations, self.watch)
                self._try(world, cases.make(number, seq_id=world.seq_id), number=number)
                if self._faults >= self._most:
                    return self._faults
                if number % 25 == 0:
                    self._settle(world)
                if number > first and (number - first) % _TOLD_EVERY == 0:
                    print(f"{number - first} of {requests} requests", file=sys.stderr, flush=True)
            self._change(world, cases)
            wait_until(lambda: gate.gateway.futures.bytes_held == 0)  # unfetched ones are given up
            self.growth = resident_bytes() - warm
            if self.growth > GROWTH:
                self._fault(f"memory grew by {self.growth / 2**20:.0f} MiB")
        self.watch.check()
        return self._faults

    def _try(self, world: World, case: Case, *, number: int = -1) -> None:
        try:
            self.statuses[world.send(case).status] += 1
            if case.operation == "forward_backward" and not case.headers.get("Content-Encoding"):
                with bounded_memory(_TRAINER_MEMORY):
                    self.trainer_answers[self._checked(case.body)] += 1
        except Exception as error:  # noqa: BLE001 - every exception is a fault
            self._fault(f"request {number}: {type(error).__name__}: {error}", case)
            if not isinstance(error, AssertionError):
                traceback.print_exc()

    def _settle(self, world: World) -> None:
        try:
            world.settle()
        except AssertionError as error:
            self._fault(str(error))

    def _change(self, world: World, cases: Cases) -> None:
        """End the session with a good request, which must be computed."""
        try:
            world.settle()
            world.check_good(cases.good())
            world.close()
        except AssertionError as error:
            self._fault(f"at the end of a session: {error}")

    def _fault(self, what: str, case: Case | None = None) -> None:
        self._faults += 1
        print(f"FAULT: {what[:2000]}")
        if case is None:
            return
        print(f"  {case.method} {case.target[:300]} {dict(case.headers)}"[:1000])
        print(f"  body (base64): {base64.b64encode(case.body[:3000]).decode()}")
        if self._keep:
            digest = hashlib.sha256(case.saved().encode()).hexdigest()[:12]
            path = REGRESSIONS / f"{case.operation}-{digest}.json"
            path.write_text(case.saved())
            print(f"  kept as {path.name}")


if __name__ == "__main__":
    sys.exit(main())
