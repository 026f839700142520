"""create_custom_loss, over HTTP and with the SDK."""

from __future__ import annotations

import json

import pytest
import tinker
import torch
from tinker import types

from tandem.wire.v1 import tinker_pb2
from tests.support.custom_losses import request_body, traced
from tests.support.gateway.running import forward_backward_bytes
from tests.support.sdk import supervised
from tests.support.waiting import wait_until

PROTO = {"Content-Type": "application/x-protobuf"}


def scaled(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}


def halved(logprobs):
    return logprobs.sum() / 2, {}


def create(client, body: bytes):
    return client.post("/api/v1/create_custom_loss", content=body)


def test_the_sdk_creates_a_loss_and_the_trainer_gets_its_graph(gate):
    with gate.service() as service:
        handle = service.create_custom_loss(
            scaled, input_ranks={"logprobs": 1, "weights": 1}
        ).result()
        assert handle.loss_id == f"{handle.session_id}:loss:0"
        training = service.create_lora_training_client("tiny:full").result()
        one = supervised([1, 2, 3, 9])
        one.loss_fn_inputs["weights"] = types.TensorData.from_torch(torch.ones(3))
        training.forward_backward_custom([one], handle).result()
        _, trainer = gate.worker(f"trainer-{handle.session_id}")
        sent = trainer.requests[-1]
        message = tinker_pb2.ForwardBackwardRequest.FromString(sent.payload)
        assert message.loss_fn == "custom"
        definition = json.loads(sent.loss_definition)
        assert definition["name"] == "scaled"
        assert [each["name"] for each in definition["inputs"]] == ["logprobs", "weights"]
        training.forward_backward([one], "cross_entropy").result()
        assert trainer.requests[-1].loss_definition == b""


def test_the_same_number_twice_is_the_same_loss_and_another_graph_is_refused(gate):
    session = gate.session_id()
    body = request_body(traced(halved, logprobs=1), session_id=session, number=4)
    with gate.http() as client:
        first = create(client, body)
        assert first.json() == {"request_id": f"{session}:loss:4"}
        assert create(client, body).json() == first.json()
        answer = gate.retrieve(f"{session}:loss:4").json()
        assert answer["loss_id"] == f"{session}:loss:4"
        other = request_body(traced(scaled, logprobs=1, weights=1), session_id=session, number=4)
        refused = create(client, other)
    assert refused.status_code == 400
    assert refused.json()["type"] == "custom_loss_invalid"


def test_what_is_not_allowed_is_refused_at_once(gate):
    session = gate.session_id()
    body = json.loads(request_body(traced(halved, logprobs=1), session_id=session))
    body["graph"]["nodes"][1]["target"] = "__class__"
    with gate.http() as client:
        refused = create(client, json.dumps(body).encode())
        assert refused.status_code == 400
        assert "__class__" in refused.json()["error"]
        assert create(client, b"[]").status_code == 400
        unknown = request_body(traced(halved, logprobs=1), session_id="s-000000000000")
        assert create(client, unknown).status_code == 404


def test_a_loss_of_another_session_is_unknown_and_the_operation_takes_its_place(gate):
    theirs, session = gate.session_id(), gate.session_id()
    run_id = gate.run_id(session)
    with gate.http() as client:
        create(client, request_body(traced(halved, logprobs=1), session_id=theirs))
        message = tinker_pb2.ForwardBackwardRequest.FromString(forward_backward_bytes(run_id, 1))
        message.loss_fn = "custom"
        message.loss_fn_config_v2["loss_id"].text = f"{theirs}:loss:0"
        body = message.SerializeToString()
        client.post("/api/v1/forward_backward", content=body, headers=PROTO)
        answer = gate.retrieve(f"{run_id}:1").json()
        assert answer["type"] == "unknown_loss"
        assert answer["category"] == "user"
        step = {"model_id": run_id, "seq_id": 2, "adam_params": {}}
        client.post("/api/v1/optim_step", json=step)
        gate.retrieve(f"{run_id}:2")
    _, trainer = gate.worker(f"trainer-{session}")
    assert "custom loss" in trainer.requests[-1].header.gradients_incomplete


def test_a_step_of_dimuon_is_sent_as_one(gate):
    session = gate.session_id()
    run_id = gate.run_id(session)
    with gate.http() as client:
        params = {"type": "dimuon", "learning_rate": 0.5, "grad_clip_norm": -1.0}
        body = {"model_id": run_id, "seq_id": 1, "optimizer_params": params}
        client.post("/api/v1/optim_step", json=body)
        gate.retrieve(f"{run_id}:1")
    _, trainer = gate.worker(f"trainer-{session}")
    sent = trainer.requests[-1]
    assert sent.WhichOneof("optimizer") == "dimuon"
    assert (sent.dimuon.learning_rate, sent.dimuon.beta1, sent.dimuon.grad_clip_norm) == (
        0.5,
        0.9,
        -1.0,
    )


def test_a_sessions_losses_go_with_it(gate):
    with gate.service() as service:
        handle = service.create_custom_loss(halved, input_ranks={"logprobs": 1}).result()
        assert gate.run(gate.gateway.custom_losses.recall(handle.loss_id)) is not None
    # `Database.write_soon` deletes them, possibly after the client knows of the end.
    wait_until(lambda: gate.run(gate.gateway.custom_losses.recall(handle.loss_id)) is None)


def test_the_sdk_raises_for_a_loss_that_uses_what_is_not_allowed(gate):
    def random(logprobs):
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    with (
        gate.service() as service,
        pytest.raises(tinker.BadRequestError, match=r"torch\.rand_like"),
    ):
        service.create_custom_loss(random, input_ranks={"logprobs": 1}).result()
