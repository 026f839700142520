"""Batches and results in JSON, for clients without the SDK."""

from __future__ import annotations

import json
import math

import pytest

from gateway.api.tinker.json_bodies import read_batch, result_in_json
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.gateway.requests import asample, new_sampler
from tests.support.gateway.runs import Run
from tests.support.trainer_worker import datum

JSON = {"Accept": "application/json"}
DATA = [
    {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "loss_fn_inputs": {
            "target_tokens": [2, 3, 4],
            "weights": {"data": [0, 0.5, 1], "dtype": "float32", "shape": [3]},
        },
    }
]


@pytest.fixture
def run(gate):
    return Run.new(gate)


def post(run: Run, seq_id: int = 1, **fields):
    body = {"model_id": run.id, "seq_id": seq_id, "loss_fn": "cross_entropy", "data": DATA}
    return run.client.post("/api/v1/forward_backward", json=body | fields)


def outcome(run: Run, seq_id: int) -> dict:
    answer = run.client.post(
        "/api/v1/retrieve_future", json={"request_id": f"{run.id}:{seq_id}"}, headers=JSON
    )
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def test_a_json_batch_and_its_protobuf_message_are_one_request(run):
    first = post(run, loss_fn_config={"low": 0.5})
    assert first.status_code == 200, first.text
    message = wire.ForwardBackwardRequest(
        model_id=run.id,
        seq_id=1,
        loss_fn="cross_entropy",
        data=[datum([1, 2, 3], targets=[2, 3, 4], weights=[0, 0.5, 1])],
    )
    message.loss_fn_config_v2["low"].number = 0.5
    same = run.backward(1, message.SerializeToString(deterministic=True))
    assert same.json() == first.json()
    assert post(run, loss_fn_config={"low": 0.5}).json() == first.json()
    assert post(run, loss_fn_config={"low": 0.6}).json()["type"] == "sequence_taken"
    run.outcome(1)
    assert [kind for kind, _ in run.trainer.applied] == ["forward_backward"]


def test_forward_only_is_an_operation_of_its_own():
    body = {"model_id": "s-1:train:0", "seq_id": 1, "data": DATA, "forward_only": True}
    routing, payload, refused = read_batch(json.dumps(body).encode(), most_values=1000)
    assert refused is None
    assert routing.forward_only
    assert wire.ForwardBackwardRequest.FromString(payload).forward_only


def test_a_result_is_json_for_a_client_that_accepts_json_alone(run):
    post(run)
    run.outcome(1)
    found = outcome(run, 1)
    assert found["type"] == "forward_backward"
    assert "loss:sum" in found["metrics"]
    both = {"Accept": "application/json, application/x-protobuf"}
    for headers in ({}, both):
        body = {"request_id": f"{run.id}:1"}
        answer = run.client.post("/api/v1/retrieve_future", json=body, headers=headers)
        assert answer.headers["content-type"] == "application/x-protobuf"


def test_a_wrong_json_batch_takes_its_number_and_later_operations_run(run):
    wrong = {"target_tokens": {"data": [1.5], "dtype": "int64"}}
    for seq_id, change, sentence in (
        (1, {"data": [{**DATA[0], "loss_fn_inputs": wrong}]}, "whole numbers"),
        (2, {"data": "none"}, "data: Input should be a valid list"),
        (3, {"data": [{"model_input": {"chunks": [{"type": "image"}]}}]}, "text alone"),
        (4, {"data": [{"model_input": {"chunks": []}}]}, "is empty"),
        (5, {"loss_fn_config": {"loss_id": "x" * 300}}, "at most 256 characters"),
    ):
        answer = post(run, seq_id, **change)
        assert answer.status_code == 400, change
        assert sentence in answer.json()["error"]
        assert sentence in outcome(run, seq_id)["error"]
    run.step(6)
    assert run.outcome(6).json()["type"] == "optim_step"


