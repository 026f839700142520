"""A researcher's loop: real SDK, real gateway, fake workers."""

from __future__ import annotations

from tinker import types

from tests.support.sdk import supervised


def test_the_sdk_trains_publishes_and_samples(gate):
    with gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        assert training.get_info().model_data.model_name == "tiny"
        backward = training.forward_backward([supervised([1, 2, 3, 9])], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.1))
        assert backward.result().metrics["loss:sum"] == 1.0
        assert step.result().metrics == {"grad_norm": 1.5}
        sampling = training.save_weights_and_get_sampling_client().result()
        answer = sampling.sample(
            types.ModelInput.from_ints([5, 6, 7]), 2, types.SamplingParams(max_tokens=3, seed=1)
        ).result()
        assert [list(s.tokens) for s in answer.sequences] == [[7, 6, 5], [7, 6, 5]]
        _, sampler = gate.worker("sampler")
        assert sampler.requests[-1].version.name == sampler.loaded[-1]
        assert sampler.requests[-1].version.step == 1
        session = training.model_id.partition(":")[0]
    stopped = [w for w in gate.launcher.stopped if session in w]
    assert {w.partition("-")[0] for w in stopped} == {"trainer", "sampler"}
