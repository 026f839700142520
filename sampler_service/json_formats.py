"""Patterns for the string formats in pydantic's JSON schemas.

Every matching string is valid for pydantic. Rare forms are left out, such as a URL with an IPv6
host. Some patterns replace llguidance's own, which are too wide."""

from __future__ import annotations

_LABEL = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_TOP = "[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_IPV6 = (
    rf"(?:{_GROUP}(?::{_GROUP}){{7}}|::{_GROUP}|(?:{_GROUP}:){{1,6}}:(?:{_GROUP})?"
    rf"|(?:{_GROUP}:){{1,3}}(?::{_GROUP}){{1,3}})"
)
_IPV4_NETWORK = (
    rf"(?:{_BYTE}\.0\.0\.0/8|{_BYTE}\.{_BYTE}\.0\.0/16|{_BYTE}(?:\.{_BYTE}){{2}}\.0/24"
    rf"|{_IPV4}(?:/32)?)"
)
_IPV6_NETWORK = (
    rf"(?:(?:{_GROUP}:){{2}}:/32|(?:{_GROUP}:){{3}}:/48|(?:{_GROUP}:){{4}}:/64|{_IPV6}(?:/128)?)"
)
_IPV4_INTERFACE = rf"{_IPV4}(?:/(?:[12]?[0-9]|3[0-2]))?"
_IPV6_INTERFACE = rf"{_IPV6}(?:/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8]))?"
_HOST = rf"(?:(?:{_LABEL}\.)*{_TOP}|{_IPV4})"
_IN_URL = "(?:[A-Za-z0-9._~!$&()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_SEGMENT = f"(?:(?:[A-Za-z0-9_~!$&()*+,;=:@-]|%[013-9A-Fa-f][0-9A-Fa-f]){_IN_URL}*)?"
"""A path segment. It begins with no dot, because pydantic removes `..` from a URL."""
_REST = rf"(?:\?(?:{_IN_URL}|[/?])*)?(?:#(?:{_IN_URL}|[/?])*)?"
_PLACE = rf"{_HOST}(?::[1-9][0-9]{{3}})?(?:/{_SEGMENT})+"
_HTTP = rf"https?://{_PLACE}{_REST}"
"""A URL in pydantic's form, so that its length stays equal: with a path, without the default
port."""
_TOP_OF_MAIL = "(?:com|org|net|edu|gov|info|biz|dev|app|[a-z]{2})"
"""A few top-level domains. Pydantic refuses others, such as `local` and `test`."""
_MAIL = (
    r"[A-Za-z0-9_+-]{1,30}(?:\.[A-Za-z0-9_+-]{1,30})?@"
    rf"(?:[A-Za-z0-9]{{1,20}}(?:-[A-Za-z0-9]{{1,20}})?\.){{1,3}}{_TOP_OF_MAIL}"
)
_BASE64 = "(?:[{0}]{{4}})*(?:[{0}]{{2}}==|[{0}]{{3}}=)?"
_HEX = "[0-9a-fA-F]"

PATTERNS = {
    "uri": _HTTP,
    "uri-reference": rf"(?:{_HTTP}|(?:/{_SEGMENT})*{_REST})",
    "multi-host-uri": rf"[a-z][a-z0-9+]*://{_PLACE}",
    "email": _MAIL,
    "name-email": rf"[A-Za-z]{{1,30}}(?: [A-Za-z]{{1,30}}){{0,3}} <{_MAIL}>",
    "ipvanyaddress": rf"(?:{_IPV4}|{_IPV6})",
    "ipvanynetwork": rf"(?:{_IPV4_NETWORK}|{_IPV6_NETWORK})",
    "ipvanyinterface": rf"(?:{_IPV4_INTERFACE}|{_IPV6_INTERFACE})",
    "ipv4network": _IPV4_NETWORK,
    "ipv4interface": _IPV4_INTERFACE,
    "ipv6network": _IPV6_NETWORK,
    "ipv6interface": _IPV6_INTERFACE,
    "base64": _BASE64.format("A-Za-z0-9+/"),
    "base64url": _BASE64.format("A-Za-z0-9_-"),
    "fraction": "-?[0-9]{1,15}(?:/[1-9][0-9]{0,15})?",
    **{
        f"uuid{n}": f"{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
        for n in (1, 3, 4, 5, 6, 7, 8)
    },
}
"""Patterns that replace a format."""

_DATE = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-[0-9-]{5}"
_TIME = r"[0-9:]{6}[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-][0-9:]{5})"
BESIDE = {
    "date": _DATE,
    "date-time": f"{_DATE}[Tt ]{_TIME}",
    "time": _TIME,
    "duration": "P(?:[0-9]{1,6}[YMWD])*(?:T(?:[0-9]{1,6}[HMS])*)?",
}
"""Patterns beside a format that llguidance knows. Python has no year 0, no leap seconds, and no
durations above a thousand million days."""

IN_BYTES = frozenset(("binary", "password"))
"""String formats with a length in bytes of UTF-8."""
ASCII = "[ -~]*"

NO_NUMBER = "^(?!^[-+.]*$)"
"""The start of pydantic's pattern for decimals: the text has a digit. llguidance supports no
look-ahead."""
