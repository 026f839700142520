"""One update of the demo, 100 sequences and a step, in four ways that take turns: plain torch and a
trainer's rank, each eager and compiled.

Every way is a process (`python -m benchmarks.updates WAY MODEL`, `benchmarks.in_turn`), which
answers with the seconds of one of eight updates."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.in_turn import answers, asked

WAYS = ("plain", "plain compiled", "trainer", "trainer compiled")
UPDATES, THREADS = 8, 2


def batches() -> list[list[tuple[list[int], list[int]]]]:
    """Prompts of 4 tokens and answers of 1 to 4, like the demo's, with new lengths each time."""
    generator = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(3, 98) for _ in range(count)]

    return [
        [(tokens(4), tokens(generator.randint(1, 4))) for _ in range(100)] for _ in range(UPDATES)
    ]


def plain(model: Path, *, compiled: bool) -> Callable[[], None]:
    import torch

    from benchmarks.plain_update import PlainUpdates, Sample

    torch.set_num_threads(THREADS)
    policy = PlainUpdates(model, compiled=compiled)
    made = [
        [Sample(prompt, answer, [-4.0] * len(answer), 0.5) for prompt, answer in batch]
        for batch in batches()
    ]

    def updates() -> None:
        for batch in made:
            policy.update(batch)

    return updates


def trainer(model: Path, *, compiled: bool) -> Callable[[], None]:
    from tandem.protocol.worker import TrainingSpec
    from tandem.settings.workers import TrainerSettings
    from tandem.wire.v1 import tinker_pb2 as wire
    from trainer_service.batches.validation import BatchLimits, parse, validate
    from trainer_service.compute.process_group import Assignment, join
    from trainer_service.optimizers import AdamWSettings

    rank = join(
        Assignment(
            rank=0,
            local_rank=0,
            on_node=1,
            size=1,
            device="cpu",
            own_cores=True,
            store_port=0,
            model_path=model,
            model_name="tiny",
            training=TrainingSpec(),
            settings=TrainerSettings(
                device="cpu", threads=THREADS, compile="on" if compiled else "off"
            ),
        )
    )
    limits = BatchLimits(
        vocabulary=rank.backend.facts.vocabulary, max_length=rank.backend.facts.max_length
    )
    made = [
        wire.ForwardBackwardRequest(
            data=[_datum(prompt, answer) for prompt, answer in batch],
            loss_fn="importance_sampling",
        ).SerializeToString()
        for batch in batches()
    ]
    step = AdamWSettings(
        learning_rate=5e-4, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0
    )

    def updates() -> None:
        for payload in made:
            rank.forward_backward(validate(parse(payload), limits=limits))
            rank.optim_step(step)

    return updates


def _datum(prompt: list[int], answer: list[int]):
    import numpy as np

    from tandem.wire.v1 import tinker_pb2 as wire

    sequence = prompt + answer
    zeros = [0.0] * (len(prompt) - 1)
    made = wire.Datum()
    made.model_input.add().encoded_text.tokens = np.array(sequence[:-1], "<i4").tobytes()
    inputs = {
        "target_tokens": np.array(sequence[1:], "<i8"),
        "logprobs": np.array(zeros + [-4.0] * len(answer), "<f4"),
        "advantages": np.array(zeros + [0.5] * len(answer), "<f4"),
    }
    kinds = {"i": wire.DTYPE_INT64, "f": wire.DTYPE_FLOAT32}
    for name, values in inputs.items():
        made.loss_fn_inputs[name].CopyFrom(
            wire.Tensor(dense=values.tobytes(), dtype=kinds[values.dtype.kind], shape=values.shape)
        )
    return made


def measure(model: Path, *, rounds: int) -> list[dict[str, object]]:
    """Return a row for each way. The ways start one after the other, because compiling takes both
    cores."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    first: dict[str, float] = {}
    with ExitStack() as stack:
        ways = {}
        for way in WAYS:
            began = time.perf_counter()
            environment = {"OMP_WAIT_POLICY": "passive"}
            started = asked("benchmarks.updates", way, str(model), environment=environment)
            ways[way], _ = stack.enter_context(started)
            ways[way]([])
            first[way] = time.perf_counter() - began
        for _ in range(rounds):
            for way, once in ways.items():
                found[way].append(once([]))
    floor = found["plain compiled"]
    return [
        {
            "way": way,
            "ms an update": round(statistics.median(s for s, _ in times) * 1e3, 1),
            "best": round(min(s for s, _ in times) * 1e3, 1),
            "processor ms": round(statistics.median(busy for _, busy in times) * 1e3, 1),
            "× compiled floor": round(
                statistics.median(s / f for (s, _), (f, _) in zip(times, floor, strict=True)), 2
            ),
            "× its processor time": round(
                statistics.median(b / f for (_, b), (_, f) in zip(times, floor, strict=True)), 2
            ),
            "start and first 8, s": round(first[way], 1),
        }
        for way, times in found.items()
    ]


def main() -> None:
    way, model = sys.argv[1], Path(sys.argv[2])
    make = trainer if way.startswith("trainer") else plain
    updates = make(model, compiled=way.endswith("compiled"))

    def once() -> list[float]:
        began, busy = time.perf_counter(), time.process_time()
        updates()
        spent = time.perf_counter() - began, time.process_time() - busy
        return [each / UPDATES for each in spent]

    answers(once)


if __name__ == "__main__":
    main()
