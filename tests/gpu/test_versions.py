from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch

from tandem.demo.tiny_model import TinyShape, write_tiny_model
from tests.support.losses.batches import mixed_data
from tests.support.sampler_in_flight import carried_over, scored_by_its_versions
from tests.support.sampler_worker import PROMPT, same, sampler_process
from tests.support.trainer_worker import request, trainer_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]


@pytest.mark.parametrize("model_runner", ["v1", "v2"])
def test_an_engine_serves_each_published_version_by_its_own_weights(tmp_path, model_runner):
    """Two versions: in turn, during an answer, and after a sleep that dropped the weights. The
    canary of each load compares the trainer's logprobs with the engine's."""
    model = tmp_path / "model"
    write_tiny_model(model, seed=1, shape=TinyShape(hidden=1024, heads=16, head_dim=64, ffn=4096))
    versions = []
    with trainer_process(
        model, tmp_path, lease=1, device="cuda", devices=["cuda:0"], threads=0
    ) as trainer:
        for number in (1, 2):
            trainer.output(request(mixed_data()))
            assert not trainer.optim_step(lr=1e-2).HasField("failure")
            reply, _ = trainer.publish(tmp_path, number)
            assert not reply.HasField("failure"), reply
            versions.append(reply.version)
    with sampler_process(
        model,
        lease=1,
        device="cuda",
        devices=("cuda:0",),
        gpu_memory_bytes=4 * 2**30,
        max_num_seqs=16,
        model_runner=model_runner,
    ) as engine:

        def sampled(version):
            answer = engine.sample(
                PROMPT, version=version, seed=3, max_tokens=20, stop=[], prompt_logprobs=True
            )
            assert answer.version == version.name
            return answer

        expected = [sampled(version) for version in versions]
        assert not same(*expected)
        for version, answer in zip(versions, expected, strict=True):
            loaded = engine.load(version)
            assert not loaded.HasField("failure"), loaded.failure
            assert same(sampled(version), answer)
        engine.load(versions[0])
        answer, _ = carried_over(engine, versions)
        assert scored_by_its_versions(engine, versions, answer) < 0.25
        engine.sleep(2)
        assert engine.wake(versions[0]).version.name == versions[0].name
        assert same(sampled(versions[0]), expected[0])


def test_an_engine_takes_the_weights_from_the_memory_of_a_trainer_on_its_device(tmp_path):
    """By CUDA IPC, with the bits of the files. Exchanged tensors are noticed. Releasing a version
    frees the trainer's memory, whether or not an engine opened it."""
    model = tmp_path / "model"
    write_tiny_model(model, seed=1, shape=TinyShape(hidden=1024, heads=16, head_dim=64, ffn=4096))
    with (
        trainer_process(
            model, tmp_path, lease=1, device="cuda", devices=["cuda:0"], threads=0
        ) as trainer,
        sampler_process(
            model,
            lease=1,
            device="cuda",
            devices=("cuda:0",),
            gpu_memory_bytes=4 * 2**30,
            max_num_seqs=16,
        ) as engine,
    ):

        def published(number: int):
            trainer.output(request(mixed_data()))
            assert not trainer.optim_step(lr=1e-2).HasField("failure")
            reply, _ = trainer.publish(tmp_path, number, handoff=True)
            assert reply.HasField("handoff") and reply.handoff.HasField("cuda"), reply
            return reply

        def sampled(version):
            return engine.sample(
                PROMPT, version=version, seed=3, max_tokens=20, stop=[], prompt_logprobs=True
            )

        def freed(version) -> int:
            before, _ = torch.cuda.mem_get_info()
            trainer.release(version)
            after, _ = torch.cuda.mem_get_info()
            return after - before

        first = published(1)
        loaded = engine.load(first.version, handoff=first.handoff)
        assert loaded.handed_off, loaded
        assert freed(first.version) >= first.handoff.bytes
        handed_over = sampled(first.version)

        second = published(2)
        exchanged = copy.deepcopy(second.handoff)
        of = {tensor.name: tensor for tensor in exchanged.tensors}
        one, other = (of[f"model.layers.{block}.mlp.down_proj.weight"] for block in (0, 1))
        one.offset, other.offset = other.offset, one.offset
        loaded = engine.load(second.version, handoff=exchanged)
        assert not loaded.handed_off and "other numbers" in loaded.handoff_failure, loaded
        assert freed(second.version) >= second.handoff.bytes

        unopened = published(3)
        assert freed(unopened.version) >= unopened.handoff.bytes
        assert same(sampled(first.version), handed_over), "from the files"

        trainer.output(request(mixed_data()))
        assert not trainer.optim_step(lr=1e-2).HasField("failure")
        early, _ = trainer.publish(tmp_path, 4, handoff=True, early=True)
        assert not early.durable, "its files are being written"
        loaded = engine.load(early.version, handoff=early.handoff)
        assert loaded.handed_off, loaded
        handed_over = sampled(early.version)
        assert trainer.await_published(early.version).durable
        assert freed(early.version) >= early.handoff.bytes
        sampled(first.version)
        assert same(sampled(early.version), handed_over), "from the files"
