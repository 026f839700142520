"""The operation log and the dispatcher, with fake workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker
import zstandard
from tinker import types

from tandem.errors import LossInputMissing, StorageFailed
from tandem.v1 import trainer_pb2
from tandem.wire.v1 import tinker_pb2
from tests.support.gateway.requests import finish, optim_step
from tests.support.gateway.running import forward_backward_bytes, running_gateway
from tests.support.gateway.runs import PROTO, Run
from tests.support.sdk import supervised
from tests.support.waiting import wait_until

LIMIT = 200_000


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    with running_gateway(
        tmp_path_factory.mktemp("operations"),
        session_ttl=600,
        max_payload_bytes=LIMIT,
        max_queued_operations=6,
        recovery={"enabled": False},  # see test_restored.py
    ) as gate:
        yield gate


@pytest.fixture
def run(gate):
    session = gate.session_id()
    run_id = gate.run_id(session)
    worker_id, trainer = gate.worker(f"trainer-{session}")
    with gate.http() as client:
        yield Run(gate, run_id, worker_id, trainer, client)
        client.post(f"/api/v1/sessions/{session}/finish", json={"reason": {"type": "success"}})


def test_operations_run_in_order_when_they_arrive_out_of_order(run):
    for seq_id in (4, 2, 3, 1):
        assert run.step(seq_id).status_code == 200
    for seq_id in (1, 2, 3, 4):
        assert run.outcome(seq_id).json()["metrics"] == {"grad_norm": 1.5}
    assert [seq for _, seq in run.trainer.applied] == [1, 2, 3, 4]


def test_a_repeated_seq_id_is_answered_with_the_first_request_and_applied_once(run):
    first = run.step(1).json()
    assert run.step(1).json() == first
    run.outcome(1)
    assert run.step(1).json() == first
    assert run.trainer.applied == [("optim_step", 1)]


def test_another_request_with_a_taken_seq_id_is_refused_by_name_and_changes_nothing(run):
    def refused() -> None:
        batch = forward_backward_bytes(run.id, 1)
        for answer in (run.step(1, learning_rate=0.5), run.backward(1, batch)):
            assert (answer.status_code, answer.json()["type"]) == (400, "sequence_taken")
            assert answer.json()["error"].startswith(
                f"operation 1 of {run.id} is already another request (optim_step)"
            )

    run.hold()
    first = run.step(1).json()
    refused()
    run.release()
    assert run.outcome(1).json()["metrics"] == {"grad_norm": 1.5}
    refused()
    run.gate.gateway.futures._futures.pop(first["request_id"])  # as some time after the fetch
    refused()
    assert run.step(1).json() == first
    assert run.backward(2).status_code == 200
    assert run.backward(2).status_code == 200
    assert run.backward(2, forward_backward_bytes(run.id, 2, forward_only=True)).status_code == 400
    run.outcome(2)
    assert run.trainer.applied == [("optim_step", 1), ("forward_backward", 2)]


def test_a_run_of_another_model_with_a_taken_number_is_refused_by_name(run):
    new = {"session_id": run.id.partition(":")[0], "model_seq_id": 0, "base_model": "tiny:full"}
    again = run.client.post("/api/v1/create_model", json=new)
    assert again.json()["request_id"] == f"{run.id}:0"
    other = run.client.post("/api/v1/create_model", json=new | {"base_model": "tiny"})
    assert (other.status_code, other.json()["type"]) == (400, "sequence_taken")


def test_a_taken_seq_id_is_known_after_a_restart_of_the_gateway(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id())
        optim_step(client, run_id, 1)
        gate.retrieve(f"{run_id}:1")
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        assert optim_step(client, run_id, 1).json()["request_id"] == f"{run_id}:1"
        assert optim_step(client, run_id, 1, more=1).json()["type"] == "sequence_taken"
        assert optim_step(client, run_id, 2).status_code == 200
        assert optim_step(client, run_id, 2, more=1).json()["type"] == "sequence_taken"


def test_a_body_that_is_no_protobuf_is_refused_and_takes_its_place(run):
    broken = forward_backward_bytes(run.id, 1)[:-2]
    answer = run.backward(1, broken)
    assert answer.status_code == 400
    assert answer.json()["type"] == "malformed_payload"
    run.step(2)
    run.outcome(2)
    assert "not a protobuf" in run.trainer.requests[0].header.gradients_incomplete
    assert run.backward(3, b"\xff\xff nonsense").status_code == 400
    run.step(3)
    run.outcome(3)
    assert run.trainer.requests[1].header.gradients_incomplete == ""


@pytest.mark.parametrize("announced", [True, False])
def test_an_oversized_body_is_refused_and_takes_its_place(run, announced):
    body = forward_backward_bytes(run.id, 1) + bytes(3 * LIMIT)
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))
    answer = run.client.post(
        "/api/v1/forward_backward", content=body if announced else pieces, headers=PROTO
    )
    assert answer.status_code == 413
    assert answer.json()["type"] == "payload_too_large"
    run.step(2)
    run.outcome(2)
    assert [seq for _, seq in run.trainer.applied] == [2]


def test_the_sdk_raises_at_once_for_an_oversized_batch(gate):
    with gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        with pytest.raises(tinker.APIStatusError, match="payload_too_large"):
            training.forward_backward([supervised([1] * (LIMIT // 2))], "cross_entropy").result()
        assert training.forward([supervised([1, 2, 9])], "cross_entropy").result().metrics


def test_zstd_bodies_are_taken_and_bombs_are_not(run):
    zipped = zstandard.ZstdCompressor().compress(forward_backward_bytes(run.id, 1))
    assert run.backward(1, zipped, **{"Content-Encoding": "zstd"}).status_code == 200
    assert run.outcome(1).headers["content-type"] == "application/x-protobuf"
    bomb = zstandard.ZstdCompressor().compress(
        forward_backward_bytes(run.id, 2) + bytes(50 * LIMIT)
    )
    assert len(bomb) < LIMIT
    assert run.backward(2, bomb, **{"Content-Encoding": "zstd"}).status_code == 413
    assert run.backward(3, b"not zstd", **{"Content-Encoding": "zstd"}).status_code == 400


def test_a_users_mistake_found_by_the_trainer_is_typed_on_the_sdks_side(gate):
    with gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        _, trainer = gate.worker(f"trainer-{training.model_id.partition(':')[0]}")
        trainer.fail_with[1] = LossInputMissing("datum 0 has no weights")
        with pytest.raises(tinker.RequestFailedError, match="loss_input_missing") as caught:
            training.forward_backward([supervised([1, 9])], "cross_entropy").result()
        assert caught.value.category is types.RequestErrorCategory.User
        assert training.optim_step(types.AdamParams()).result().metrics


def test_wrong_optimizer_settings_are_refused_in_their_place(run):
    run.step(1, learning_rate=-1)
    run.client.post(
        "/api/v1/optim_step",
        json={
            "model_id": run.id,
            "seq_id": 2,
            "optimizer_params": {"type": "lion", "learning_rate": 1},
        },
    )
    run.step(3)
    assert run.outcome(1).json()["type"] == "optimizer_setting"
    assert "lion" in run.outcome(2).json()["error"]
    run.outcome(3)
    assert [seq for _, seq in run.trainer.applied] == [3]


def test_a_long_poll_says_what_is_being_waited_for(run):
    run.hold()
    run.step(1)
    run.step(2)
    run.step(4)
    status = "/api/tandem/v1/status"
    wait_until(lambda: "the trainer is at work" in run.client.get(status).text)
    answers = [
        run.client.post("/api/v1/retrieve_future", json={"request_id": f"{run.id}:{seq}"})
        for seq in (1, 2)
    ]
    run.release()
    assert [a.status_code for a in answers] == [408, 408]
    assert answers[0].json()["type"] == "try_again"
    assert "trainer is at work" in answers[0].json()["queue_state_reason"]
    reason = answers[1].json()["queue_state_reason"]
    assert reason.startswith("1 operation before this one; optim_step 1: the trainer is at work")


def test_a_long_operation_says_how_many_tokens_are_done(run, monkeypatch):
    monkeypatch.setattr("gateway.runs.delivery._PROGRESS_INTERVAL", 0.01)
    run.hold()
    run.trainer.only.progress = trainer_pb2.ProgressReply(
        seq_id=2, seconds=4.0, tokens_done=1000, tokens=8000
    )
    run.step(1)

    def operation():
        runs = run.client.get("/api/tandem/v1/status").json()["runs"]
        return next(each for each in runs if each["id"] == run.id)["operation"]

    found = wait_until(lambda: (now := operation()) and now["tokens"] and now)
    answer = run.client.post("/api/v1/retrieve_future", json={"request_id": f"{run.id}:1"})
    run.trainer.only.progress = trainer_pb2.ProgressReply(seq_id=2, seconds=5.0, compiling=True)
    compiling = "optim_step 1: the trainer is at work on it (compiling, 5 s)"
    wait_until(lambda: (now := operation()) and now["says"] == compiling)
    run.release()
    run.outcome(1)
    assert (found["kind"], found["seq_id"]) == ("optim_step", 1)
    assert (found["tokens_done"], found["tokens"], found["tokens_per_second"]) == (1000, 8000, 250)
    said = "optim_step 1: the trainer is at work on it (1,000 of 8,000 tokens, 250 tokens/s, 4 s)"
    assert (found["says"], answer.json()["queue_state_reason"]) == (said, said)
    wait_until(lambda: operation() is None)


def test_too_many_waiting_operations_are_refused_with_429_and_take_no_place(run):
    run.hold()
    for seq_id in range(1, 7):
        assert run.step(seq_id).status_code == 200
    assert run.step(7).status_code == 429
    run.release()
    run.outcome(6)
    assert run.step(7).status_code == 200
    run.outcome(7)
    assert [seq for _, seq in run.trainer.applied] == [1, 2, 3, 4, 5, 6, 7]


def test_payloads_are_gone_when_their_operations_have_ended(run):
    run.hold()
    run.backward(1, forward_backward_bytes(run.id, 1, forward_only=True, tokens=2**15))
    folder = run.gate.settings.data_dir / "operations" / run.id.replace(":", "_")
    wait_until(lambda: (folder / "1").exists())
    run.release()
    run.outcome(1)
    wait_until(lambda: not (folder / "1").exists())


def test_an_operation_of_an_ended_run_leaves_no_payload_however_often_it_is_sent(run):
    folder = run.gate.settings.data_dir / "operations"
    run.gate.run(run.gate.launcher.kill(run.worker_id, "killed by SIGKILL"))
    registry = run.gate.gateway.runs
    wait_until(lambda: registry.get(run.id).error)
    for _ in range(3):
        assert run.backward(1).json()["request_id"] == f"{run.id}:1"
        run.gate.gateway.futures._futures.clear()  # as after a while
        assert run.outcome(1).json()["type"] == "worker_died"
    run.gate.run(run.gate.gateway.database.flush())
    assert not (folder / run.id.replace(":", "_")).exists()


@pytest.mark.parametrize("name", ["loss_fn", "loss_id"])
def test_a_loss_name_of_many_characters_is_refused_at_its_turn(run, name):
    message = tinker_pb2.ForwardBackwardRequest(model_id=run.id, seq_id=1, loss_fn="custom")
    message.loss_fn_config_v2["loss_id"].text = "l"
    if name == "loss_fn":
        message.loss_fn = "l" * 257
    else:
        message.loss_fn_config_v2["loss_id"].text = "l" * 257
    with run.gate.http() as client:
        body = message.SerializeToString()
        refused = client.post("/api/v1/forward_backward", content=body, headers=PROTO)
    assert refused.status_code == 400
    assert "at most 256 characters" in refused.json()["error"]
    assert run.outcome(1).json()["type"] == "malformed_payload"


def test_payloads_of_an_ended_run_go_at_the_next_start_and_an_unknown_folder_stays(tmp_path):
    folder = tmp_path / "data" / "operations"
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        session_id = gate.session_id()
        run_id = gate.run_id(session_id)
        ended = folder / run_id.replace(":", "_")
        finish(client, session_id)
        wait_until(lambda: gate.gateway.runs.get(run_id) is None)
    unknown = folder / "s-1_train_0"
    for left in (ended, unknown):
        left.mkdir(parents=True)
        (left / "7").write_bytes(b"payload")
    with running_gateway(tmp_path):
        assert not ended.exists()
        assert (unknown / "7").read_bytes() == b"payload"


def test_an_operation_that_the_trainer_does_not_answer_in_time_ends_the_run(tmp_path):
    with running_gateway(tmp_path, session_ttl=600, operation_timeout=0.5) as gate:
        session = gate.session_id()
        run_id = gate.run_id(session)
        worker_id, trainer = gate.worker("trainer")
        gate.run(trainer.gate.clear)
        with gate.http() as client:
            for seq_id in (1, 2):
                optim_step(client, run_id, seq_id)
        answers = [gate.retrieve(f"{run_id}:{seq}").json() for seq in (1, 2)]
        assert {a["type"] for a in answers} == {"operation_timed_out"}
        wait_until(lambda: worker_id in gate.launcher.stopped)


def test_a_payload_is_read_back_only_where_memory_had_no_room_for_it(tmp_path, monkeypatch):
    read = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or read_bytes(path))
    with running_gateway(tmp_path, session_ttl=600, limit={"held_bytes": 800_000}) as gate:
        run_id = gate.run_id(gate.session_id())
        _, trainer = gate.worker("trainer")
        message = tinker_pb2.ForwardBackwardRequest(model_id=run_id, loss_fn="cross_entropy")
        tokens = message.data.add().model_input.add().encoded_text
        payloads = []
        with gate.http() as client:
            for seq_id, size in enumerate((40, 300_000, 500_000), start=1):
                message.seq_id, tokens.tokens = seq_id, bytes(size)
                payloads.append(message.SerializeToString())
                client.post("/api/v1/forward_backward", content=payloads[-1], headers=PROTO)
                assert gate.retrieve(f"{run_id}:{seq_id}").status_code == 200
    assert [request.payload for request in trainer.requests] == payloads
    assert [request.header.seq_id for request in trainer.requests] == [2, 3, 4]
    assert [name for name in read if name in ("1", "2", "3")] == ["3"]


def test_a_seq_id_far_ahead_costs_nothing_and_the_gateway_goes_on(tmp_path):
    with running_gateway(tmp_path, sequence_gap_timeout=0.05) as gate, gate.http() as client:
        run_id = gate.run_id(gate.session_id())

        def refused(seq_id: int) -> bool:
            answer = optim_step(client, run_id, seq_id).json()
            return "sequence_gap" in gate.retrieve(answer["request_id"]).json()["error"]

        assert refused(2**53)
        assert refused(2**40)
        gate.gateway.futures._futures.clear()  # the journal remembers both
        assert refused(2**53)
        assert refused(2**40)
        assert client.get("/api/v1/healthz").status_code == 200


@pytest.mark.parametrize("tokens", [3, 30_000])
def test_an_operation_whose_commit_was_reported_as_failed_is_applied_when_it_is_sent_again(
    run, monkeypatch, tokens
):
    """As when PostgreSQL goes away during a commit, and stays away. A large payload has a file."""
    database, written = run.gate.gateway.database, []

    async def write(statement, *rows, write=database.write, undo=None, **options):
        await write(statement, *rows, undo=undo, **options)
        if "digest" in rows[0]:
            written.append(rows)
            if undo is not None:
                undo()
            raise StorageFailed("the connection was lost")

    batch = forward_backward_bytes(run.id, 1, tokens=tokens)
    with monkeypatch.context() as lost:
        lost.setattr(database, "write", write)
        answer = run.client.post("/api/v1/forward_backward", content=batch, headers=PROTO)
        assert (answer.status_code, answer.json()["type"]) == (503, "storage_failed")
    assert len(written) == 1
    assert run.step(2).status_code == 200
    answer = run.client.post("/api/v1/forward_backward", content=batch, headers=PROTO)
    assert answer.status_code == 200
    assert run.outcome(1).status_code == 200
    assert run.outcome(2).json()["metrics"] == {"grad_norm": 1.5}
    assert [seq_id for _, seq_id in run.trainer.applied] == [1, 2]
