"""The sampler as it is: a process with vLLM in it, against plain transformers forwards.

One process with tied embeddings (qwen3) serves nearly all tests, a second one has an output
head of its own (llama). Each test begins and ends with the base weights or names its version.
"""

from __future__ import annotations

import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from tandem.v1 import sampler_pb2
from tandem.worker import SECRET_METADATA_KEY
from tests.sampler_worker import (
    CALL_SECONDS,
    SECRET,
    Sampled,
    SamplerClient,
    decoded,
    plain_logprobs,
    publish,
    rewrite_manifest,
    sampler_process,
)
from tests.tiny import VOCABULARY, write_tiny_model

LENGTH = 512
EOS = 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sampler")


@pytest.fixture(scope="module")
def model(directory: Path) -> Path:
    return write_tiny_model(directory / "tied", head_dim=32, max_length=LENGTH)


@pytest.fixture(scope="module")
def changed(directory: Path) -> Path:
    """The same architecture with other weights."""
    return write_tiny_model(directory / "changed", seed=1, head_dim=32, max_length=LENGTH)


@pytest.fixture(scope="module")
def sampler(model: Path) -> Iterator[SamplerClient]:
    with sampler_process(model) as client:
        yield client


@pytest.fixture(scope="module")
def untied(directory: Path) -> Iterator[SamplerClient]:
    path = write_tiny_model(
        directory / "untied", architecture="llama", head_dim=32, max_length=LENGTH
    )
    with sampler_process(path) as client:
        yield client


@pytest.fixture(scope="module")
def untied_changed(directory: Path) -> Path:
    return write_tiny_model(
        directory / "untied changed", architecture="llama", seed=1, head_dim=32, max_length=LENGTH
    )


PROMPT = [5, 9, 30, 41]


def assert_logprobs_are_those_of(weights: Path, prompt: list[int], answer: Sampled) -> None:
    for sample in answer.samples:
        expected = plain_logprobs(weights, prompt + sample.tokens)[len(prompt) - 1 :]
        assert np.abs(expected - sample.logprobs).max() < 1e-4


def tokens_of(answer: Sampled) -> list[list[int]]:
    return [sample.tokens for sample in answer.samples]


def same(one: Sampled, other: Sampled) -> bool:
    """Bit by bit: tokens, logprobs, prompt logprobs, top-k."""
    pairs = zip(one.message.sequences, other.message.sequences, strict=True)
    return all(a == b for a, b in pairs) and (
        one.message.prompt_logprobs == other.message.prompt_logprobs
    )


# --- What is computed ----------------------------------------------------------------------


def test_sampled_logprobs_equal_a_plain_forward(sampler: SamplerClient, model: Path):
    answer = sampler.sample(PROMPT, n=3, max_tokens=30, seed=1, stop=[])
    assert answer.version == "base/tiny"
    assert [len(tokens) for tokens in tokens_of(answer)] == [30, 30, 30]
    assert_logprobs_are_those_of(model, PROMPT, answer)


def test_sampled_logprobs_equal_a_plain_forward_without_tied_embeddings(
    untied: SamplerClient, directory: Path
):
    answer = untied.sample(PROMPT, n=2, max_tokens=30, seed=1, stop=[])
    assert_logprobs_are_those_of(directory / "untied", PROMPT, answer)


def test_sampled_logprobs_are_those_of_the_scaled_distribution(sampler: SamplerClient, model: Path):
    answer = sampler.sample(PROMPT, temperature=0.5, max_tokens=20, seed=1, stop=[])
    (sample,) = answer.samples
    expected = plain_logprobs(model, PROMPT + sample.tokens, temperature=0.5)
    assert np.abs(expected[len(PROMPT) - 1 :] - sample.logprobs).max() < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_prompt_logprobs_are_at_temperature_one_whatever_was_asked(
    sampler: SamplerClient, model: Path, temperature: float
):
    prompt = [(7 * i) % 90 + 3 for i in range(70)]
    answer = sampler.sample(
        prompt, temperature=temperature, max_tokens=1, prompt_logprobs=True, top_k=2
    )
    found = answer.prompt_logprobs
    assert found is not None and len(found) == len(prompt)
    assert np.isnan(found[0])
    assert np.abs(found[1:] - plain_logprobs(model, prompt)).max() < 1e-4


