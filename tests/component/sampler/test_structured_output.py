"""Structured output of a real engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tandem.v1 import sampler_pb2
from tests.support.adapter_files import write_adapter_files, write_merged
from tests.support.sampler_streams import stream
from tests.support.sampler_worker import (
    CHARACTERS,
    EOS,
    PROMPT,
    SamplerClient,
    plain_distribution,
    publish_adapter,
    same,
    text,
    tokens_of,
)

Structured = sampler_pb2.StructuredOutput


def choice(*choices: str) -> sampler_pb2.StructuredOutput:
    return Structured(choice=Structured.Choices(choices=choices))


def schema(value: object) -> sampler_pb2.StructuredOutput:
    return Structured(json_schema=json.dumps(value))


def test_samples_match_a_regex_and_end_with_the_end_token(sampler: SamplerClient):
    answer = sampler.sample(
        PROMPT, n=16, seed=1, max_tokens=30, structured=Structured(regex="[a-c]{2,4}-[0-9]")
    )
    for sample in answer.samples:
        assert re.fullmatch("[a-c]{2,4}-[0-9]", text(sample.tokens))
        assert sample.stopped
        assert sample.tokens[-1] == EOS
    assert len({text(tokens) for tokens in tokens_of(answer)}) > 3


def test_samples_are_one_of_the_choices(sampler: SamplerClient):
    choices = ["yes", "no", "it.depends(a|b)*", "yes,indeed"]
    answer = sampler.sample(PROMPT, n=32, seed=2, max_tokens=30, structured=choice(*choices))
    said = {text(tokens) for tokens in tokens_of(answer)}
    assert said <= set(choices)
    assert len(said) > 1


def test_samples_follow_a_lark_grammar(sampler: SamplerClient):
    lark = 'start: "(" start ")" | item ("," item)*\nitem: /[a-c]{1,3}/'
    answer = sampler.sample(PROMPT, n=32, seed=9, max_tokens=40, structured=Structured(lark=lark))
    for sample in answer.samples:
        said = text(sample.tokens)
        if sample.stopped:
            opened = len(said) - len(said.lstrip("("))
            inner = said[opened : len(said) - opened]
            assert said == "(" * opened + inner + ")" * opened
            assert re.fullmatch("[a-c]{1,3}(,[a-c]{1,3})*", inner)
    assert sum(sample.stopped for sample in answer.samples) > 3


def test_samples_are_objects_of_a_schema(sampler: SamplerClient):
    grammar = schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 4},
                "kind": {"enum": ["cat", "dog"]},
                "age": {"type": "integer", "minimum": 1, "maximum": 30},
            },
            "required": ["name", "kind", "age"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    )
    answer = sampler.sample(PROMPT, n=8, seed=3, max_tokens=120, structured=grammar)
    for sample in answer.samples:
        assert sample.stopped
        value = json.loads(text(sample.tokens))
        assert set(value) == {"name", "kind", "age"}
        assert len(value["name"]) <= 4
        assert value["kind"] in ("cat", "dog")
        assert 1 <= value["age"] <= 30


def test_json_object_gives_an_object(sampler: SamplerClient):
    answer = sampler.sample(
        PROMPT, n=16, seed=4, max_tokens=200, structured=Structured(json_object=True)
    )
    ended = [text(sample.tokens) for sample in answer.samples if sample.stopped]
    assert ended
    assert all(isinstance(json.loads(each), dict) for each in ended)
    assert all(text(sample.tokens).lstrip().startswith("{") for sample in answer.samples)


def test_max_tokens_cuts_structured_output_off(sampler: SamplerClient):
    (sample,) = sampler.sample(
        PROMPT, seed=1, max_tokens=5, structured=Structured(regex="[a-c]{9}")
    ).samples
    assert (len(sample.tokens), sample.stopped) == (5, False)
    assert re.fullmatch("[a-c]{5}", text(sample.tokens))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_logprobs_are_those_among_the_allowed_tokens(
    sampler: SamplerClient, model: Path, temperature: float
):
    allowed = [3 + CHARACTERS.index(c) for c in "abc"]
    (sample,) = sampler.sample(
        PROMPT,
        seed=5,
        max_tokens=9,
        temperature=temperature,
        structured=Structured(regex="[a-c]{4}"),
        topk=5,
    ).samples
    assert len(sample.tokens) == 5
    assert sample.logprobs[-1] == 0, "nothing but the end was left"
    plain = plain_distribution(model, PROMPT + sample.tokens)[len(PROMPT) - 1 :]
    for position in range(4):
        logits = plain[position, allowed] / (temperature or 1)
        expected = logits - np.log(np.exp(logits).sum())
        at = allowed.index(sample.tokens[position])
        assert abs(sample.logprobs[position] - expected[at]) < 1e-4
        if temperature == 0:
            assert at == expected.argmax()
    assert sample.topk is not None
    ids = np.frombuffer(sample.topk.token_ids, "<i4").reshape(5, 5)
    values = np.frombuffer(sample.topk.logprobs, "<f4").reshape(5, 5)
    assert set(ids[0, :3]) == set(allowed)
    assert (values[0, 3:] == -99999).all()


def test_a_seed_gives_the_same_in_any_batch_and_streamed(sampler: SamplerClient):
    grammars = [
        Structured(regex="[a-z]{5,9}"),
        choice("left", "right"),
        None,
        schema({"type": "boolean"}),
    ]
    requests = [
        sampler.request(PROMPT, n=3, seed=number, max_tokens=20, structured=grammar)
        for number, grammar in enumerate(grammars)
    ]
    together = sampler.sample_all(requests)
    for number, (grammar, answer) in enumerate(zip(grammars, together, strict=True)):
        arguments = {"n": 3, "seed": number, "max_tokens": 20, "structured": grammar}
        assert same(answer, sampler.sample(PROMPT, **arguments))
        streamed = stream(sampler, PROMPT, **arguments)
        assert streamed.adds_up()
        assert same(answer, streamed.answer)
    assert all(text(t) in ("left", "right") for t in tokens_of(together[1]))
    assert all(text(t) in ("true", "false") for t in tokens_of(together[3]))
    assert any(text(t) not in ("true", "false") for t in tokens_of(together[2]))


def test_more_samples_than_one_thread_masks_all_match(sampler: SamplerClient):
    answer = sampler.sample(
        PROMPT, n=300, seed=6, max_tokens=20, structured=Structured(regex="[xy]{3}z?")
    )
    assert all(re.fullmatch("[xy]{3}z?", text(tokens)) for tokens in tokens_of(answer))


def test_adapters_and_the_base_model_follow_grammars_side_by_side(
    tied_adapters: SamplerClient, model: Path, directory: Path
):
    files = write_adapter_files(directory / "grammar adapter", model, seed=10)
    merged = write_merged(directory / "grammar merged", model, files)
    adapter = publish_adapter(files, directory, number=73, merged=merged)
    grammar = Structured(regex="[a-z]{8}")
    of_adapter, of_base = tied_adapters.sample_all(
        [
            tied_adapters.request(PROMPT, version=v, n=4, seed=1, max_tokens=20, structured=grammar)
            for v in (adapter, tied_adapters.base)
        ]
    )
    for answer in (of_adapter, of_base):
        assert all(re.fullmatch("[a-z]{8}", text(tokens)) for tokens in tokens_of(answer))
    assert tokens_of(of_adapter) != tokens_of(of_base)


@pytest.mark.parametrize("stop", [[], [10], ["zz"]])
def test_a_complete_grammar_ends_the_sample_whatever_stops_are_given(
    sampler: SamplerClient, stop: list[int] | list[str]
):
    answer = sampler.sample(
        PROMPT, n=8, seed=7, max_tokens=30, stop=stop, structured=choice("ab", "cd")
    )
    for sample in answer.samples:
        assert sample.stopped
        assert text(sample.tokens)[:2] in ("ab", "cd")
        assert len(sample.tokens) == 3


def test_a_stop_token_of_the_request_ends_only_a_complete_grammar(sampler: SamplerClient):
    stop = 3 + CHARACTERS.index("#")
    answer = sampler.sample(
        PROMPT, n=200, seed=8, max_tokens=9, stop=[stop], structured=choice("ab", "abcd")
    )
    said = {tuple(tokens) for tokens in tokens_of(answer)}
    assert {text(tokens) for tokens in said} <= {"ab", "abcd", "ab#", "abcd#"}
    assert {tokens[-1] for tokens in said} == {EOS, stop}
    assert all(sample.stopped for sample in answer.samples)


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        (Structured(regex="(unclosed"), "unclosed group"),
        (Structured(regex="a(?=b)"), "look-around"),
        (Structured(regex=r"(a)\1"), "backreferences"),
        (Structured(regex="((a{1000}){1000}){1000}"), "the regex is too large"),
        (Structured(regex="a" * 20_000), "at most 16384"),
        (Structured(regex="abé"), "the model has no tokens for"),
        (Structured(json_schema="{"), "the JSON schema"),
        (Structured(json_schema="[1]"), "the JSON schema"),
        (schema({"type": "objekt"}), "objekt"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}), "unique"),
        (schema({"$ref": "http://localhost/schema"}), "localhost"),
        (schema(False), "Unsatisfiable"),
        (Structured(json_schema=json.dumps({"description": "x" * 70_000})), "at most 65536"),
        (Structured(json_schema='{"items":' * 5000 + "true" + "}" * 5000), "recursion"),
        (Structured(lark="start: missing"), "unknown name"),
        (Structured(lark="start: %json {}"), "%json"),
        (Structured(lark='start: "abé"'), "the model has no tokens for"),
        (choice(), "0 choices"),
        (choice(*(str(n) for n in range(1025))), "1025 choices"),
        (Structured(json_object=False), "json_object is false"),
    ],
)
def test_a_bad_grammar_is_refused_and_affects_no_other_request(
    sampler: SamplerClient, structured: sampler_pb2.StructuredOutput, reason: str
):
    calls = [
        sampler.send(sampler.request(PROMPT, seed=1, structured=each))
        for each in (None, structured, None)
    ]
    before, bad, after = (call.result() for call in calls)
    assert bad.failure.type == "structured_output_invalid"
    assert reason in bad.failure.message
    assert before.response == after.response


def test_a_grammar_that_the_tokens_cannot_follow_to_its_end_fails_alone(sampler: SamplerClient):
    grammars = (Structured(regex="abc"), Structured(regex="[a-z]{9}é"), Structured(regex="abd"))
    calls = [
        sampler.send(sampler.request(PROMPT, n=5, seed=1, structured=grammar, max_tokens=20))
        for grammar in grammars
    ]
    good, bad, other = (call.result() for call in calls)
    assert bad.failure.type == "structured_output_invalid"
    assert "could not be followed to its end" in bad.failure.message
    assert good.response
    assert other.response
    assert sampler.describe().running == 0
