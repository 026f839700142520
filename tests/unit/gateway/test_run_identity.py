"""A run's name, tags and configuration in its `user_metadata`."""

from __future__ import annotations

import json
import math

import pytest

from gateway.api.pages.texts import compact
from gateway.runs.record.identity import (
    RunIdentity,
    identity_changes,
    identity_of,
    metadata_of,
)
from tandem.errors import InvalidRequest
from tandem.tracking.names import flat


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


def nested(levels):
    return json.loads('{"x": ' * (levels - 1) + "{}" + "}" * (levels - 1))


UNREADABLE = [nested(65), nested(900), {"x": [2**64]}, {"x": -(2**63) - 1}]
NO_OBJECTS = ["configs/a.yaml", "[1]", "3", "", '{"a":', "[" * 50_000]


@pytest.mark.parametrize("text", [*NO_OBJECTS, *map(json.dumps, UNREADABLE)])
def test_a_config_that_is_no_json_object_stays_with_the_other_keys(text):
    assert identity_of({"config": text}) == (RunIdentity(), {"config": text})


def test_numbers_that_are_not_finite_become_text():
    identity, _ = identity_of({"config": '{"a": NaN, "b": -Infinity, "c": 1e999}'})
    assert identity.config == {"a": "NaN", "b": "-Infinity", "c": "1e999"}


def test_half_a_surrogate_pair_becomes_a_replacement_character():
    given = {"name": "a\udfff", "tags": r'["\ud800", "😀"]', "config": r'{"\ud800": ["\udc00"]}'}
    expected = RunIdentity("a\ufffd", ["\ufffd", "😀"], {"\ufffd": ["\ufffd"]})
    assert identity_of(given) == (expected, None)
    changed = {"name": "a\udfff", "tags": ["\ud800", "😀"], "config": {"\ud800": ["\udc00"]}}
    assert RunIdentity(**identity_changes(changed, None)) == expected
    assert identity_of({"tags": "a\ud800,b"})[0].tags == ["a\ufffd", "b"]


@pytest.mark.parametrize("config", UNREADABLE)
def test_a_config_that_no_page_can_show_is_refused(config):
    with pytest.raises(InvalidRequest, match=r"64 levels; flatten it|64 bits; give it as text"):
        identity_changes({"config": config}, None)


def test_a_page_shows_the_deepest_and_largest_config():
    config = nested(64) | {"y": [2**64 - 1, -(2**63), math.inf, True]}
    changes = identity_changes({"config": config}, None)
    assert [compact(value) for value in flat(changes["config"]).values()] == [
        "{}",
        '[18446744073709551615,-9223372036854775808,"Infinity",true]',
    ]


def test_tags_that_are_too_deep_are_text():
    assert identity_of({"tags": "[" * 70 + "]" * 70})[0].tags == ["[" * 70 + "]" * 70]


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