def test_prompt_logprobs_do_not_depend_on_the_prefix_cache(sampler: SamplerClient):
    prompt = [(5 * i) % 90 + 3 for i in range(100)]
    first = sampler.sample(prompt, max_tokens=1, seed=1)
    warm = sampler.sample(prompt, max_tokens=1, seed=1)
    assert warm.message.prompt_cache_hit_tokens > 0
    assert same(first, warm)
    scored = [sampler.sample(prompt, max_tokens=1, prompt_logprobs=True) for _ in range(2)]
    assert scored[0].message.prompt_logprobs == scored[1].message.prompt_logprobs


def test_greedy_takes_the_likeliest_token_with_its_logprob_at_temperature_one(
    sampler: SamplerClient, model: Path
):
    answer = sampler.sample(PROMPT, n=2, temperature=0.0, max_tokens=12, stop=[], topk=1)
    first, second = answer.samples
    assert first.tokens == second.tokens
    assert first.topk is not None
    assert np.frombuffer(first.topk.token_ids, "<i4").tolist() == first.tokens
    assert_logprobs_are_those_of(model, PROMPT, answer)


def test_topk_lists_the_likeliest_and_leaves_cells_of_excluded_tokens_empty(
    sampler: SamplerClient,
):
    answer = sampler.sample(PROMPT, top_k=2, topk=3, max_tokens=5, seed=1, stop=[], prompt_topk=4)
    topk = answer.samples[0].topk
    assert topk is not None
    assert (topk.length, topk.k) == (5, 3)
    ids = np.frombuffer(topk.token_ids, "<i4").reshape(5, 3)
    logprobs = np.frombuffer(topk.logprobs, "<f4").reshape(5, 3)
    assert (logprobs[:, 0] >= logprobs[:, 1]).all()
    assert (ids[:, 2] == 0).all() and (logprobs[:, 2] == -99999).all()
    assert np.allclose(np.exp(logprobs[:, :2]).sum(axis=1), 1, atol=1e-5)
    assert all(token in row for token, row in zip(answer.samples[0].tokens, ids, strict=True))
    prompt = answer.message.topk_prompt_logprobs
    assert (prompt.length, prompt.k) == (len(PROMPT), 4)
    assert (np.frombuffer(prompt.logprobs, "<f4")[:4] == -99999).all()
    assert answer.prompt_logprobs is None


# --- Seeds and batching --------------------------------------------------------------------


def test_the_same_seed_gives_the_same_samples_and_others_give_others(sampler: SamplerClient):
    first, again, other = sampler.sample_all(
        [sampler.request(PROMPT, n=4, seed=seed, max_tokens=16, stop=[]) for seed in (3, 3, 4)]
    )
    assert same(first, again)
    assert len({tuple(tokens) for tokens in tokens_of(first) + tokens_of(other)}) == 8


def test_a_sample_depends_on_seed_and_index_alone_not_on_how_many_there_are(
    sampler: SamplerClient,
):
    few = sampler.sample(PROMPT, n=2, seed=11, max_tokens=16, stop=[])
    many = sampler.sample(PROMPT, n=6, seed=11, max_tokens=16, stop=[])
    assert tokens_of(many)[:2] == tokens_of(few)


def test_without_a_seed_samples_differ(sampler: SamplerClient):
    answers = [sampler.sample(PROMPT, n=2, max_tokens=16, stop=[]) for _ in range(2)]
    assert len({tuple(tokens) for answer in answers for tokens in tokens_of(answer)}) == 4


