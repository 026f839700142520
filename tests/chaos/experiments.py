"""Experiments with the unmodified SDK in a thread. They note their results."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import tinker
from tinker import ServiceClient, TrainingClient, types

from tests.support.sdk import Floats, adam, datum, outputs, params, sequences, supervised
from tests.support.stacks import TIED, TestStack

TIMEOUT = 240.0
"""Longest seconds until a result."""
PROMPTS = 2
"""Prompts of each reinforcement step, with one sample each."""
_AHEAD = 2
"""Steps that are sent before the first results are fetched."""
_PACE = 0.25
"""Least seconds between steps."""
_SAVE_EVERY, _LOAD_AFTER = 20, 5
"""Steps."""

KINDS = ("full", "lora", "rl", "rl-full")
"""Supervised training of all parameters and of an adapter, then reinforcement of both."""


@dataclass
class Experiment:
    """Trains until `stop` is set.

    `sent` counts requested steps, and `steps` has their result bytes. `fault` is the reason of an
    early end. `number` decides the data. Experiments on one engine sample in `turn`, because the
    size of an engine's batch changes the last bits."""

    kind: str
    number: int = 0
    turn: AbstractContextManager[object] = field(default_factory=nullcontext)
    sent: int = 0
    steps: list[bytes] = field(default_factory=list)
    run_id: str = ""
    saved: str = ""
    weights: bytes = b""
    fault: BaseException | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, service: ServiceClient, *, exactly: int | None = None) -> None:
        try:
            model = f"{TIED}:full" if self.kind.endswith("full") else TIED
            training = service.create_lora_training_client(model, rank=8, seed=7).result(TIMEOUT)
            self.run_id = training.model_id
            self._train(training, exactly)
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            self.fault = error

    def _train(self, training: TrainingClient, exactly: int | None) -> None:
        step = self._rehearse if self.kind.startswith("rl") else self._supervise
        pending: deque[Callable[[], None]] = deque()
        while self.sent < exactly if exactly is not None else not self.stop.is_set():
            began = time.monotonic()
            self.sent += 1
            pending.append(step(training, self.sent))
            whole = self.sent % _SAVE_EVERY in (0, _LOAD_AFTER)
            while len(pending) > (0 if whole else _AHEAD):
                pending.popleft()()
            if self.sent % _SAVE_EVERY == 0:  # overwrites the last one
                save = partial(training.save_state, "newest", overwrite=True)
                self.saved = _when_there_is_room(save).path
            elif whole and self.saved:
                training.load_state_with_optimizer(self.saved).result(TIMEOUT)
            if exactly is None:  # all steps must be computed again in a minute
                self.stop.wait(_PACE - (time.monotonic() - began))
        while pending:
            pending.popleft()()
        last = [supervised(each) for each in sequences(4, seed=1)]
        found = training.forward(last, "cross_entropy").result(TIMEOUT)
        self.weights = _bytes(outputs(found))

    def _seed(self, step: int) -> int:
        return 1000 + step + 10_000 * self.number

    def _supervise(self, training: TrainingClient, number: int) -> Callable[[], None]:
        data = [supervised(each) for each in sequences(4, seed=self._seed(number))]
        return self._learn(training, data, "cross_entropy", b"")

    def _rehearse(self, training: TrainingClient, number: int) -> Callable[[], None]:
        sampler = _when_there_is_room(training.save_weights_and_get_sampling_client)
        data, drawn = [], b""
        for prompt in sequences(PROMPTS, seed=self._seed(number)):
            asked = types.ModelInput.from_ints(prompt)
            settings = params(tokens=8, seed=number)
            with self.turn:
                future = sampler.sample(asked, num_samples=1, sampling_params=settings)
                (sequence,) = future.result(TIMEOUT).sequences
            before = len(prompt) - 1
            old = np.array([0.0] * before + sequence.logprobs, np.float32)
            reward = sum(token % 2 for token in sequence.tokens) / len(sequence.tokens) - 0.5
            advantages = np.array([0.0] * before + [reward] * len(sequence.tokens), np.float32)
            tokens = prompt + list(sequence.tokens)
            data.append(datum(tokens, logprobs=old, advantages=advantages))
            drawn += np.array(tokens).tobytes() + old.tobytes()
        return self._learn(training, data, "importance_sampling", drawn)

    def _learn(
        self, training: TrainingClient, data: list[types.Datum], loss: str, drawn: bytes
    ) -> Callable[[], None]:
        """Request a step. Return a function that waits for its results and notes them."""
        batch = training.forward_backward(data, loss)
        # Larger steps lead a policy to where float32 itself is off by 1e-3. The canary of a version
        # allows only 1e-4 between engine and trainer.
        step = training.optim_step(adam(1e-4))

        def fetch() -> None:
            logprobs = _bytes(outputs(batch.result(TIMEOUT)))
            metrics = step.result(TIMEOUT).metrics
            norm = next(value for key, value in metrics.items() if "norm" in key)
            self.steps.append(drawn + logprobs + np.float64(norm).tobytes())

        return fetch


def begin(
    stack: TestStack, experiments: Sequence[Experiment], *, steps: int
) -> list[threading.Thread]:
    """Run experiments at once, each in its own session."""

    def work(experiment: Experiment) -> None:
        with stack.service() as service:
            experiment.run(service, exactly=steps)

    threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in experiments]
    for thread in threads:
        thread.start()
    return threads


def end(
    threads: Sequence[threading.Thread], experiments: Sequence[Experiment], *, steps: int
) -> None:
    """Wait for experiments that have begun, and check that each made all its steps."""
    for thread in threads:
        thread.join(TIMEOUT)
    for each in experiments:
        assert each.fault is None, each.fault
        assert len(each.steps) == steps


def _bytes(arrays: list[Floats]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def _when_there_is_room(ask: Callable[[], object]):
    """Return the result. On a full disk the SDK repeats refused requests, but not failed ones."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return ask().result(TIMEOUT)
        except tinker.RequestFailedError as error:
            if "storage_full" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.5)
