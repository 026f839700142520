from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tests.component.sampler.test_lora import published
from tests.support.adapter_files import ATTENTION
from tests.support.devices import DEVICES, GPU, settings_on
from tests.support.losses.batches import mixed_data
from tests.support.sampler_worker import PROMPT, plain_logprobs, sampler_process
from tests.support.tiny_model import write_tiny_model as write_uneven_model
from tests.support.trainer_worker import datum, logprobs_of, request, trainer_process

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")


@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_samples_from_an_adapter_with_the_trainer_s_logprobs(tmp_path, device):
    model = tmp_path / "model"
    write_tiny_model(model, seed=1, shape=TinyShape(head_dim=64))
    where = {"device": device, "devices": ("cuda:0",)} if device == "cuda" else {}
    room = {"gpu_memory_bytes": 4 * 2**30} if device == "cuda" else {}
    training = TrainingSpec(lora=LoraSpec(rank=8, seed=5))
    with (
        trainer_process(
            model, tmp_path, training=training, dtype="bfloat16", **settings_on(device)
        ) as trainer,
        sampler_process(
            model, dtype="bfloat16", max_lora_rank=8, max_num_seqs=16, **where, **room
        ) as engine,
    ):
        for _ in range(4):
            trainer.output(request(mixed_data()))
            assert not trainer.optim_step(lr=1e-2).HasField("failure")
        reply, _ = trainer.publish(tmp_path)
        assert reply.version.adapter, reply
        loaded = engine.load(reply.version)
        assert not loaded.HasField("failure"), loaded.failure

        def scored(version) -> tuple[np.ndarray, np.ndarray]:
            """Logprobs of one sample: the engine's, and the trainer's of the same tokens."""
            answer = engine.sample(PROMPT, version=version, n=4, seed=3, max_tokens=20, stop=[])
            whole = [[*PROMPT, *sample.tokens] for sample in answer.samples]
            data = [datum(tokens[:-1], targets=tokens[1:]) for tokens in whole]
            output = trainer.output(request(data, forward_only=True))
            ours = [one.reshape(-1)[len(PROMPT) - 1 :] for one in logprobs_of(output)]
            return np.concatenate([each.logprobs for each in answer.samples]), np.concatenate(ours)

        theirs, ours = scored(reply.version)
        gap = np.abs(theirs - ours).mean()
        base, learned = scored(engine.base)
        assert gap < np.abs(base - learned).mean() / 10, "the base model answers otherwise"


@pytest.mark.parametrize(
    ("device", "count"),
    [
        pytest.param("cpu", 6, marks=pytest.mark.nightly),
        pytest.param("cuda", 64, marks=[*GPU, pytest.mark.timeout(900)]),
    ],
)
def test_an_engine_computes_many_adapters_in_one_batch(tmp_path, device, count):
    """Each has the logprobs of its own merged weights, up to bfloat16's rounding."""
    model = write_uneven_model(tmp_path / "model", head_dim=64, max_length=512)
    where = {"device": device, "devices": ("cuda:0",)} if device == "cuda" else {}
    room = {"gpu_memory_bytes": 4 * 2**30} if device == "cuda" else {}
    adapters = [published(model, tmp_path, seed=n, modules=ATTENTION) for n in range(count)]
    with sampler_process(
        model,
        dtype="bfloat16",
        max_lora_rank=8,
        max_adapters=count,
        max_num_seqs=count,
        **where,
        **room,
    ) as engine:
        for each in adapters:
            reply = engine.load(each.version)
            assert not reply.HasField("failure"), reply.failure
        settings = {"max_tokens": 20, "seed": 3, "stop": []}
        answers = engine.sample_all(
            [engine.request(PROMPT, version=each.version, **settings) for each in adapters]
        )
        assert len(engine.describe().adapters) == count
    off, learned = [], []
    for each, answer in zip(adapters, answers, strict=True):
        assert answer.version == each.version.name
        (sample,) = answer.samples
        tokens = [*PROMPT, *sample.tokens]
        merged, base = (plain_logprobs(of, tokens)[-20:] for of in (each.merged, model))
        off.append(np.abs(sample.logprobs - merged).mean())
        learned.append(np.abs(merged - base).mean())
    assert max(off) < np.mean(learned) / 5, "an adapter answers with other weights"
