"""Schemas are rewritten in llguidance's keywords, with the same meaning."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import uuid
from typing import Annotated

import llguidance.numpy
import numpy as np
import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

from sampler_service.json_formats import NO_NUMBER
from sampler_service.json_schema import FORMATS, rewrite_schema
from tandem.errors import StructuredOutputInvalid

INTEGER = {"type": "integer"}
LETTERS = {"type": "string", "enum": ["a", "b"]}


QUOTE = ord('"')
TELLING = list(b"/:.@%?#+-0169PTZ")
"""Bytes that distinguish formats."""
BYTES = LLTokenizer("byte")


def matcher_of(schema: object) -> LLMatcher:
    source = LLMatcher.grammar_from_json_schema(
        rewrite_schema(json.dumps(schema)), overrides={"lenient": False}
    )
    matcher = LLMatcher(BYTES, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def written(schema: object, seed: int) -> str:
    """Return a string that a schema's grammar permits, drawn byte by byte."""
    drawn, matcher, text = random.Random(seed), matcher_of(schema), b""
    ends = drawn.choice((0.02, 0.2, 0.5))
    mask = llguidance.numpy.allocate_token_bitmask(1, BYTES.vocab_size)
    while not (text[1:].endswith(b'"') and matcher.is_accepting()):
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:256]
        allowed = [int(byte) for byte in np.flatnonzero(bits)]
        telling = [byte for byte in allowed if byte in TELLING]
        if QUOTE in allowed and (len(text) > 200 or drawn.random() < ends):
            byte = QUOTE
        else:
            byte = drawn.choice(telling if telling and drawn.random() < 0.5 else allowed)
        assert matcher.consume_token(byte)
        text += bytes([byte])
    return text.decode()


def accepts(schema: object, text: str) -> bool:
    matcher = matcher_of(schema)
    read = matcher.try_consume_tokens(list(text.encode()))
    return read == len(text.encode()) and bool(matcher.is_accepting())


def test_a_format_that_the_grammar_does_not_know_is_a_note():
    for name in ("duration-of-tea", "binary", "password", "idn-email", "path", "json-pointer"):
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
    "kind",
    [
        pydantic.HttpUrl,
        pydantic.AnyUrl,
        Annotated[pydantic.HttpUrl, pydantic.Field(min_length=20, max_length=30)],
        pydantic.EmailStr,
        pydantic.NameEmail,
        Annotated[bytes, pydantic.Field(min_length=2, max_length=4)],
        Annotated[pydantic.SecretBytes, pydantic.Field(max_length=4)],
        pydantic.Base64Bytes,
        pydantic.Base64UrlBytes,
        pydantic.IPvAnyAddress,
        pydantic.IPvAnyNetwork,
        pydantic.IPvAnyInterface,
        ipaddress.IPv4Network,
        ipaddress.IPv4Interface,
        ipaddress.IPv6Address,
        ipaddress.IPv6Network,
        ipaddress.IPv6Interface,
        uuid.UUID,
        pydantic.UUID1,
        pydantic.UUID4,
        pydantic.UUID7,
        datetime.date,
        datetime.time,
        datetime.timedelta,
        pydantic.AwareDatetime,
    ],
    ids=str,
)
def test_strings_of_a_format_are_valid_for_pydantic_which_wrote_it(kind: object):
    adapter = pydantic.TypeAdapter[object](kind)
    schema = adapter.json_schema()
    for seed in range(20):
        adapter.validate_json(written(schema, seed))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "uri",
            ["https://en.wikipedia.org/wiki/Caf%C3%A9?x=1#a", "http://10.0.0.1:8080/", "http://a/"],
            ["ftp://a.org/", "https://a b/", "http://1.2.3.400/", "http://u:p@a.org/", "a.org"],
        ),
        ("uri-reference", ["/a/b?c#d", "", "http://a.org/"], ["a b", "<"]),
        ("email", ["ann.lee@mail.example.com", "a@b.de"], ["a@b", "a@b.local", "@b.de"]),
        ("ipvanynetwork", ["10.0.0.0/8", "2001:db8:0:1::/64", "::1"], ["10.0.0.1/8", "10.0.0"]),
        ("ipvanyinterface", ["192.168.0.1/24", "fe80::1/64"], ["192.168.0.1/33"]),
        ("base64", ["", "aGk=", "aA==", "aGk+"], ["aGk", "a", "a-k="]),
        ("base64url", ["aGk-"], ["aGk+"]),
        (
            "uuid4",
            ["6fa459ea-ee8a-4ca4-894e-db77e160355e"],
            ["6fa459ea-ee8a-1ca4-894e-db77e160355e"],
        ),
        ("fraction", ["1/3", "-2"], ["1/0", "x"]),
        ("time", ["10:20:59Z"], ["10:20:60Z"]),
        ("date", ["2024-02-29"], ["0000-02-01", "2024-02-31"]),
        ("duration", ["P1DT2H"], ["P1234567890D"]),
    ],
)  # fmt: skip
def test_a_format_that_pydantic_writes_is_kept(name: str, good: list[str], bad: list[str]):
    schema = {"type": "string", "format": name}
    assert [text for text in good if not accepts(schema, json.dumps(text))] == []
    assert [text for text in bad if accepts(schema, json.dumps(text))] == []


@pytest.mark.parametrize(
    ("beside", "good"),
    [
        ({"const": "ftp://a"}, "ftp://a"),
        ({"enum": ["urn:a"]}, "urn:a"),
        ({"pattern": "^ftp://[a-z]+$"}, "ftp://b"),
    ],
)
def test_what_stands_beside_a_format_says_more_than_its_pattern(
    beside: dict[str, object], good: str
):
    assert accepts({"type": "string", "format": "uri"} | beside, json.dumps(good))


def test_a_string_counted_in_bytes_has_no_longer_characters():
    for name in ("binary", "password"):
        schema = {"type": "string", "format": name, "maxLength": 2}
        assert accepts(schema, '"a~"') and not accepts(schema, '"é"'), name
        free = {"type": "string", "format": name, "minLength": 1}
        assert accepts(free, json.dumps("é", ensure_ascii=False)), name


@pytest.mark.parametrize("rest", [r"[+-]?0*\d*\.?\d*$", r"[+-]?0*\d*\.?\d{0,2}0*$"])
def test_the_pattern_of_a_decimal_needs_a_digit(rest: str):
    schema = {"type": "string", "pattern": NO_NUMBER + rest}
    assert not [text for text in ("", "-", ".", "+.") if accepts(schema, json.dumps(text))]
    for text in ("1", "-0.5", ".25", "7."):
        assert accepts(schema, json.dumps(text))


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