def test_answers_do_not_depend_on_how_requests_are_batched(sampler: SamplerClient):
    rng = random.Random(0)

    def request(seed: int) -> sampler_pb2.SampleRequest:
        choose = random.Random(seed)
        return sampler.request(
            [choose.randrange(3, VOCABULARY) for _ in range(choose.choice([1, 2, 5, 31, 33, 100]))],
            n=choose.choice([1, 2, 3]),
            seed=seed,
            max_tokens=choose.choice([1, 2, 7, 20, 40]),
            temperature=choose.choice([1.0, 1.0, 0.7, 0.0]),
            top_k=choose.choice([-1, -1, 5]),
            top_p=choose.choice([1.0, 1.0, 0.9]),
            topk=choose.choice([0, 0, 3]),
            prompt_logprobs=choose.random() < 0.3,
        )

    seeds = list(range(40))
    together = dict(zip(seeds, sampler.sample_all([request(s) for s in seeds]), strict=True))
    for _ in range(3):
        rng.shuffle(seeds)
        left = seeds[:]
        while left:
            size = rng.choice([1, 1, 2, 3, 8])
            group, left = left[:size], left[size:]
            answers = sampler.sample_all([request(s) for s in group])
            for seed, answer in zip(group, answers, strict=True):
                assert same(together[seed], answer), seed


def test_more_seeded_prompt_tokens_than_one_step_holds_are_answered(sampler: SamplerClient):
    requests = [
        sampler.request([(i * j) % 90 + 3 for j in range(500)], seed=i, max_tokens=2)
        for i in range(20)
    ]
    assert len(sampler.sample_all(requests)) == 20


# --- Stops -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_sample(sampler: SamplerClient) -> list[int]:
    """What seed 5 gives when nothing stops it."""
    return sampler.sample(PROMPT, seed=5, max_tokens=60, stop=[]).samples[0].tokens


def text(token: int) -> str:
    """The character of a token of the tiny tokenizer."""
    import string

    return (string.digits + string.ascii_letters + string.punctuation + " ")[token - 3]


def test_a_stop_token_ends_the_sample_and_is_part_of_it(
    sampler: SamplerClient, long_sample: list[int]
):
    stop = long_sample[7]
    (sample,) = sampler.sample(PROMPT, seed=5, max_tokens=60, stop=[stop]).samples
    assert sample.stopped
    assert sample.tokens == long_sample[: long_sample.index(stop) + 1]
    assert len(sample.logprobs) == len(sample.tokens)


def test_a_stop_string_ends_the_sample_with_the_token_that_completes_it(
    sampler: SamplerClient, long_sample: list[int]
):
    at = next(i for i in range(5, 58) if min(long_sample[i : i + 2]) > 2)
    stop = text(long_sample[at]) + text(long_sample[at + 1])
    (sample,) = sampler.sample(PROMPT, seed=5, max_tokens=60, stop=[stop, "never this"]).samples
    assert sample.stopped
    assert sample.tokens == long_sample[: len(sample.tokens)]
    assert "".join(map(text, sample.tokens[-2:])) == stop
    assert len(sample.logprobs) == len(sample.tokens)


def test_an_empty_stop_list_samples_on_behind_the_end_token(sampler: SamplerClient):
    requests = [
        sampler.request(PROMPT, n=32, seed=9, max_tokens=60, stop=stop) for stop in (None, [])
    ]
    stopping, running_on = sampler.sample_all(requests)
    ended = [tokens for tokens in tokens_of(running_on) if EOS in tokens[:-1]]
    assert ended, "no sample had an end token: the test proves nothing"
    assert all(len(sample.tokens) == 60 and not sample.stopped for sample in running_on.samples)
    for sample, whole in zip(stopping.samples, tokens_of(running_on), strict=True):
        cut = whole.index(EOS) + 1 if EOS in whole else 60
        assert sample.tokens == whole[:cut]
        assert sample.stopped == (EOS in whole)


