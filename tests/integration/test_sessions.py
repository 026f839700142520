"""When a session ends, its workers and unfinished work go, and its checkpoints stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinker import ServiceClient

from tandem.weights import version_path
from tests.support.plain_http import PlainClient, message
from tests.support.sdk import SOON, logprobs, refusal, sequences, train
from tests.support.stacks import TIED, TestStack, running, session_of
from tests.support.waiting import wait_until


def of_session(stack: TestStack, session_id: str) -> list[dict]:
    return [w for w in stack.status()["workers"] if session_id in w["id"]]


def weights_of(stack: TestStack, run_id: str) -> list[str]:
    folder = version_path(stack.data_dir, f"{run_id}/x").parent
    return sorted(child.name for child in folder.iterdir()) if folder.is_dir() else []


def test_a_finished_session_leaves_no_worker_and_no_unnamed_version_but_its_checkpoints(
    stack: TestStack, service: ServiceClient
) -> None:
    tokens = sequences(2, seed=181)
    other = stack.service()
    run = other.create_lora_training_client(f"{TIED}:full").result(timeout=120)
    session_id = session_of(run)
    train(run, seed=182)
    saved = logprobs(run, tokens)
    for _ in range(3):
        run.save_weights_and_get_sampling_client().result(timeout=120)
    run.save_weights_for_sampler("kept").result(timeout=60)
    path = run.save_state("kept").result(timeout=60).path
    folder = version_path(stack.data_dir, f"{run.model_id}/x").parent
    partial = folder / ".partial-v000099-00000000"  # as a publish that was cut off leaves it
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
    continued = service.create_training_client_from_state(path).result(timeout=120)
    assert all((a == b).all() for a, b in zip(saved, logprobs(continued, tokens), strict=True))
    named = f"tinker://{run.model_id}/sampler_weights/kept"
    assert service.create_sampling_client(model_path=named).result(timeout=60)


@pytest.fixture(scope="module")
def impatient(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """Sessions end three seconds after their last sign of life."""
    data_dir = tmp_path_factory.mktemp("impatient")
    settings = {"session_ttl": "3", "reaper_interval": "0.2"}
    with running(data_dir, models=models, settings=settings) as stack:
        yield stack


def test_a_session_whose_heartbeat_is_lost_is_ended_and_its_checkpoints_stay(
    impatient: TestStack,
) -> None:
    client = PlainClient(impatient.stack.endpoint)
    session_id = client.create_session()
    answer = client.http.post(
        "create_model",
        json={"session_id": session_id, "model_seq_id": 0, "base_model": f"{TIED}:full"},
    )
    run_id = f"{session_id}:train:0"

    def ready() -> bool:
        assert client.heartbeat(session_id).is_success
        runs = impatient.status()["runs"]
        return any(run["id"] == run_id and run["state"] == "ready" for run in runs)

    wait_until(ready, what="the run is ready", timeout=120)
    client.retrieve(answer.json()["request_id"])
    saved = client.post(
        "save_weights", {"model_id": run_id, "seq_id": 1, "path": "kept", "overwrite": False}
    )
    path = client.retrieve(saved).json["path"]
    client.heartbeat(session_id)
    # The first operation is missing, so that this one waits when the session ends.
    waiting = client.forward_backward(message(run_id, 3, [1, 2, 3])).json()["request_id"]

    wait_until(lambda: not of_session(impatient, session_id), what="the workers were stopped")
    lost = client.heartbeat(session_id)
    assert (lost.status_code, lost.json()["type"]) == (410, "session_finished")
    failed = client.failure(waiting)
    assert failed.type == "session_finished"
    assert "heartbeat" in failed.message
    wait_until(
        lambda: {"gateway"} >= {kind_of(process.command) for process in impatient.processes()},
        what="no worker process is left",
    )

    session_id = client.create_session()
    body = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": True}
    loaded = client.post("load_weights", body)

    def alive_and_loaded() -> bool:
        assert client.heartbeat(session_id).is_success
        runs = impatient.status()["runs"]
        return any(r["id"].startswith(session_id) and r["state"] == "ready" for r in runs)

    wait_until(alive_and_loaded, what="the run was created again", timeout=120)
    assert client.retrieve(loaded).json["model_id"] == f"{session_id}:train:0"


def kind_of(command: str) -> str:
    return next(
        (k for k in ("gateway", "trainer_service", "sampler_service") if f"-m {k}" in command),
        command,
    )
