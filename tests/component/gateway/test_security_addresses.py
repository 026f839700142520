"""Signed addresses, altered, re-targeted, forged or expired."""

from __future__ import annotations

import string
import time
from collections.abc import Iterator
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import httpx
import pytest

from gateway.owners.auth.signing import sign


@pytest.fixture(scope="module")
def addresses(world) -> dict[str, str]:
    return {"download": world.gate.url + world.file(), "trace": world.gate.url + world.trace()}


def with_query(url: str, **changes: str | None) -> str:
    parts = urlsplit(url)
    fields = dict(parse_qsl(parts.query)) | changes
    return parts._replace(
        query=urlencode({k: v for k, v in fields.items() if v is not None})
    ).geturl()


def fields_of(url: str) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(url).query))


def altered(text: str) -> Iterator[str]:
    """Cut, extended, with changed characters, in another case, and empty."""
    yield from ("", text[:-1], text[1:], text + "A", text + "=", " " + text, text + "\0")
    yield from (text.swapcase(), text.upper(), text.lower(), text[::-1])
    for index, old in [*enumerate(text)][::5]:
        new = next(c for c in string.ascii_letters if c.lower() != old.lower())
        yield text[:index] + new + text[index + 1 :]


def fetch(url: str, method: str = "GET") -> httpx.Response:
    return httpx.request(method, url, timeout=30, verify=False)


def forbidden(url: str, method: str = "GET") -> None:
    answer = fetch(url, method)
    assert answer.status_code in (400, 401, 403, 404, 405), (url, answer.status_code)
    if answer.status_code == 403:
        assert answer.json()["type"] == "address_forged"
        assert "not signed here, or was altered" in answer.json()["error"]
    assert b"weights of step" not in answer.content
    assert b"traceEvents" not in answer.content


@pytest.mark.parametrize("kind", ["download", "trace"])
def test_the_address_itself_is_good(addresses, kind):
    assert fetch(addresses[kind]).status_code == 200


@pytest.mark.parametrize("kind", ["download", "trace"])
def test_every_field_of_the_query_altered_in_every_place_is_refused(addresses, kind):
    for name, value in fields_of(addresses[kind]).items():
        for changed in {*altered(value)} - {value}:
            forbidden(with_query(addresses[kind], **{name: changed}))
        forbidden(with_query(addresses[kind], **{name: None}))


@pytest.mark.parametrize("kind", ["download", "trace"])
def test_every_part_of_the_path_altered_is_refused(addresses, kind):
    url = urlsplit(addresses[kind])
    parts = url.path.split("/")
    for index in range(4, len(parts)):
        for changed in {*altered(parts[index])} - {parts[index]}:
            path = "/".join([*parts[:index], quote(changed, safe=":"), *parts[index + 1 :]])
            if path == url.path or not changed:
                continue
            forbidden(url._replace(path=path).geturl())


@pytest.mark.parametrize("kind", ["download", "trace"])
def test_another_method_is_refused(addresses, kind):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        forbidden(addresses[kind], method)
    answer = fetch(addresses[kind], "HEAD")
    assert answer.content == b"", "HEAD shows nothing of the file"
    assert kind == "trace" or answer.status_code == 403, "it is signed for GET alone"


def test_a_signature_is_good_for_its_own_purpose_and_file_alone(world, addresses):
    download, trace = fields_of(addresses["download"]), fields_of(addresses["trace"])
    forbidden(with_query(addresses["download"], **trace))
    forbidden(with_query(addresses["trace"], **{k: download[k] for k in ("expires", "signature")}))
    call = f"{world.checkpoint(world.export)}/external_weights_urls"
    with world.client(world.keys["member"]) as client:
        files = client.get(call).json()["urls"]
    first, second = list(files.values())[:2]
    forbidden(with_query(first, **fields_of(second)))
    for secret in ("manifest.json", "..%2f..%2f..%2fapi_key", "%2e%2e/api_key", "api_key"):
        parts = urlsplit(first)
        path = f"{parts.path.rpartition('/')[0]}/{secret}"
        forbidden(parts._replace(path=path).geturl())


def test_another_gateways_signature_is_refused(world, addresses):
    query = fields_of(addresses["trace"])
    file = urlsplit(addresses["trace"]).path.rpartition("/")[2]
    for key in (bytes(32), b"x" * 32, b""):
        signature = sign(key, "trace", file, query["expires"])
        forbidden(with_query(addresses["trace"], signature=signature))
    key = world.gate.gateway.signing_key
    good = sign(key, "trace", file, query["expires"])
    assert good == query["signature"]


@pytest.mark.parametrize("shift", [0, -1, -(10**6)])
def test_an_expired_address_is_refused_though_it_was_signed(world, addresses, shift):
    key, expires = world.gate.gateway.signing_key, str(int(time.time()) + shift)
    sentences = {"trace": "export it again", "download": "ask for a new one"}
    signed = {"trace": [urlsplit(addresses["trace"]).path.rpartition("/")[2]]}
    *parts, file = urlsplit(addresses["download"]).path.split("/")[4:]
    signed["download"] = ["GET", *parts, fields_of(addresses["download"])["folder"], file]
    for kind, said in signed.items():
        signature = sign(key, kind, *said, expires)
        answer = fetch(with_query(addresses[kind], expires=expires, signature=signature))
        assert (answer.status_code, answer.json()["type"]) == (410, "address_expired")
        assert sentences[kind] in answer.json()["error"]


def test_a_field_given_twice_is_not_read_in_two_ways(addresses):
    for kind in ("download", "trace"):
        later = str(int(time.time()) + 10**6)
        forbidden(f"{addresses[kind]}&expires={later}")
        forbidden(f"{addresses[kind]}&signature=x")


def test_a_good_address_opens_no_other_door(world, addresses):
    """Its signature is no key."""
    query = urlsplit(addresses["download"]).query
    for path in ("/api/v1/training_runs", "/api/tandem/v1/config", "/api/v1/audit"):
        answer = fetch(f"{world.gate.url}{path}?{query}")
        assert answer.status_code == 401