def test_without_max_tokens_the_models_length_ends_the_sample(sampler: SamplerClient):
    (sample,) = sampler.sample(PROMPT, max_tokens=None, stop=[]).samples
    assert (len(PROMPT) + len(sample.tokens), sample.stopped) == (LENGTH, False)


# --- Mistakes --------------------------------------------------------------------------------


def test_a_mistake_is_answered_and_harms_nobody_else(sampler: SamplerClient):
    calls = [
        sampler.send(each)
        for each in [
            sampler.request(PROMPT, seed=1),
            sampler.request([VOCABULARY]),
            sampler.request([]),
            sampler.request([5] * LENGTH),
            sampler.request(PROMPT, seed=1),
        ]
    ]
    replies = [call.result() for call in calls]
    assert [reply.failure.type for reply in replies[1:4]] == [
        "token_out_of_vocabulary",
        "empty_batch",
        "sequence_too_long",
    ]
    assert same(decoded(replies[0]), decoded(replies[4]))


def test_a_call_without_the_secret_is_refused(sampler: SamplerClient):
    for metadata in ((), ((SECRET_METADATA_KEY, "wrong"),)):
        with pytest.raises(grpc.RpcError) as raised:
            sampler.stub.Sample(sampler.request(PROMPT), metadata=metadata, timeout=CALL_SECONDS)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_caller_that_goes_away_leaves_nothing_running(sampler: SamplerClient):
    call = sampler.send(sampler.request(PROMPT, n=500, max_tokens=500, stop=[]))
    while not sampler.describe().running:
        pass
    call.cancel()
    sampler.sample(PROMPT, max_tokens=1)
    while (described := sampler.describe()).running:
        pass
    assert (described.running, described.waiting) == (0, 0)


# --- Weight versions -------------------------------------------------------------------------


def assert_serves(client: SamplerClient, version, weights: Path) -> None:
    answer = client.sample(
        PROMPT, version=version, seed=2, max_tokens=20, stop=[], prompt_logprobs=True
    )
    assert answer.version == version.name
    assert_logprobs_are_those_of(weights, PROMPT, answer)
    assert answer.prompt_logprobs is not None
    assert np.abs(answer.prompt_logprobs[1:] - plain_logprobs(weights, PROMPT)).max() < 1e-4


def test_a_published_version_is_served_exactly_and_the_base_again_after_it(
    sampler: SamplerClient, model: Path, changed: Path, directory: Path
):
    version = publish(changed, directory, number=1)
    reply = sampler.load(version)
    assert not reply.HasField("failure"), reply.failure
    assert reply.canary_difference < 1e-4
    assert_serves(sampler, version, changed)
    assert_serves(sampler, sampler.base, model)


def test_a_published_version_is_served_exactly_without_tied_embeddings(
    untied: SamplerClient, untied_changed: Path, directory: Path
):
    version = publish(untied_changed, directory, number=2)
    assert_serves(untied, version, untied_changed)
    assert_serves(untied, untied.base, directory / "untied")


def test_requests_for_two_versions_at_once_are_each_answered_from_their_own(
    sampler: SamplerClient, model: Path, changed: Path, directory: Path
):
    version = publish(changed, directory, number=3)
    versions = [sampler.base, version] * 4
    answers = sampler.sample_all(
        [sampler.request(PROMPT, version=v, n=2, max_tokens=10, stop=[]) for v in versions]
    )
    for asked, answer in zip(versions, answers, strict=True):
        assert answer.version == asked.name
        assert_logprobs_are_those_of(model if asked is sampler.base else changed, PROMPT, answer)


def test_cached_prompts_of_the_old_version_are_not_used_with_the_new_one(
    sampler: SamplerClient, changed: Path, directory: Path
):
    prompt = [(11 * i) % 90 + 3 for i in range(96)]
    for _ in range(2):
        sampler.sample(prompt, max_tokens=1)
    version = publish(changed, directory, number=4)
    answer = sampler.sample(prompt, version=version, max_tokens=8, seed=1, stop=[])
    assert answer.message.prompt_cache_hit_tokens == 0
    assert_logprobs_are_those_of(changed, prompt, answer)


