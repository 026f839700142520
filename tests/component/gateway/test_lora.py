"""LoRA runs and their engines, with fake workers."""

from __future__ import annotations

import asyncio
import json

import pytest
from sqlalchemy import select
from tinker import types

from gateway.storage.tables import runs
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tests.support.gateway.running import make_model, running_gateway

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=3)


def engines(gate, session_id: str) -> list[int]:
    """Largest ranks of the session's engines, in order of their starts."""
    return [
        spec.sampler.max_lora_rank
        for spec in gate.launcher.specs
        if spec.kind == "sampler" and spec.session_id == session_id
    ]


def session_of(client) -> str:
    return client.model_id.partition(":")[0]


def create(client, session_id: str, number: int = 0, **fields):
    body = {"session_id": session_id, "model_seq_id": number, "base_model": "tiny"}
    return client.post("/api/v1/create_model", json=body | fields)


# --- Trained parameters -------------------------------------------------------------------


def test_what_the_client_asks_for_reaches_the_trainer_and_is_kept_with_the_run(gate):
    with gate.service() as service:
        training = service.create_lora_training_client(
            "tiny",
            rank=12,
            seed=5,
            train_unembed=False,
            optimizer=types.DimuonOptimizerConfig(),
        ).result()
        expected = TrainingSpec(
            lora=LoraSpec(rank=12, alpha=32.0, seed=5, attention=True, mlp=True, unembedding=False),
            optimizer="dimuon",
        )
        assert gate.worker("trainer")[1].spec.training == expected
        row = gate.run(
            gate.gateway.database.read_one(select(runs).where(runs.c.id == training.model_id))
        )
        assert TrainingSpec.model_validate(row["training"]) == expected
        info = training.get_info()
        assert (info.model_id, info.is_lora, info.lora_rank) == (training.model_id, True, 12)
        assert (info.model_name, info.model_data.arch) == ("tiny", "Fake")
        assert info.model_data.tokenizer_id == gate.gateway.models.get("tiny").path
        assert info.optimizer_config.model_dump() == types.DimuonOptimizerConfig().model_dump()


def test_the_defaults_are_the_sdks_and_a_seed_is_drawn(gate):
    with gate.service() as service:
        specs = []
        for _ in range(2):
            training = service.create_lora_training_client("tiny").result()
            info = training.get_info()
            assert (info.lora_rank, info.optimizer_config.type) == (32, "adamw")
            run = gate.trainer_of(training.model_id).runs[training.model_id]
            specs.append(run.training.lora)
    assert all(s.attention and s.mlp and s.unembedding and s.alpha == 32 for s in specs)
    assert specs[0].seed != specs[1].seed


