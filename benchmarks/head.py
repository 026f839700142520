"""`make bench-head`: the head of a model, from hidden states to gradients, eager and compiled.

The ways take turns. Memory is the peak of torch's allocations beyond weights and hidden states."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import accumulate

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import record
from tandem.backends.memory import logits_rows
from tandem.settings.workers import TrainerSettings
from tests.support.allocations import allocations
from trainer_service.models.compiled_blocks import compile_blocks
from trainer_service.models.logprobs import ChunkedLogprobs, CompiledLogSoftmax

TOKENS, HIDDEN, ROUNDS = 1024, 256, 5
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ways(vocabulary: int, dtype: str) -> dict[str, Callable[[], Found]]:
    """Functions that return log probabilities, and gradients of hidden states and weights."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    head = torch.nn.Linear(HIDDEN, vocabulary, bias=False, dtype=kind)
    states = torch.randn(TOKENS, HIDDEN, dtype=kind)
    targets = torch.randint(vocabulary, (TOKENS, 1))
    gradient = torch.randn(TOKENS)

    def way(compile: str) -> Callable[[], Found]:
        settings = TrainerSettings(dtype=dtype, compile=compile)
        logprobs = ChunkedLogprobs(
            head,
            lambda: [head.weight],
            rows=logits_rows(settings, device="cpu", vocabulary=vocabulary),
            compiled=CompiledLogSoftmax() if compile == "on" else None,
        )

        def compute() -> Found:
            hidden, head.weight.grad = states.clone().requires_grad_(), None
            found, carrier = logprobs.with_gradients(
                hidden, targets, select=None, gradient_of=lambda _: gradient
            )
            carrier.backward()
            return found, hidden.grad, head.weight.grad

        return compute

    return {"eager": way("off"), "compiled": way("on")}


def measure(vocabulary: int, dtype: str) -> list[dict[str, object]]:
    made = ways(vocabulary, dtype)
    results = {name: compute() for name, compute in made.items()}
    spent: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(ROUNDS):
        for name, compute in made.items():
            began = time.process_time()
            compute()
            spent[name].append(time.process_time() - began)
    rows = []
    for name, compute in made.items():
        found = zip(results[name], results["eager"], strict=True)
        off = [float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in found]
        rows.append(
            {
                "vocabulary": vocabulary,
                "dtype": dtype,
                "way": name,
                "processor s": round(statistics.median(spent[name]), 3),
                "× eager": round(
                    statistics.median(
                        a / b for a, b in zip(spent[name], spent["eager"], strict=True)
                    ),
                    3,
                ),
                "peak MiB": round(max(accumulate(allocations(compute))) / 2**20),
                "logprobs off": f"{off[0]:.1e}",
                "gradients off": f"{max(off[1:]):.1e}",
            }
        )
    return rows


def main() -> None:
    torch.set_num_threads(1)
    compile_blocks([], threads=1)
    rows = [
        row
        for vocabulary in (32_000, 151_936)
        for dtype in ("float32", "bfloat16")
        for row in measure(vocabulary, dtype)
    ]
    table = Table(*rows[0], title=f"{TOKENS} tokens, hidden size {HIDDEN}, one thread")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console = Console(width=140)
    console.print(table)
    results = {"machine": record.machine(), "head": rows}
    console.print(f"Written to {record.save(results).name}")


if __name__ == "__main__":
    main()