def _remove_a_tensor(version) -> None:
    from safetensors.torch import load_file, save_file

    file = sorted(Path(version.path).glob("*.safetensors"))[0]
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, file)
    rewrite_manifest(version)


def _damage_a_file(version) -> None:
    file = sorted(Path(version.path).glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def _remove_a_file(version) -> None:
    sorted(Path(version.path).glob("*.safetensors"))[0].unlink()


def _change_the_canary(version) -> None:
    from tandem.weights import Canary

    rewrite_manifest(version, canary=Canary(tokens=[5, 6, 7], logprobs=[-1.0, -1.0]))


def _remove_the_manifest(version) -> None:
    (Path(version.path) / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_remove_a_tensor, "lacks"),
        (_damage_a_file, "checksum"),
        (_remove_a_file, "lacks"),
        (_change_the_canary, "differ"),
        (_remove_the_manifest, "not a published weight version"),
    ],
)
def test_a_bad_version_is_refused_and_the_old_one_goes_on_serving(
    sampler: SamplerClient, model: Path, changed: Path, directory: Path, spoil, told: str
):
    assert_serves(sampler, sampler.base, model)
    version = publish(changed, directory, number=5)
    spoil(version)
    failure = sampler.refusal(sampler.request(PROMPT, version=version))
    assert failure.type == "load_failed"
    assert told in failure.message
    assert sampler.load(version).failure.type == "load_failed"
    assert sampler.describe().version.name == "base/tiny"
    assert_serves(sampler, sampler.base, model)


def test_twenty_loads_leave_memory_flat(
    sampler: SamplerClient, model: Path, changed: Path, directory: Path
):
    versions = [publish(w, directory, number=10 + i) for i, w in enumerate([changed, model])]
    for version in versions * 2:
        sampler.load(version)
    before = sampler.resident_bytes
    for version in versions * 10:
        assert not sampler.load(version).HasField("failure")
    assert sampler.resident_bytes - before < 8 * 2**20
    assert_serves(sampler, versions[1], model)


def test_metrics_count_what_was_done(sampler: SamplerClient):
    sampler.sample(PROMPT, max_tokens=3, stop=[])
    url = (
        f"http://{sampler.report.address.rpartition(':')[0]}:{sampler.report.metrics_port}/metrics"
    )
    text_ = urllib.request.urlopen(url, timeout=CALL_SECONDS).read().decode()
    for name in ("requests_total", "tokens_total", "load_seconds_count", "state", "waiting"):
        assert f"tandem_sampler_{name}" in text_


# --- The process ---------------------------------------------------------------------------


def test_a_directory_without_a_model_is_reported_and_ends_the_process(tmp_path: Path):
    with sampler_process(tmp_path, wait=False) as client:
        report = client.next_report()
        assert report.error_type == "worker_start_failed"
        assert "config.json" in report.error
        assert client.process.wait(timeout=30) == 1


def test_a_terminated_sampler_ends_before_it_is_ready_and_says_unavailable(model: Path):
    with sampler_process(model, wait=False) as client:
        with pytest.raises(grpc.RpcError) as raised:
            client.stub.Describe(
                sampler_pb2.DescribeSamplerRequest(),
                metadata=((SECRET_METADATA_KEY, SECRET),),
                timeout=CALL_SECONDS,
                wait_for_ready=True,
            )
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        client.process.terminate()
        assert client.process.wait(timeout=30) == 0


def test_an_older_fencing_token_is_refused(untied: SamplerClient):
    newer = untied.request(PROMPT)
    newer.fencing_token = 5
    decoded(untied.send(newer).result())
    with pytest.raises(grpc.RpcError) as raised:
        untied.send(untied.request(PROMPT)).result()
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
