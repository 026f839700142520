"""The client of a run with a gateway that is killed repeatedly.

Like the SDK, it repeats unanswered requests and asks for every result."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.api.tinker.futures import LONG_POLL
from gateway.core import Gateway
from gateway.identifiers import request_id_of, run_id_of
from gateway.owners.auth.identity import Caller, Readers
from gateway.owners.sessions.registry import NewSession
from gateway.runs.operations import (
    AdamParams,
    Body,
    Kind,
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from gateway.storage.futures.table import Outcome, Result
from tandem.errors import OptimizerSetting, Overloaded, TandemError
from tandem.protocol.worker import TrainingSpec
from tests.support.gateway.model_workers import EMPTY, ENDLESS, FORWARD, LONG, POISON, UNREADABLE

_OWNER = "local"


@dataclass(frozen=True)
class Planned:
    """An operation to submit. Its number is its place in the script.

    An `alone` one waits for earlier ones, and later ones wait for it, but not for a `late` one. A
    `missing` one never comes."""

    kind: Kind
    payload: bytes | None = None
    fields: Body | None = None
    load: str = ""
    refused: TandemError | None = None
    alone: bool = False
    late: bool = False
    missing: bool = False

    def body(self, run_id: str) -> Body | None:
        if not self.load:
            return self.fields
        path, _, state = self.load.partition(" ")
        body = LoadWeights(path=f"tinker://{run_id}/weights/{path}", optimizer=not state)
        return body.on_behalf_of(Readers((Caller(_OWNER, "k-0", "member"),)))


def batch(number: int = 0, *, size: int = 20) -> Planned:
    return Planned("forward_backward", payload=b"batch %d" % number + bytes(size))


def large_batch(number: int = 0) -> Planned:
    return batch(number, size=70_000)


def long_batch(number: int = 0) -> Planned:
    return Planned("forward_backward", payload=LONG + b"%d" % number)


def endless_batch() -> Planned:
    return Planned("forward_backward", payload=ENDLESS)


def forward(number: int = 0) -> Planned:
    return Planned("forward", payload=FORWARD + b"%d" % number)


def unreadable() -> Planned:
    return Planned("forward_backward", payload=b"batch" + UNREADABLE)


def unreadable_forward() -> Planned:
    return Planned("forward", payload=FORWARD + UNREADABLE)


def poison() -> Planned:
    return Planned("forward_backward", payload=POISON)


def empty_batch() -> Planned:
    return Planned("forward_backward", payload=b"batch" + EMPTY)


def empty_forward() -> Planned:
    return Planned("forward", payload=FORWARD + EMPTY)


def step(rate: float = 0.1) -> Planned:
    return Planned("optim_step", fields=OptimStep(params=AdamParams(learning_rate=rate)))


def refused(kind: Kind = "optim_step") -> Planned:
    payload = b"refused" if kind == "forward_backward" else None
    return Planned(kind, payload=payload, refused=OptimizerSetting("this is not to be"))


def save(name: str, *, overwrite: bool = False) -> Planned:
    return Planned("save_weights", fields=SaveWeights(path=name, overwrite=overwrite))


def save_for_sampler(name: str) -> Planned:
    return Planned("save_weights_for_sampler", fields=SaveWeightsForSampler(path=name))


def publish(number: int) -> Planned:
    fields = SaveWeightsForSampler(sampling_session_seq_id=number)
    return Planned("save_weights_for_sampler", fields=fields)


def export(name: str) -> Planned:
    return Planned("save_weights_external", fields=SaveWeightsExternal(path=name))


def load(name: str, *, optimizer: bool = True) -> Planned:
    return Planned("load_weights", load=name if optimizer else f"{name} weights")


def alone(planned: Planned) -> Planned:
    return replace(planned, alone=True)


def late(planned: Planned) -> Planned:
    return replace(planned, late=True)


def missing() -> Planned:
    return Planned("optim_step", missing=True)


Script = Sequence[Planned]


def random_script(rng: random.Random) -> Script:
    script: list[Planned] = []
    for number in range(rng.randrange(2, 6)):
        for _ in range(rng.randrange(4)):
            name, own = rng.choice("ab"), len(script)
            others = [
                *(large_batch(own), forward(own), publish(own), step(), unreadable()),
                *(
                    empty_batch(),
                    empty_forward(),
                    unreadable_forward(),
                    refused(),
                    refused("forward_backward"),
                ),
                *(save(name), save(name, overwrite=True), save_for_sampler(name), export(name)),
                *(load(name), load(name, optimizer=False)),
            ]
            script.append(rng.choice(others))
        script += [batch(number), step(rng.random())]
    return [*script, forward()]


class Client:
    """The memory of a run's client, which survives crashes of gateways.

    Its sampler is scaled to each of `scales` in turn."""

    def __init__(
        self,
        script: Script,
        rng: random.Random,
        training: TrainingSpec,
        scales: Sequence[int] = (),
    ) -> None:
        self.script = script
        self.training = training
        self.scales = [*scales]
        self.session_id = ""
        self.ended = False
        self.outcomes: dict[int, str] = {}
        self._rng = rng
        self._accepted: set[int] = set()
        self._groups = _groups(script, window=rng.choice((1, 2, 4, 8)))

    @property
    def run_id(self) -> str:
        return run_id_of(session_id=self.session_id, model_seq_id=0)

    async def go_on(self, gateway: Gateway) -> None:
        """Submit the rest of the script, and return when everything has ended."""
        if not self.session_id:
            session = await gateway.sessions.create(NewSession(owner=_OWNER, sdk_version="0.38.0"))
            self.session_id = session.id
        if self.ended or gateway.sessions.touch(self.session_id) is None:
            missing = sum(planned.missing for planned in self.script)
            assert len(self.outcomes) == len(self.script) + 1 - missing, "it has ended too early"
            return
        known = [seq_id for seq_id in self.outcomes if self._rng.random() < 0.3]
        await asyncio.gather(*(self._ask(gateway, seq_id) for seq_id in known))
        await self._sample_newest(gateway)
        if 0 not in self.outcomes:
            await self._create(gateway)
            await self._ask(gateway, 0)
        if self.scales:
            await self._scale(gateway)
        for together in self._groups:
            left = [seq_id for seq_id in together if seq_id not in self.outcomes]
            self._rng.shuffle(left)
            await asyncio.gather(*(self._carry_out(gateway, seq_id) for seq_id in left))

    async def _sample_newest(self, gateway: Gateway) -> None:
        """Ask for the sampling session of the newest published weights, as a sample does."""
        published = [
            text
            for seq_id, text in sorted(self.outcomes.items())
            if '"sampling_session_id"' in text
        ]
        if published:
            named = json.loads(published[-1])["sampling_session_id"]
            await gateway.sampling.require(named.replace("S", self.session_id, 1))

    async def _scale(self, gateway: Gateway) -> None:
        """Returns when exactly the last number of engines serve and have places."""
        run = gateway.runs.get(self.run_id)
        assert run is not None
        sampler = gateway.samplers.ensure(
            session_id=self.session_id,
            model=run.model,
            rank=0,
            all_weights=True,
            kept=run.host.sampler,
        )
        while True:
            await asyncio.sleep(self._rng.random() * 5)
            await gateway.samplers.scale(sampler, self.scales[0], wait=0)
            if len(self.scales) == 1:
                break
            self.scales.pop(0)
        sampler.start()
        for _ in range(1000):  # seconds, each of which would take `until` a thousand steps
            serve = all(engine.serves for engine in sampler.engines)
            if serve and not sampler.replicas.leaving:
                break
            await asyncio.sleep(1)
        else:
            raise AssertionError(f"they do not all serve: {sampler.explain()}")
        assert len(sampler.engines) == self.scales[0]
        assert len(gateway.supervisor.held_by(str(sampler.key))) == self.scales[0]

    async def ask_again(self, gateway: Gateway) -> None:
        await asyncio.gather(*(self._ask(gateway, seq_id) for seq_id in tuple(self.outcomes)))

    async def _create(self, gateway: Gateway) -> None:
        model = gateway.models.get("tiny")
        await gateway.runs.create(
            session_id=self.session_id,
            model_seq_id=0,
            model=model,
            training=self.training,
            load=None,
            user_metadata=None,
            request=b"create",
        )

    async def _carry_out(self, gateway: Gateway, seq_id: int) -> None:
        await asyncio.sleep(self._rng.random())
        if seq_id not in self._accepted or self._rng.random() < 0.1:
            await self._submit(gateway, seq_id)
            self._accepted.add(seq_id)
        await self._ask(gateway, seq_id)

    async def _submit(self, gateway: Gateway, seq_id: int) -> None:
        planned = self.script[seq_id - 1]
        while True:
            try:
                await gateway.admission.submit(
                    run_id=self.run_id,
                    seq_id=seq_id,
                    kind=planned.kind,
                    body=planned.body(self.run_id),
                    request=repr(planned).encode() if planned.payload is None else b"",
                    payload=planned.payload,
                    refused=planned.refused,
                )
                return
            except Overloaded as error:
                await asyncio.sleep(error.retry_after or 1.0)

    async def _ask(self, gateway: Gateway, seq_id: int) -> None:
        """Ask for a result until it is there. It must equal an earlier answer."""
        request_id = request_id_of(owner=self.run_id, seq_id=seq_id)
        outcome: Outcome | None = None
        while outcome is None:
            future = gateway.futures.get(request_id)
            if future is None:
                outcome = await gateway.journal.recall(request_id)
                assert outcome is not None, f"nobody knows {request_id}"
            else:
                outcome = await gateway.futures.wait(future, timeout=LONG_POLL)
                if outcome is None and gateway.futures.closing:
                    await asyncio.sleep(1e9)  # the next gateway is asked
        if isinstance(outcome, Result):
            body = outcome.file.read_bytes() if outcome.file is not None else outcome.body
            text = body.decode()
        else:
            text = f"{outcome.type}: {outcome.message}"
        text = text.replace(self.session_id, "S")
        before = self.outcomes.setdefault(seq_id, text)
        assert text == before, f"operation {seq_id} ended twice: {before!r}, {text!r}"


def _groups(script: Script, *, window: int) -> list[list[int]]:
    """Return groups of operations that are submitted together."""
    groups: list[list[int]] = [[]]
    late = []
    for seq_id, planned in enumerate(script, 1):
        if planned.late:
            late.append(seq_id)
        elif planned.alone:
            groups += [[seq_id], late, []]
            late = []
        elif not planned.missing:
            groups[-1].append(seq_id)
            if len(groups[-1]) == window:
                groups.append([])
    return groups