def test_a_json_batch_without_a_run_or_number_is_refused(run):
    unknown = {"model_id": "s-9:train:0"}
    for fields in ({"model_id": None}, {"seq_id": 0}, {"seq_id": 2**31}, unknown):
        answer = post(run, **fields)
        assert 400 <= answer.status_code < 405, answer.text
    for body in (b"[]", b"{", b"null"):
        answer = run.client.post(
            "/api/v1/forward_backward", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400, body
        assert answer.json()["type"] in ("malformed_payload", "invalid_request")


def test_a_sample_is_json_for_a_client_that_accepts_json_alone(gate):
    sampler = new_sampler(gate)
    with gate.http() as client:
        request_id = asample(client, sampler, num_samples=2).json()["request_id"]
        gate.retrieve(request_id)
        body = {"request_id": request_id}
        found = client.post("/api/v1/retrieve_future", json=body, headers=JSON).json()
    assert found["type"] == "sample"
    assert len(found["sequences"]) == 2
    assert all(type(token) is int for token in found["sequences"][0]["tokens"])


def test_all_fields_of_a_sample_are_converted():
    floats = wire.Tensor(dtype=wire.DTYPE_FLOAT32, shape=[1, 2])
    floats.dense = bytes.fromhex("0000c0bf0000c07f")  # -1.5, NaN
    top = wire.TopkLogprobs(
        token_ids=bytes.fromhex("0500000000000000"),
        logprobs=bytes.fromhex("0000c0bf804fc3c7"),  # -1.5, -99999
        k=2,
        length=1,
    )
    sparse = wire.Tensor(dtype=wire.DTYPE_INT64, shape=[1, 3])
    sparse.sparse_csr.values = (7).to_bytes(8, "little")
    sparse.sparse_csr.crow_indices = bytes(8) + (1).to_bytes(8, "little")
    sparse.sparse_csr.col_indices = (2).to_bytes(8, "little")
    sequence = wire.SampledSequence(
        stop_reason=wire.STOP_REASON_LENGTH,
        tokens=bytes.fromhex("05000000"),
        logprobs=bytes.fromhex("0000c0bf"),
        topk_sampled_logprobs=top,
    )
    response = wire.SampleResponse(
        sequences=[sequence],
        prompt_logprobs=floats.dense,
        topk_prompt_logprobs=top,
        target_prompt_logprobs=sparse,
        prompt_alt_tokens=wire.PromptAltTokens(tokens=sparse, logprobs=floats),
        prompt_cache_hit_tokens=1,
        tandem_weight_version="v",
    )
    found = result_in_json(response.SerializeToString(), of_sample=True).model_dump_json()
    assert found == (
        '{"type":"sample","weight_version":"v","sequences":[{"stop_reason":"length",'
        '"tokens":[5],"logprobs":[-1.5],"topk_logprobs":[[[5,-1.5]]],"versions":null}],'
        '"prompt_logprobs":[-1.5,null],"topk_prompt_logprobs":[[[5,-1.5]]],'
        '"target_prompt_logprobs":{"data":[7],"dtype":"int64","shape":[1,3],'
        '"sparse_crow_indices":[0,1],"sparse_col_indices":[2]},'
        '"prompt_alt_tokens":{"tokens":{"data":[7],"dtype":"int64","shape":[1,3],'
        '"sparse_crow_indices":[0,1],"sparse_col_indices":[2]},'
        '"logprobs":{"data":[-1.5,null],"dtype":"float32","shape":[1,2],'
        '"sparse_crow_indices":null,"sparse_col_indices":null}},'
        '"prompt_cache_hit_tokens":1}'
    )


def test_a_batch_result_has_one_entry_for_each_datum():
    field = wire.BatchedTensor(dtype=wire.DTYPE_FLOAT32, data=bytes(12))
    field.offsets = b"".join(at.to_bytes(8, "little") for at in (0, 4, 12))
    output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.loss_fn_outputs.add(num_datums=2, fields={"logprobs": field})
    output.metrics["loss:sum"] = math.nan
    found = result_in_json(output.SerializeToString(), of_sample=False)
    assert [row["logprobs"].shape for row in found.loss_fn_outputs] == [[1], [2]]
    assert '"metrics":{"loss:sum":null}' in found.model_dump_json()
