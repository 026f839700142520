"""Custom losses stay within limits of memory and time."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tandem.custom_losses import operations, read_custom_loss
from tandem.custom_losses.process import Limits, LossProcess
from tandem.errors import CustomLossFailed, CustomLossInvalid
from tests.support.custom_losses import CustomLossFn, layout_of, metrics_of, request_body, traced
from trainer_service.losses.custom import custom_loss

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
LITTLE = Limits(memory=2**27)
"""Far more memory than a small graph needs."""
SHORT = Limits(seconds=1.0)


@pytest.fixture(scope="module")
def process():
    process = LossProcess()
    yield process
    process.close()


def evaluate(process: LossProcess, fn: CustomLossFn, limits: Limits | None = None) -> float:
    loss = custom_loss(request_body(traced(fn, logprobs=1)), process=process, limits=limits)
    flat = torch.tensor([-0.5, -1.0, -0.25, -2.0]).requires_grad_(True)
    result = loss.compute(flat, {}, loss.defaults, layout_of([flat], {}))
    metrics_of(loss, result)
    return result.loss.item()


def fails(process: LossProcess, fn: CustomLossFn, limits: Limits) -> str:
    with pytest.raises(CustomLossFailed) as caught:
        evaluate(process, fn, limits)
    assert evaluate(process, plain) == -3.75, "the next loss is computed"
    return caught.value.message


def plain(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs.sum(), {}


# --- Memory --------------------------------------------------------------------------------------

Take = Callable[[Tensor], Tensor]

GREEDY: dict[str, Take] = {
    "parts": lambda x: torch.stack(torch.split(torch.ones(x.shape[0] * 2**19), 1)[:3]),
    "parts of a method": lambda x: x.new_ones(2**21).split(1)[0],
    "chunks": lambda x: x.new_ones(2**21).chunk(2**21)[0],
    "rows": lambda x: x.new_ones(2**21).unbind()[0],
    "rows of nothing": lambda x: x.new_ones(2**21, 0).unbind()[0],
    "parts of a view": lambda x: x.sum().expand(2**40).split(1)[0],
    "a view with content": lambda x: x.sum().expand(10**6, 10**6) + 1,
    "a view made whole": lambda x: x.sum().expand(10**6, 10**6).contiguous(),
    "a view added up by rows": lambda x: x.sum().expand(2**20, 2**20).cumsum(0),
    "zeros": lambda x: torch.zeros(x.shape[0] * 10**12),
    "a range": lambda x: torch.arange(x.shape[0] * 10**12),
    "a square of ones": lambda x: torch.eye(x.shape[0] * 10**6),
    "repetitions": lambda x: x.repeat(10**9),
    "tiles": lambda x: torch.tile(x, (10**9,)),
    "repeated elements": lambda x: x.repeat_interleave(10**9),
    "repeated as a tensor says": lambda x: x.repeat_interleave((x * 0).long() + 10**8),
    "an outer product": lambda x: torch.outer(x.repeat(3000), x.repeat(3000)),
    "a sum of products": lambda x: torch.einsum("i,j->ij", x.repeat(3000), x.repeat(3000)),
    "a product of views": lambda x: x.sum().expand(10**5, 2) @ x.sum().expand(2, 10**5),
    "a batch of products": lambda x: x.expand(10**7, 1, 4).bmm(x.expand(10**7, 4)[..., None]),
    "padding": lambda x: F.pad(x, (0, 10**10)),
    "a list of rows": lambda x: x.repeat(2**18)[None][[0] * 200],
    "a difference of all": lambda x: x.repeat(3000)[:, None] - x.repeat(3000)[None, :],
    "a mask of all": lambda x: torch.masked_select(x.repeat(3000)[:, None], x.repeat(3000) < 0),
    "classes": lambda x: F.one_hot((x * 0).long(), 10**10).sum() * x,
    "a diagonal": lambda x: torch.diag(x.repeat(3000)),
    "a sorted view": lambda x: x.sum().expand(10**8).sort().values,
    "the largest of a view": lambda x: x.sum().expand(10**8).topk(10**8).values,
    "a space": lambda x: torch.linspace(0, 1, x.shape[0] * 10**10),
    "a wider type": lambda x: x.sum().expand(2**26).double(),
}  # fmt: skip


@pytest.mark.parametrize("name", GREEDY)
def test_memory_is_refused_whatever_operation_asks_for_it(process, name):
    take = GREEDY[name]

    def fn(logprobs: Tensor):
        return take(logprobs).sum() + logprobs.sum(), {}

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = fails(process, fn, LITTLE)
    assert "memory" in message or "overflow" in message or "too large" in message, message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16, (
        "KiB, of this process"
    )


def chain(logprobs: Tensor):
    x = logprobs.repeat(2**15)
    for _ in range(500):
        x = x.exp()
    return x.sum(), {}


def tuples(logprobs: Tensor):
    total = logprobs.sum()
    for _ in range(100):
        total = total + logprobs.repeat(2**13).split(1)[0].sum()
    return total, {}


@pytest.mark.parametrize("fn", [chain, tuples])
def test_memory_of_many_operations_together_is_refused(process, fn):
    assert "more memory" in fails(process, fn, LITTLE)


def test_memory_of_the_derivative_counts(process):
    def fn(logprobs: Tensor):
        return logprobs.sum().expand(2**24).amax(), {}

    assert "its gradient" in fails(process, fn, Limits(memory=2**25))


def test_datums_do_not_share_their_memory(process):
    def fn(logprobs: Tensor):
        return (logprobs.repeat(2**18) * 2).sum(), {}

    loss = custom_loss(request_body(traced(fn, logprobs=1)), process=process, limits=LITTLE)
    rows = [torch.rand(4) for _ in range(32)]
    flat = torch.cat(rows).requires_grad_(True)
    result = loss.compute(flat, {}, loss.defaults, layout_of(rows, {}))
    metrics_of(loss, result)


# --- Time ----------------------------------------------------------------------------------------


def many_steps(logprobs: Tensor):
    x, total = logprobs.sum().expand(10**7), logprobs.sum()
    for _ in range(900):
        total = total + x.amax()
    return total, {}


def one_step(logprobs: Tensor):
    return logprobs.sum().expand(10**8, 10**6).sum(), {}


def backwards(logprobs: Tensor):
    x = logprobs.sum().expand(10**6, 10**6)
    return x[0, 0] + x[:, :1].expand(10**6, 10**6).amax() * 0, {}


@pytest.mark.parametrize("fn", [many_steps, one_step, backwards])
def test_time_is_bounded_between_operations_and_within_one(process, fn):
    message = fails(process, fn, SHORT)
    assert "processor time" in message, message


def test_a_request_that_has_no_time_left_fails(process):
    assert "processor time" in fails(process, plain, Limits(seconds=-1.0))


# --- Any operation -------------------------------------------------------------------------------

ARGUMENTS = (
    {"ref": "logprobs"}, {"ref": "matrix"}, {"ref": "index"}, {"tuple": [{"ref": "logprobs"}]},
    [{"ref": "matrix"}, {"ref": "matrix"}], 0, 1, -1, 3, 2**31, 2**40, 2**62, -(2**62), 1e300,
    [2**40, 2**20], [0], [], {"tuple": [2**40, 2**40]}, {"slice": [None, None, 2**62]}, True, None,
    "mean", "ij,jk->ik", {"dtype": "float64"}, {"dtype": "int8"}, {"float": "nan"},
    {"ellipsis": True},
)  # fmt: skip


def body_of(kind: str, target: str, args: list[object]) -> bytes:
    """Returns the sum of the logprobs, and also calls one operation."""
    logprobs = {"ref": "logprobs"}
    call = {"name": "asked", "op": kind, "target": target, "args": args}
    nodes = [
        {"name": "logprobs", "op": "placeholder", "target": "logprobs"},
        {"name": "matrix", "op": "call_method", "target": "expand", "args": [logprobs, 4, 4]},
        {"name": "index", "op": "call_method", "target": "long", "args": [logprobs]},
        call,
        {"name": "sum", "op": "call_method", "target": "sum", "args": [logprobs]},
        {
            "name": "output",
            "op": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "sum"}, {"dict": {}}]}],
        },
    ]
    inputs = [{"name": "logprobs", "rank": 1}]
    return json.dumps({"name": "any", "inputs": inputs, "graph": {"nodes": nodes}}).encode()


@pytest.mark.parametrize("seed", range(4))
def test_any_operation_with_any_arguments_is_computed_or_fails_that_loss(process, seed):
    draw = random.Random(seed)
    limits = Limits(memory=2**27, seconds=1.0)
    flat = torch.tensor([-0.5, -1.0, -0.25, -2.0]).requires_grad_(True)
    calls = [("call_function", name) for name in sorted(operations.FUNCTIONS)]
    calls += [("call_method", name) for name in sorted(operations.METHODS)]
    outcomes = {"computed": 0, "failed": 0}
    for kind, target in calls:
        args = [draw.choice(ARGUMENTS) for _ in range(draw.randrange(4))]
        if kind == "call_method" or draw.random() < 0.7:
            args.insert(0, draw.choice(ARGUMENTS[:3]))
        try:
            loss = custom_loss(body_of(kind, target, args), process=process, limits=limits)
            result = loss.compute(flat, {}, loss.defaults, layout_of([flat], {}))
            metrics_of(loss, result)
            assert result.loss.item() == -3.75
            outcomes["computed"] += 1
        except (CustomLossFailed, CustomLossInvalid):
            outcomes["failed"] += 1
    assert min(outcomes.values()) > 50, outcomes


# --- The process ---------------------------------------------------------------------------------


def test_a_process_that_is_gone_is_replaced(process):
    evaluate(process, plain)
    child = process._child
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert evaluate(process, plain) == -3.75
    assert child.stdin.closed, "a trainer has only so many files"
    assert child.stdout.closed


def test_a_process_that_cannot_start_fails_that_loss_alone(monkeypatch):
    process = LossProcess()
    for program in ("/bin/false", "/no/such/program"):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", program)
            with pytest.raises(CustomLossFailed, match="could not start"):
                evaluate(process, plain)
    assert evaluate(process, plain) == -3.75


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_a_trainer_that_stops_fails_no_loss(process, number):
    evaluate(process, plain)
    child = process._child
    os.kill(child.pid, number)
    assert evaluate(process, plain) == -3.75
    assert process._child is child


def test_the_message_names_the_time_of_the_whole_request(process):
    body = request_body(traced(one_step, logprobs=1))
    graph, datums = read_custom_loss(body), [[torch.tensor([-0.5])]]
    with pytest.raises(CustomLossFailed, match="more than 1 s of processor time"):
        process.evaluate(graph, body, datums, gradient=False, limits=SHORT, used=0.5)


def test_a_process_that_ends_within_a_loss_fails_that_loss_alone(process):
    evaluate(process, plain)
    os.kill(process._child.pid, signal.SIGSTOP)
    killed = threading.Thread(target=os.kill, args=(process._child.pid, signal.SIGKILL))
    killed.start()
    with pytest.raises(CustomLossFailed):
        evaluate(process, one_step, SHORT)
    killed.join()
    assert evaluate(process, plain) == -3.75


def test_a_loss_for_which_the_machine_has_no_time_says_so(process, monkeypatch):
    evaluate(process, plain)
    os.kill(process._child.pid, signal.SIGSTOP)
    monkeypatch.setattr("tandem.custom_losses.process._patience", lambda seconds: 0.1)
    with pytest.raises(CustomLossFailed, match="the machine is busy"):
        evaluate(process, one_step, SHORT)


def test_the_process_keeps_nothing_of_a_large_loss(process):
    def large(logprobs: Tensor):
        return logprobs.repeat(2**13).split(1)[0].sum(), {}

    def pages() -> int:
        return int(Path(f"/proc/{process._child.pid}/statm").read_text().split()[0])

    evaluate(process, plain)
    before = pages()
    for _ in range(5):
        evaluate(process, large)
    evaluate(process, plain)
    assert (pages() - before) * resource.getpagesize() < 2**29


def test_the_process_ends_with_whoever_has_it():
    process = LossProcess()
    evaluate(process, plain)
    child = process._child
    del process
    gc.collect()
    assert child.poll() is not None


def test_a_loss_that_has_failed_is_not_computed_for_the_rest_of_the_request(process):
    def fn(logprobs: Tensor):
        return torch.log(logprobs).sum(), {}

    loss = custom_loss(request_body(traced(fn, logprobs=1)), process=process)
    first = torch.tensor([-1.0]).requires_grad_(True)
    loss.compute(first, {}, loss.defaults, layout_of([first], {}))
    process.close()
    result = loss.compute(first, {}, loss.defaults, layout_of([first], {}))
    assert process._child is None
    assert result.loss.item() == 0.0