def test_a_run_without_a_lora_config_trains_all_parameters(gate):
    with gate.http() as client:
        session_id = gate.session_id()
        answer = create(client, session_id)
        gate.retrieve(answer.json()["request_id"])
        info = client.post("/api/v1/get_info", json={"model_id": f"{session_id}:train:0"}).json()
    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    assert gate.worker("trainer")[1].spec.training == TrainingSpec()


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"lora_config": {"rank": 0}}, "invalid_request", "lora_config.rank"),
        ({"lora_config": {"rank": 513}}, "invalid_request", "lora_config.rank"),
        (
            {
                "lora_config": {
                    "rank": 1,
                    "train_attn": False,
                    "train_mlp": False,
                    "train_unembed": False,
                }
            },
            "unsuitable_lora",
            "trains nothing",
        ),
        ({"optimizer_config": {"type": "lion"}}, "optimizer_setting", "known: adamw, dimuon"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(gate, fields, kind, words):
    with gate.http() as client:
        answer = create(client, gate.session_id(), **fields)
    assert (answer.status_code, answer.json()["type"]) == (400, kind)
    assert words in answer.json()["error"]


def test_a_model_that_cannot_be_trained_is_refused_at_once_and_with_the_reason(gate, tmp_path):
    folder = make_model(tmp_path / "longrope")
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    (folder / "config.json").write_text(json.dumps(config))
    with gate.http() as client:
        model = {"name": "longrope", "path": str(folder)}
        assert client.post("/api/tandem/v1/models", json=model).status_code == 200
        answer = create(client, gate.session_id(), base_model="longrope")
    assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")
    assert "the model longrope cannot be trained" in answer.json()["error"]
    assert "depend on the longest sequence of a batch" in answer.json()["error"]


def test_a_run_belongs_to_its_sessions_owner_and_project(gate):
    with gate.http() as client:
        session_id = gate.session_id(project_id="p-7")
        gate.retrieve(create(client, session_id).json()["request_id"])
        row = gate.run(
            gate.gateway.database.read_one(select(runs).where(runs.c.session_id == session_id))
        )
    assert (row["owner"], row["project_id"]) == ("local", "p-7")


# --- The engine of a run ------------------------------------------------------------------


def test_runs_of_like_ranks_share_an_engine_and_a_larger_rank_gets_its_own(gate):
    with gate.service() as service:
        clients = [
            service.create_lora_training_client("tiny", rank=rank).result() for rank in (5, 8, 3)
        ]
        session_id = session_of(clients[0])
        small = [c.save_weights_and_get_sampling_client().result() for c in clients][1]
        assert engines(gate, session_id) == [8]
        large = service.create_lora_training_client("tiny", rank=20).result()
        large = large.save_weights_and_get_sampling_client().result()
        assert engines(gate, session_id) == [8, 32]
        for sampler in (small, large):
            sampler.sample(PROMPT, 1, PARAMS).result()
        served = [gate.worker(f"sampler-{session_id}", index)[1].requests for index in (0, 1)]
        assert [[r.version.run_id[-1] for r in requests] for requests in served] == [["1"], ["3"]]


def test_all_parameters_and_base_models_are_served_by_an_engine_that_is_there(gate):
    with gate.service() as service:
        lora = service.create_lora_training_client("tiny", rank=4).result()
        session_id = session_of(lora)
        lora.save_weights_and_get_sampling_client().result()
        full = service.create_lora_training_client("tiny:full").result()
        full.save_weights_and_get_sampling_client().result().sample(PROMPT, 1, PARAMS).result()
        base = service.create_sampling_client(base_model="tiny").result()
        base.sample(PROMPT, 1, PARAMS).result()
        assert engines(gate, session_id) == [8]
        _, sampler = gate.worker(f"sampler-{session_id}")
        assert [r.version.adapter for r in sampler.requests] == [False, False]
    with gate.service() as service:
        full = service.create_lora_training_client("tiny:full").result()
        lora = service.create_lora_training_client("tiny", rank=4).result()
        for training in (full, lora):
            training.save_weights_and_get_sampling_client().result()
        assert engines(gate, session_of(full)) == [0, 8]


def test_versions_of_a_lora_run_are_adapters_and_older_ones_stay_servable(gate):
    with gate.service() as service:
        training = service.create_lora_training_client("tiny", rank=4).result()
        snapshots = []
        for _ in range(3):
            training.optim_step(types.AdamParams()).result()
            snapshots.append(training.save_weights_and_get_sampling_client().result())
        _, sampler = gate.worker(f"sampler-{session_of(training)}")
        for client in (snapshots[0], snapshots[2], snapshots[1]):
            client.sample(PROMPT, 1, PARAMS).result()
        assert all(r.version.adapter for r in sampler.requests)
        assert [r.version.step for r in sampler.requests] == [1, 3, 2]
        found = gate.gateway.samplers.get(
            session_id=session_of(training), model_name="tiny", rank=4
        )
        assert found.engine.loaded == {"base/tiny", *sampler.loaded}
        with gate.http() as http:
            status = http.get("/api/tandem/v1/status").json()["samplers"]
        mine = next(s for s in status if s["session_id"] == session_of(training))
        assert mine["weight_version"] == "base/tiny"
        assert (mine["adapters"], mine["max_lora_rank"]) == (sorted(sampler.loaded), 8)


def test_a_named_adapter_is_served_in_another_session_and_after_a_restart(tmp_path):
    with running_gateway(tmp_path, session_ttl=600) as gate:
        with gate.service() as service:
            training = service.create_lora_training_client("tiny", rank=24).result()
            path = training.save_weights_for_sampler("best").result().path
        with gate.http() as client:
            session_id = gate.session_id()
            body = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
            created = client.post("/api/v1/create_sampling_session", json=body)
            sampler_id = created.json()["sampling_session_id"]
            gate.start_engines(session_id)
            assert engines(gate, session_id) == [32]
    with running_gateway(tmp_path, session_ttl=600) as gate, gate.http() as client:
        body = {
            "sampling_session_id": sampler_id,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {},
        }
        answer = client.post("/api/v1/asample", json=body)
        gate.retrieve(answer.json()["request_id"])
        assert engines(gate, session_id) == [32]
        request = gate.worker("sampler")[1].requests[0]
        assert (request.version.adapter, request.version.run_id) == (True, training.model_id)


def test_an_older_inflight_save_that_is_ready_last_does_not_win(gate):
    with gate.service() as service:
        training = service.create_lora_training_client("tiny", rank=4).result()
        first = training.save_weights_and_get_sampling_client(kind="inflight").result()
        _, sampler = gate.worker(f"sampler-{session_of(training)}")
        event = gate.run(asyncio.Event)
        sampler.slow_loads[2] = event
        slow = training.save_weights_and_get_sampling_client(kind="inflight")
        training.optim_step(types.AdamParams()).result()
        newer = training.save_weights_and_get_sampling_client(kind="inflight").result()
        gate.run(event.set)
        for client in (first, slow.result(), newer):
            client.sample(PROMPT, 1, PARAMS).result()
            assert sampler.requests[-1].version.step == 1


def test_an_unknown_run_has_no_info(gate):
    with gate.http() as client:
        answer = client.post("/api/v1/get_info", json={"model_id": "s-1:train:0"})
    assert (answer.status_code, answer.json()["type"]) == (404, "unknown_run")


@pytest.mark.parametrize("kind", ["bloom", "falcon", "gpt2", "gptj"])
def test_layers_whose_adapters_no_sampler_serves_are_refused_at_once(gate, tmp_path, kind):
    folder = make_model(tmp_path / kind)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    gate.run(gate.gateway.models.add(name=kind, path=str(folder)))
    with gate.http() as client:
        answers = [
            create(client, gate.session_id(), base_model=kind, lora_config={"rank": 8, **layers})
            for layers in ({}, {"train_mlp": False}, {"train_attn": False, "train_mlp": False})
        ]
        full = create(client, gate.session_id(), base_model=f"{kind}:full")
    assert [answer.status_code for answer in answers] == [400, 400, 200]
    assert {answer.json()["type"] for answer in answers[:2]} == {"unsuitable_lora"}
    assert "Pass train_attn=False and train_mlp=False, or train all" in answers[0].json()["error"]
    assert "Pass train_attn=False, or train all" in answers[1].json()["error"]
    assert full.status_code == 200
