"""The trained model: it samples, trains, publishes its weights and saves its state.

`Policy` is the part of a model that a loop needs. `TinkerPolicy` does it with the clients of the
`tinker` SDK."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Unpack, runtime_checkable

import numpy as np

from tandem.rl.rollouts import Group, SampleSettings, Turn
from tandem.rl.server import EngineLoad, TandemServer, find_server

if TYPE_CHECKING:
    import tinker

_ANSWER_SECONDS = 600.0
"""The limit for an answer of the gateway, which another one may replace meanwhile."""

_SEARCH_PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds between the questions whether a gateway is Tandem's."""

_LOAD_SECONDS = 600.0
"""The limit for an open training client, which may wait for its trainer's start."""


class SyncTimedOut(TimeoutError):
    """The samplers did not get the new weights within `sync_timeout`."""


class RolloutSampler(Protocol):
    """Weights that sample. `step` counts the optimizer steps behind them."""

    step: int

    async def sample(self, prompt: Sequence[int], **settings: Unpack[SampleSettings]) -> list[Turn]:
        """Return `n` answers to a prompt of token ids."""
        ...


@runtime_checkable
class Policy(RolloutSampler, Protocol):
    """A model in training. `step` counts its optimizer steps. `sample` uses the weights of the last
    `sync`."""

    async def train(
        self,
        data: Sequence[tinker.Datum],
        loss: str,
        settings: Mapping[str, float | str],
        adam: tinker.AdamParams,
    ) -> Mapping[str, float]:
        """Make one optimizer step, after earlier calls. Returns the server's metrics."""
        ...

    async def sync(self, timeout: float) -> None:
        """Let later samples use the present weights. The request is sent before the first
        suspension. Raises `SyncTimedOut` after `timeout` seconds."""
        ...

    def snapshot(self) -> Awaitable[RolloutSampler]:
        """Ask at once for a sampler that keeps the present weights. It does not wait."""
        ...

    async def save(self, name: str) -> str:
        """Save weights and optimizer. Returns the path from which a loop continues."""
        ...

    async def resolve(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with the true steps of tokens that were sampled in flight."""
        ...

    async def load(self) -> EngineLoad | None:
        """Return the load of the engines, or None if the server does not tell it."""
        ...


class TinkerPolicy:
    """A policy behind a `tinker.TrainingClient`. `step` is the number of optimizer steps before
    this object. `in_flight` publishes weights for running answers, too."""

    def __init__(
        self, training: tinker.TrainingClient, *, step: int = 0, in_flight: bool = False
    ) -> None:
        self.training = training
        self.step = step
        self._in_flight = in_flight
        self._sampler: _TinkerSampler | None = None
        self._snapshot: tuple[int, asyncio.Future[_TinkerSampler]] | None = None
        self._server: asyncio.Task[TandemServer | None] | None = None
        self._earlier: int | None = None
        self._sending = asyncio.Lock()

    async def sample(self, prompt: Sequence[int], **settings: Unpack[SampleSettings]) -> list[Turn]:
        if self._sampler is None:
            raise RuntimeError("the policy was not published yet: await sync() before sample()")
        return await self._sampler.sample(prompt, **settings)

    async def train(
        self,
        data: Sequence[tinker.Datum],
        loss: str,
        settings: Mapping[str, float | str],
        adam: tinker.AdamParams,
    ) -> Mapping[str, float]:
        inputs = data[0].loss_fn_inputs
        async with self._sending:  # in the order of the calls
            if "mask" in inputs and await self._find_server() is None:
                data = [_without_mask(datum) for datum in data]
            if "weight_step" in inputs and (server := await self._find_server()) is not None:
                earlier = await self._earlier_steps(server)
                data = [_with_earlier_steps(datum, earlier) for datum in data]
            # Both are sent before either is awaited, so that the trainer makes no pause.
            computed = self.training.forward_backward(list(data), loss, dict(settings) or None)
            stepped = self.training.optim_step(adam)
        metrics = dict((await computed).metrics)
        metrics.update((await stepped).metrics or {})
        self.step += 1
        return metrics

    async def sync(self, timeout: float) -> None:
        published = self._publish("inflight") if self._in_flight else self._take_snapshot()
        try:
            async with asyncio.timeout(timeout):
                self._sampler = await published
        except TimeoutError:
            raise SyncTimedOut(
                f"the samplers did not get the weights of step {self.step} within {timeout:g} s "
                "(sync_timeout); `tandem top` shows why an engine waits"
            ) from None

    def snapshot(self) -> Awaitable[RolloutSampler]:
        return self._take_snapshot()

    async def save(self, name: str) -> str:
        return str((await self.training.save_state(name)).path)

    async def resolve(self, groups: Sequence[Group]) -> list[Group]:
        if not self._in_flight or (server := await self._find_server()) is None:
            return list(groups)
        requests = {
            turn.sequence_id.rpartition(":")[0]
            for group in groups
            for rollout in group.rollouts
            for turn in rollout.turns
        }
        found = await asyncio.to_thread(server.versions, sorted(requests - {""}))
        if not found:
            return list(groups)
        earlier = await self._earlier_steps(server)

        def resolved(turn: Turn) -> Turn:
            request, _, sample = turn.sequence_id.rpartition(":")
            steps = found.get(request, {}).get(int(sample) if sample.isdecimal() else -1)
            if steps is None or len(steps) != len(turn.tokens):
                return turn  # of one version: that of the sampling client, which it already has
            return replace(turn, steps=[step - earlier for step in steps])

        return [
            replace(
                group,
                rollouts=[
                    replace(rollout, turns=[resolved(turn) for turn in rollout.turns])
                    for rollout in group.rollouts
                ],
            )
            for group in groups
        ]

    async def load(self) -> EngineLoad | None:
        if (server := await self._find_server()) is None:
            return None
        return await asyncio.to_thread(server.load)

    async def track(self, *, name: str, tags: Sequence[str], config: Mapping[str, object]) -> Any:
        """Return `tandem.track` of the run, or None if its gateway is not Tandem's."""
        if await self._find_server() is None:
            return None
        from tandem import track

        return await asyncio.to_thread(
            track, self.training, name=name or None, tags=tags or None, config=config
        )

    def _take_snapshot(self) -> asyncio.Future[_TinkerSampler]:
        """A sync and an evaluation of one step share a snapshot."""
        if self._snapshot is None or self._snapshot[0] != self.step:
            self._snapshot = (self.step, self._publish("snapshot"))
        return self._snapshot[1]

    def _publish(self, kind: Any) -> asyncio.Future[_TinkerSampler]:
        step = self.step
        saved = self.training.save_weights_and_get_sampling_client(kind=kind)

        async def sampler() -> _TinkerSampler:
            return _TinkerSampler(await saved, step=step)

        return asyncio.ensure_future(sampler())

    async def _find_server(self) -> TandemServer | None:
        if self._server is None:
            self._server = asyncio.ensure_future(self._search_server())
        return await self._server

    async def _search_server(self) -> TandemServer | None:
        """Ask again while the gateway is silent: another one may replace it. After a minute, the
        loop goes on as on another Tinker server."""
        failure = ""
        for pause in _SEARCH_PAUSES:
            try:
                return await asyncio.to_thread(find_server, self.training)
            except ConnectionError as error:
                failure = str(error)
            await asyncio.sleep(pause)
        warnings.warn(f"the loop uses no route of Tandem: {failure}", stacklevel=2)
        return None

    async def _earlier_steps(self, server: TandemServer) -> int:
        """The server counts the steps of the loaded checkpoint, too. No step may be under way.
        Raises `TimeoutError`."""
        async with asyncio.timeout(_ANSWER_SECONDS):
            while self._earlier is None:
                newest = await asyncio.to_thread(server.newest_step)
                if newest is None:
                    await asyncio.sleep(1.0)
                else:
                    self._earlier = newest - self.step
        return self._earlier


def _without_mask(datum: tinker.Datum) -> tinker.Datum:
    """Other servers do not know a mask. They leave out tokens with an advantage of 0."""
    inputs = {name: each for name, each in datum.loss_fn_inputs.items() if name != "mask"}
    return replace(datum, loss_fn_inputs=inputs)


def _with_earlier_steps(datum: tinker.Datum, earlier: int) -> tinker.Datum:
    steps = np.asarray(datum.loss_fn_inputs["weight_step"].data, np.int64)
    counted = np.where(steps < 0, steps, steps + earlier)
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "weight_step": counted})


