"""Experiments for chaos: the unmodified SDK in a thread of its own, which notes what it gets."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
from tinker import ServiceClient, TrainingClient

from tests.support.sdk import adam, outputs, sequences, supervised
from tests.support.stacks import TIED

TIMEOUT = 240.0
"""Seconds within which a result comes, whatever happened meanwhile."""
_AHEAD = 2
"""Steps that are sent before the results of the first are fetched."""

Step = tuple[list[bytes], float]
"""The logprobs of a batch, and the gradient's norm of the step after it."""


@dataclass
class Experiment:
    """Trains until `stop` is set; `steps` are its results, `fault` is why it ended before."""

    name: str
    lora: bool
    steps: list[Step] = field(default_factory=list)
    weights: bytes = b""
    fault: BaseException | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    at_least: int = 0

    def run(self, service: ServiceClient, *, exactly: int | None = None) -> None:
        """Train until told to stop, or so many steps."""
        try:
            model = TIED if self.lora else f"{TIED}:full"
            training = service.create_lora_training_client(model, rank=8, seed=7).result(TIMEOUT)
            self._train(training, exactly)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the thread raises it
            self.fault = error

    def _train(self, training: TrainingClient, exactly: int | None) -> None:
        sent, pending = 0, []
        while sent < exactly if exactly is not None else not self.stop.is_set():
            data = [supervised(each) for each in sequences(4, seed=1000 + sent)]
            batch = training.forward_backward(data, "cross_entropy")
            pending.append((batch, training.optim_step(adam())))
            sent += 1
            if len(pending) > _AHEAD:
                self._fetch(pending.pop(0))
        for each in pending:
            self._fetch(each)
        last = [supervised(each) for each in sequences(4, seed=1)]
        found = training.forward(last, "cross_entropy").result(TIMEOUT)
        self.weights = b"".join(np.asarray(each).tobytes() for each in outputs(found))

    def _fetch(self, pending) -> None:
        batch, step = (future.result(TIMEOUT) for future in pending)
        logprobs = [np.asarray(each).tobytes() for each in outputs(batch)]
        norm = next(value for key, value in step.metrics.items() if "norm" in key)
        self.steps.append((logprobs, norm))
