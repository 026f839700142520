"""A run's name, tags and configuration in its `user_metadata`."""

from __future__ import annotations

import json

import pytest

from gateway.runs.record.identity import RunIdentity, identity_of, metadata_of
from tandem.errors import InvalidRequest


def test_the_documented_keys_are_the_identity_and_the_others_are_kept():
    given = {"name": "GRPO <b>😀</b>", "tags": "a, b,,a", "config": '{"lr": 1e-4}', "a": "b"}
    identity, others = identity_of(given)
    assert identity == RunIdentity("GRPO <b>😀</b>", ["a", "b"], {"lr": 1e-4})
    assert others == {"a": "b"}


def test_tags_may_be_a_json_list():
    identity, _ = identity_of({"tags": '["a, b", "c"]'})
    assert identity.tags == ["a, b", "c"]


def test_a_run_without_the_keys_has_no_identity():
    assert identity_of(None) == (RunIdentity(), None)


@pytest.mark.parametrize("text", ["configs/a.yaml", "[1]", "3", "", '{"a":', "[" * 50_000])
def test_a_config_that_is_no_json_object_stays_with_the_other_keys(text):
    assert identity_of({"config": text}) == (RunIdentity(), {"config": text})


def test_numbers_that_are_not_finite_become_text():
    identity, _ = identity_of({"config": '{"a": NaN, "b": -Infinity, "c": 1e999}'})
    assert identity.config == {"a": "NaN", "b": "-Infinity", "c": "1e999"}


def test_a_client_gets_its_user_metadata_back():
    given = {"name": "one", "tags": '["a, b"]', "config": '{"x": [1, "ä"]}', "other": "key"}
    assert metadata_of(*identity_of(given)) == given
    assert metadata_of(*identity_of({"tags": "a,b"})) == {"tags": "a,b"}
    assert metadata_of(*identity_of(None)) is None


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"name": "x" * 201}, "name has 201 characters, 200 fit"),
        ({"tags": ",".join(map(str, range(51)))}, "51 tags, 50 at most"),
        ({"tags": "x" * 201}, "tag has 201 characters"),
        ({"config": json.dumps({"x": "y" * 2**16})}, "65545 bytes as JSON, 65536 at most"),
        ({"config": "y" * (2**16 + 1)}, "65537 bytes as JSON"),
    ],
)
def test_an_identity_beyond_the_limits_is_refused(given, fault):
    with pytest.raises(InvalidRequest, match=fault):
        identity_of(given)
