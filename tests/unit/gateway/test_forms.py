"""Forms of the page are decoded as browsers write them."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from gateway.api.pages.routing import _parse_form
from tandem.errors import InvalidRequest


@pytest.mark.parametrize("before", range(3))
def test_a_form_is_decoded_in_pieces_as_in_one(before):
    fields = {"a b": "x" * before + "ä€🦊 +%&=" * 20_000, "ä": "1=2", "c": "%zz"}
    assert _parse_form(urlencode(fields).encode()) == fields


def test_the_last_of_equal_names_counts_and_empty_values_do_not():
    assert _parse_form(b"a=1&a=2&b=&&c&d=%4&e=%ff") == {"a": "2", "d": "%4", "e": "\ufffd"}


def test_a_form_has_at_most_100_fields():
    _parse_form(b"&".join([b"a=1"] * 100))
    with pytest.raises(InvalidRequest, match="more than 100 fields"):
        _parse_form(b"&" * 100)