class _TinkerSampler:
    def __init__(self, client: tinker.SamplingClient, *, step: int) -> None:
        self.step = step
        self._client = client

    async def sample(self, prompt: Sequence[int], **settings: Unpack[SampleSettings]) -> list[Turn]:
        from tinker import types

        stop = settings["stop"]
        answer = await self._client.sample(
            types.ModelInput.from_ints(list(prompt)),
            settings["n"],
            types.SamplingParams(
                max_tokens=settings["max_tokens"],
                temperature=settings["temperature"],
                seed=settings["seed"],
                stop=None if stop is None else list(stop),
            ),
        )
        return [
            Turn(
                observation=prompt,
                tokens=sequence.tokens,
                logprobs=sequence.logprobs or [],
                steps=[self.step] * len(sequence.tokens),
                stop_reason=sequence.stop_reason,
                sequence_id=sequence.sequence_id or "",
            )
            for sequence in answer.sequences
        ]


Opened: TypeAlias = "tinker.TrainingClient | Policy"
Training: TypeAlias = "Opened | Callable[[str | None], Opened | Awaitable[Opened]]"
"""A training client, a policy, or a function that makes one. The function gets the path of a saved
state, or None at the start. Only a loop with a function can continue."""


def resumable(
    service: tinker.ServiceClient, model: str, *, rank: int = 32, **options: Any
) -> Callable[[str | None], Awaitable[tinker.TrainingClient]]:
    """Return a function for `train` that makes the training client of `model`, or continues one.

    `rank` and `options` go to `create_lora_training_client`."""

    def open_training(path: str | None) -> Awaitable[tinker.TrainingClient]:
        opened: Awaitable[tinker.TrainingClient]
        if path is None:
            opened = service.create_lora_training_client(model, rank=rank, **options)
        else:
            opened = service.create_training_client_from_state_with_optimizer(path)
        return opened

    return open_training


async def open_policy(
    training: Training, *, path: str | None, step: int, in_flight: bool
) -> Policy:
    """Return the policy of `training`, at the saved state of `path`.

    Raises `ValueError` if there is a saved state, and `training` is no function that loads it."""
    opened: Any = training
    if isinstance(training, Policy) or hasattr(training, "forward_backward"):
        if path is not None:
            raise ValueError(
                f"the loop continues from {path}, but its training client exists already: pass a "
                "function of the path, such as tandem.rl.resumable(service, model)"
            )
    else:
        # In a thread, because the function may wait for the SDK.
        opened = await asyncio.to_thread(training, path)
        if inspect.isawaitable(opened):
            async with asyncio.timeout(_LOAD_SECONDS):
                opened = await opened
    if isinstance(opened, Policy):
        return opened
    return TinkerPolicy(opened, step=step, in_flight=in_flight)
