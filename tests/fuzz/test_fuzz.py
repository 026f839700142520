"""A short run of `make fuzz`."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random

import pytest

from tandem.wire.v1 import tinker_pb2
from tests.fuzz import protobuf
from tests.fuzz.secrets import SecretFound, Watch
from tests.fuzz.seeds import protobuf_seeds
from tests.fuzz.trainer import Checked, damaged_losses, resident_bytes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MORE_FOR_THE_TRAINER = 8000


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("requests", [1000, pytest.param(3000, marks=pytest.mark.nightly)])
def test_the_gateway_answers_whatever_it_is_sent(requests):
    """No 5xx, no hang, no growth, no secret in output, and a good request is still computed. It
    runs in a process with its own memory and logs."""
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--requests",
        str(requests),
        "--seed",
        "20260701",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1180)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert f"{requests} requests" in done.stdout
    assert " 0 faults" in done.stdout


def test_the_trainer_refuses_what_is_wrong_with_nothing_but_its_own_errors():
    checked = Checked()
    seeds = protobuf_seeds(checked.losses)
    found = set()
    for number in range(MORE_FOR_THE_TRAINER):
        if number == MORE_FOR_THE_TRAINER // 4:
            before = resident_bytes()
        rng = Random(f"trainer:{number}")
        found.add(checked(protobuf.mutate(rng, rng.choice(seeds), rng.choice(seeds))))
    assert resident_bytes() - before < 64 * 2**20
    assert {"ok", "malformed_payload", "loss_input_shape", "unsupported_input"} <= found


def test_the_trainer_refuses_damaged_custom_losses_with_nothing_but_its_own_errors():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        found = alone.submit(damaged_losses, 3000).result()
    assert found == {"ok", "malformed_payload", "custom_loss_invalid", "unknown_loss"}


def test_the_seeds_are_good_and_their_mutations_the_same_every_time():
    checked = Checked()
    seeds = protobuf_seeds(checked.losses)
    answers = [checked(seed.SerializeToString()) for seed in seeds]
    assert answers.count("unsupported_input") == 1, "the one with an image"
    assert answers.count("ok") == len(seeds) - 1
    for number in range(50):
        first, second = (protobuf.mutate(Random(number), seeds[0], seeds[-1]) for _ in range(2))
        assert first == second
    changed = {protobuf.mutate(Random(n), seeds[0], seeds[-1]) for n in range(200)}
    assert len(changed) > 150
    assert seeds[0] == tinker_pb2.ForwardBackwardRequest.FromString(seeds[0].SerializeToString())


@pytest.mark.parametrize("form", ["s3cret-key", "czNjcmV0LWtleQ", "7333637265742d6b6579"])
def test_a_secret_in_a_log_is_found_in_any_form(form):
    watch = Watch()
    watch.know("s3cret-key")
    watch.write('{"event": "nothing"}\n')
    watch.check()
    watch.write(f'{{"event": "x {form}"}}\n')
    with pytest.raises(SecretFound):
        watch.check()
