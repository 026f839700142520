"""The trainer's decoder and checks. They may raise only `UserError`, in bounded memory."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tandem.errors import UserError
from tests.fuzz.json_bodies import mutate
from tests.fuzz.seeds import custom_loss_body
from trainer_service.batches.validation import BatchLimits, parse, validate
from trainer_service.losses import LOSSES, find_loss

LIMITS = BatchLimits(vocabulary=151_936, max_length=4096)
DEADLINE = 2.0
"""Processor seconds for one small body."""
LONGEST_SENTENCE = 5000


class Checked:
    """Runs the trainer's checks on a body. Returns the error's type, or `ok`."""

    def __init__(self) -> None:
        self._definition = custom_loss_body()

    @property
    def losses(self) -> list[str]:
        return sorted(LOSSES)

    def __call__(self, body: bytes) -> str:
        """Raise other errors than `UserError`, and `AssertionError` if the checks take too long."""
        began = time.thread_time()
        try:
            validate(parse(body), limits=LIMITS, definition=self._definition)
            return "ok"
        except UserError as error:
            assert len(error.message) < LONGEST_SENTENCE, f"{error.type} has a very long sentence"
            return error.type
        finally:
            seconds = time.thread_time() - began
            assert seconds < DEADLINE, f"it took {seconds:.1f} s"


def damaged_losses(count: int) -> set[str]:
    """Return the error types of damaged custom losses, or `ok`. Call it in a separate process: the
    memory limit may kill other threads."""
    seed = json.loads(custom_loss_body())
    found = set()
    with bounded_memory(2**30):
        for number in range(count):
            try:
                find_loss("custom", definition=mutate(Random(f"loss:{number}"), seed))
                found.add("ok")
            except UserError as error:
                found.add(error.type)
    return found


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Limit this process to `more` bytes beyond its mapped memory. Larger allocations raise
    `MemoryError`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + more
    if before[0] != resource.RLIM_INFINITY:
        limit = min(limit, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def resident_bytes() -> int:
    """Return this process's bytes, after it returned free memory to the system."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
