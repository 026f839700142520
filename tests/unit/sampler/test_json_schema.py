"""A schema is rewritten in keywords that llguidance implements, with the same meaning."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from sampler_service.json_schema import FORMATS, rewrite_schema
from tandem.errors import StructuredOutputInvalid

INTEGER = {"type": "integer"}
LETTERS = {"type": "string", "enum": ["a", "b"]}


def accepts(schema: object, text: str) -> bool:
    source = LLMatcher.grammar_from_json_schema(
        rewrite_schema(json.dumps(schema)), overrides={"lenient": False}
    )
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    read = matcher.try_consume_tokens(list(text.encode()))
    return read == len(text.encode()) and bool(matcher.is_accepting())


def test_a_format_that_the_grammar_does_not_know_is_a_note():
    for name in ("duration-of-tea", "binary", "idn-email", "path", "json-pointer"):
        assert accepts({"type": "string", "format": name}, '"anything"'), name
    nested = {"type": "object", "properties": {"format": {"type": "string", "format": "colour"}}}
    assert accepts(nested, '{"format": "x"}')
    assert accepts({"const": {"format": "colour"}}, '{"format": "colour"}')
    assert accepts({"$ref": "#/$defs/x", "$defs": {"x": {"format": "colour"}}}, '"x"')


def test_a_format_that_the_grammar_knows_is_kept():
    for name in FORMATS:
        assert not accepts({"type": "string", "format": name}, '"%"'), name
    assert accepts({"type": "string", "format": "date"}, '"2026-01-31"')


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        ({"enum": ["a", "b"]}, ["a", "b"], ["c", "ab"]),
        ({"const": "a", "type": "string"}, ["a"], ["b"]),
        ({"pattern": "^[a-c]+$"}, ["a", "cab"], ["d", "a1"]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
        ({"maxLength": 1}, ["a", ""], ["ab"]),
        ({"$ref": "#/$defs/Letters"}, ["a"], ["c"]),
        ({"type": "string", "format": "colour", "title": "Name"}, ["a", "%"], []),
        (True, ["a"], []),
        (False, [], ["a"]),
    ],
)
def test_property_names_are_kept(names: object, good: list[str], bad: list[str]):
    schema = {
        "type": "object",
        "propertyNames": names,
        "additionalProperties": INTEGER,
        "$defs": {"Letters": LETTERS},
    }
    assert accepts(schema, "{}")
    assert [
        name for name in good if not accepts(schema, json.dumps({name: 1}, ensure_ascii=False))
    ] == []
    assert [
        name for name in bad if accepts(schema, json.dumps({name: 1}, ensure_ascii=False))
    ] == []
    assert not any(accepts(schema, json.dumps({name: "x"})) for name in good)


def test_property_names_hold_for_the_properties_beside_them():
    schema = {
        "type": "object",
        "properties": {"a": INTEGER, "b1": INTEGER},
        "required": ["a"],
        "propertyNames": {"pattern": "^[a-z]$"},
        "allOf": [{"maxProperties": 5}],
    }
    assert accepts(schema, '{"a": 1}')
    assert not accepts(schema, '{"a": 1, "b1": 2}')


@pytest.mark.parametrize(
    ("items", "good", "bad"),
    [
        (LETTERS, ['["b", "a"]', '["a"]', "[]"], ['["a", "a"]', '["c"]']),
        ({"$ref": "#/$defs/Letters"}, ['["a", "b"]'], ['["b", "b"]']),
        ({"type": "boolean"}, ["[true, false]"], ["[true, true]"]),
        ({"enum": [1, "1", 1]}, ['[1, "1"]'], ["[1, 1]"]),
        ({"enum": [1, "1"], "type": "string"}, ['["1"]'], ["[1]"]),
    ],
)
def test_items_of_a_set_are_different(items: object, good: list[str], bad: list[str]):
    schema = {
        "type": "array",
        "items": items,
        "uniqueItems": True,
        "$defs": {"Letters": LETTERS},
    }
    assert [text for text in good if not accepts(schema, text)] == []
    assert [text for text in bad if accepts(schema, text)] == []


def test_a_set_has_as_many_items_as_its_bounds_say():
    many = {"type": "string", "enum": [f"{number}" for number in range(40)]}
    pair = {"type": "array", "items": many, "uniqueItems": True, "minItems": 2, "maxItems": 2}
    assert accepts(pair, '["3", "7"]')
    assert not accepts(pair, '["3"]') and not accepts(pair, '["3", "3"]')
    one = {"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 1}
    assert accepts(one, "[5]")
    assert accepts({"type": "array", "items": INTEGER, "uniqueItems": False}, "[5, 5]")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems"),
        ({"items": {"enum": list(range(5000))}, "uniqueItems": True}, "uniqueItems"),
        ({"propertyNames": {"not": {"const": "a"}}}, "propertyNames"),
        ({"propertyNames": {"$ref": "#/$defs/loop"}, "$defs": {"loop": {"$ref": "#/$defs/loop"}}},
         "propertyNames"),
        ({"propertyNames": {"format": "uuid"}}, "propertyNames"),
    ],
)  # fmt: skip
def test_a_keyword_without_an_equivalent_is_named(schema: object, keyword: str):
    with pytest.raises(StructuredOutputInvalid, match=f"refused: {keyword} "):
        rewrite_schema(json.dumps(schema))
