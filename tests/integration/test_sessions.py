"""A session's workers and unfinished work end with it. Its checkpoints stay."""

from __future__ import annotations

import pytest
from tinker import ServiceClient

from tandem.weights import version_path
from tests.support.files import entries
from tests.support.plain_http import PlainClient
from tests.support.sdk import SOON, logprobs, refusal, sequences, train
from tests.support.stacks import TIED, TestStack, session_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


def of_session(stack: TestStack, session_id: str) -> list[dict]:
    return [w for w in stack.status()["workers"] if session_id in w["id"]]


def weights_of(stack: TestStack, run_id: str) -> list[str]:
    folder = version_path(stack.data_dir, f"{run_id}/x").parent
    return [child.name for child in entries(folder)]


def test_a_finished_session_leaves_no_worker_and_no_unnamed_version_but_its_checkpoints(
    stack: TestStack, service: ServiceClient
) -> None:
    tokens = sequences(2, seed=181)
    other = stack.service()
    run = other.create_lora_training_client(f"{TIED}:full").result(timeout=240)
    session_id = session_of(run)
    train(run, seed=182)
    saved = logprobs(run, tokens)
    for _ in range(3):
        run.save_weights_and_get_sampling_client().result(timeout=240)
    run.save_weights_for_sampler("kept").result(timeout=240)
    path = run.save_state("kept").result(timeout=240).path
    folder = version_path(stack.data_dir, f"{run.model_id}/x").parent
    partial = folder / ".partial-v000099-00000000"  # left by an interrupted publish
    partial.mkdir()
    workers = of_session(stack, session_id)
    processes = [p for worker in workers for p in stack.processes_of(worker)]
    assert {worker["kind"] for worker in workers} == {"trainer", "sampler"}
    assert len(weights_of(stack, run.model_id)) == 5
    PlainClient(stack.stack.endpoint).finish(session_id)

    refused = refusal(lambda: run.save_state("too-late").result(timeout=SOON))
    assert refused.type == "session_finished", "what a client still asks is refused"
    other.close("success").result(timeout=SOON)
    wait_until(lambda: not of_session(stack, session_id), what="the session's workers stopped")
    pids = {process.pid for process in processes}
    wait_until(
        lambda: not pids & {process.pid for process in stack.processes()},
        what="the session's processes ended",
    )
    wait_until(
        lambda: len(weights_of(stack, run.model_id)) == 1,
        what="what was unnamed or unfinished has been collected",
    )
    assert not partial.exists()
    continued = service.create_training_client_from_state(path).result(timeout=240)
    assert all((a == b).all() for a, b in zip(saved, logprobs(continued, tokens), strict=True))
    named = f"tinker://{run.model_id}/sampler_weights/kept"
    assert service.create_sampling_client(model_path=named).result(timeout=240)
