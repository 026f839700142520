"""Models with attention heads that vLLM lacks on CPUs."""

from __future__ import annotations

import json

import openai
import pytest
from tinker import types

from tests.support.gateway.requests import asample, create_sampler
from tests.support.gateway.running import make_model, running_gateway
from tests.support.gateway.speaking_models import (
    byte_tokenizer,
    client_of,
    complete,
    write_speaking_model,
)

SIZES = [
    {"head_dim": 16},
    {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8},
]


@pytest.fixture(scope="module", params=SIZES, ids=["said", "divided"])
def gate(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gateway")
    model = write_speaking_model(folder / "thin", byte_tokenizer())
    config = json.loads((model / "config.json").read_text()) | request.param
    (model / "config.json").write_text(json.dumps(config))
    with running_gateway(folder, models={"thin": model, "tiny": make_model(folder / "tiny")}) as it:
        yield it


def refused(answer) -> None:
    assert answer.status_code == 400, answer.text
    assert "the model thin cannot be sampled here: the model's attention heads have" in answer.text
    assert "vLLM's build for CPUs computes heads of 32, 64" in answer.text


def test_a_sampling_session_of_it_is_refused_at_once(gate):
    with gate.http() as client:
        session = gate.session_id()
        refused(create_sampler(client, session, model="thin"))
        assert create_sampler(client, session, 1, model="tiny").status_code == 200


def test_a_sample_that_names_it_is_refused_at_once(gate):
    with gate.http() as client:
        refused(asample(client, None, None, base_model="thin"))


def test_a_completion_of_it_is_refused_at_once(gate):
    with client_of(gate) as client, pytest.raises(openai.BadRequestError) as raised:
        complete(client, model="thin")
    refused(raised.value.response)


def test_a_run_of_it_trains_and_its_weights_are_not_loaded(gate):
    with gate.service() as service:
        training = service.create_lora_training_client("thin", rank=4).result()
        training.optim_step(types.AdamParams()).result()
        with pytest.raises(Exception, match="the model thin cannot be sampled here"):
            training.save_weights_and_get_sampling_client().result()
        path = training.save_weights_for_sampler("kept").result().path
    with gate.http() as client:
        body = {"session_id": gate.session_id(), "sampling_session_seq_id": 0, "model_path": path}
        refused(client.post("/api/v1/create_sampling_session", json=body))
