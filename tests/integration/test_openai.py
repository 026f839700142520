"""The `openai` package: the SDK's numbers, structured forms, a model in training."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import tinker
from tinker import types

from tests.support.sdk import supervised
from tests.support.stacks import running, write_qwen

pytestmark = pytest.mark.slow

MODEL = "test/speaker"
PROMPT = "Once upon a time"
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}]
TEMPLATE = """\
{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}{% endfor %}
{% if add_generation_prompt %}[assistant] {% endif %}"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    folder = write_qwen(tmp_path_factory.mktemp("models") / "speaker", seed=5)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    data = tmp_path_factory.mktemp("data")
    with running(data, models={MODEL: folder}) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack):
    endpoint = stack.stack.endpoint
    with openai.OpenAI(
        base_url=f"{endpoint.url}/v1", api_key=endpoint.api_key, max_retries=0, timeout=300
    ) as client:
        yield client


@pytest.fixture(scope="module")
def service(stack):
    with stack.service() as service:
        yield service


@pytest.fixture(scope="module")
def training(service) -> tinker.TrainingClient:
    """A LoRA run, in a session with its own engine."""
    return service.create_lora_training_client(MODEL, rank=4).result(timeout=240)


@pytest.fixture(scope="module")
def sampling(service, training) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=MODEL).result(timeout=240)


def tokens_of(client, text: str) -> list[int]:
    answer = client.completions.create(
        model=MODEL, prompt=text, max_tokens=1, extra_body={"return_token_ids": True}
    )
    return answer.choices[0].prompt_token_ids


def test_tokens_and_logprobs_are_those_of_the_sdk(client, sampling):
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        n=3,
        max_tokens=20,
        seed=11,
        logprobs=2,
        extra_body={"return_token_ids": True},
    )
    tokens = tokens_of(client, PROMPT)
    expected = sampling.sample(
        types.ModelInput.from_ints(tokens), 3, types.SamplingParams(max_tokens=20, seed=11)
    ).result(timeout=240)
    assert [c.token_ids for c in answer.choices] == [s.tokens for s in expected.sequences]
    for choice, sequence in zip(answer.choices, expected.sequences, strict=True):
        found = choice.logprobs.token_logprobs
        assert np.allclose(found, sequence.logprobs, atol=1e-4)
        assert choice.finish_reason == sequence.stop_reason
        for best, logprob in zip(choice.logprobs.top_logprobs, found, strict=True):
            assert max(best.values()) >= logprob - 1e-6
    assert answer.tandem_weight_version == f"base/{MODEL}"


def test_an_echo_scores_a_text_as_the_sdk_does(client, sampling):
    choice = client.completions.create(
        model=MODEL, prompt=PROMPT, echo=True, max_tokens=0, logprobs=0
    ).choices[0]
    tokens = types.ModelInput.from_ints(tokens_of(client, PROMPT))
    expected = sampling.compute_logprobs(tokens).result(timeout=240)
    assert choice.text == PROMPT
    assert choice.logprobs.token_logprobs[0] is None
    assert np.allclose(choice.logprobs.token_logprobs[1:], expected[1:], atol=1e-4)


def test_a_streamed_completion_is_the_one_that_is_not_streamed(client):
    more = {
        "model": MODEL,
        "prompt": PROMPT,
        "n": 2,
        "seed": 3,
        "max_tokens": 40,
        "logprobs": 1,
        "extra_body": {"return_token_ids": True},
    }
    whole = client.completions.create(**more)
    parts = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **more)
    )
    assert len(parts) > 20
    for expected in whole.choices:
        mine = [c for part in parts for c in part.choices if c.index == expected.index]
        assert "".join(c.text for c in mine) == expected.text
        assert [t for c in mine for t in c.token_ids] == expected.token_ids
        told = [v for c in mine if c.logprobs for v in c.logprobs.token_logprobs]
        assert np.allclose(told, expected.logprobs.token_logprobs, atol=1e-5)
        assert mine[-1].finish_reason == expected.finish_reason
    # Cached tokens may differ, because the first request filled the cache.
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert parts[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_streamed_chat_is_the_one_that_is_not_streamed(client):
    more = {"model": MODEL, "messages": CHAT, "seed": 3, "max_completion_tokens": 30}
    whole = client.chat.completions.create(**more)
    parts = list(client.chat.completions.create(stream=True, **more))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    rendered = "[system] Be kind.<eos>[user] Hello?<eos>[assistant] "
    special = 2 * (len("<eos>") - 1)  # one token for each character, and one for each of these
    assert whole.usage.prompt_tokens == len(rendered) - special


@pytest.mark.nightly
def test_an_in_flight_answer_goes_on_with_a_later_save_and_names_both_versions(client, training):
    """Each attempt asks for twice as many answers, until a save finds some unfinished."""

    def ask(**more):
        body = {"in_flight": True, "return_token_ids": True, "ignore_eos": True}
        return client.completions.create(
            model=training.model_id, prompt=PROMPT, extra_body=body, **more
        )

    training.save_weights_for_sampler("in-flight-0").result(timeout=240)
    for attempt in range(1, 6):
        before = ask(max_tokens=1).tandem_weight_version
        with ThreadPoolExecutor(2**attempt) as pool:
            asked = [pool.submit(ask, n=48, max_tokens=200) for _ in range(2**attempt)]
            data = [supervised([5, 6, 7, 8, 9 + attempt])]
            training.forward_backward(data, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-3))
            training.save_weights_for_sampler(f"in-flight-{attempt}").result(timeout=240)
            after = ask(max_tokens=1).tandem_weight_version
            answers = [each.result(timeout=240) for each in asked]
        choices = [choice for answer in answers for choice in answer.choices]
        for choice in choices:
            told = [run["tokens"] for run in choice.tandem_versions]
            assert sum(told) == len(choice.token_ids) == 200
        carried = [each for each in choices if len(each.tandem_versions) > 1]
        if carried:
            break
    for choice in carried:
        assert [run["version"] for run in choice.tandem_versions] == [before, after]
    assert carried, "each save came after all answers"
    assert {answer.tandem_weight_version for answer in answers} <= {before, after}


def test_a_request_after_a_save_is_answered_with_the_new_weights(client, training):
    run = training.model_id
    first = training.save_weights_for_sampler("first").result(timeout=240).path
    more = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 0}
    before = client.completions.create(model=run, **more)
    assert before.tandem_weight_version.startswith(f"{run}/v")
    assert client.completions.create(model=first, **more).choices == before.choices

    tokens = tokens_of(client, PROMPT + "!!!!!!!!!!!!")
    for _ in range(6):
        training.forward_backward([supervised(tokens)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.02)).result(timeout=240)
    trained = training.save_weights_and_get_sampling_client().result(timeout=240)

    after = client.completions.create(model=run, **more)
    assert after.tandem_weight_version > before.tandem_weight_version
    assert after.choices[0].logprobs != before.choices[0].logprobs
    prompt = types.ModelInput.from_ints(tokens_of(client, PROMPT))
    expected = trained.sample(prompt, 1, types.SamplingParams(max_tokens=12, temperature=0)).result(
        timeout=240
    )
    found = after.choices[0].logprobs.token_logprobs
    assert np.allclose(found, expected.sequences[0].logprobs, atol=1e-4)
    # A named version does not change.
    again = client.completions.create(model=first, **more)
    assert again.choices[0].text == before.choices[0].text
    assert again.tandem_weight_version == before.tandem_weight_version
