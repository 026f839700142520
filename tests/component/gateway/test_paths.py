"""Missing and extra slashes in paths."""

from __future__ import annotations

import http.client
import json

import pytest

from gateway.api.middleware import plain_path
from tests.support.gateway.running import KEY, make_model


@pytest.mark.parametrize(
    ("sent", "plain"),
    [
        ("/v1/models", "/v1/models"),
        ("/", "/"),
        ("///", "/"),
        ("//v1///models//", "/v1/models"),
        ("/v1/models/tinker://run/weights/a", "/v1/models/tinker://run/weights/a"),
        ("/v1/models/tinker:%2F%2Frun%2Fweights%2Fa", "/v1/models/tinker:%2F%2Frun%2Fweights%2Fa"),
        ("/v1/models/tinker:////run//weights//a", "/v1/models/tinker:////run/weights/a"),
        ("/v1/models/a%2F%2Fb/", "/v1/models/a%2F%2Fb"),
    ],
)
def test_slashes_count_once_and_none_at_the_end(sent, plain):
    assert plain_path(sent) == plain


def answer_of(gate, method: str, path: str, *, key: str | None = KEY, body: object = None):
    """Status and content, without a client library that normalizes paths."""
    host = gate.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    headers = {"Content-Type": "application/json", **({"X-API-Key": key} if key else {})}
    content = None if body is None else json.dumps(body)
    connection.request(method, path, body=content, headers=headers)
    answer = connection.getresponse()
    assert not answer.getheader("location"), "nobody is sent elsewhere"
    return answer.status, json.loads(answer.read() or b"null")


@pytest.mark.parametrize(
    "path", ["/v1/models", "/api/v1/get_server_capabilities", "/api/tandem/v1/status"]
)
@pytest.mark.parametrize("form", ["/{}", "{}/", "{}//", "//{}/"])
def test_a_path_is_answered_in_any_form(gate, path, form):
    status, content = answer_of(gate, "GET", form.format(path))
    expected = answer_of(gate, "GET", path)[1]
    assert (status, content.keys()) == (200, expected.keys())


def test_a_body_arrives_without_a_redirect(gate):
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    assert answer_of(gate, "POST", "/api//v1/create_session/", body=body)[0] == 200


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1//models/", "/api/v1//healthz/../get_server_capabilities", "//api/v1/x/"],
)
def test_no_form_of_a_path_needs_less_of_a_key(gate, path):
    assert answer_of(gate, "GET", path, key=None)[0] == 401


def test_health_is_answered_in_any_form(gate):
    assert answer_of(gate, "GET", "//api/v1/healthz/", key=None) == (200, {"status": "ok"})


def test_errors_have_the_form_of_the_path(gate):
    status, content = answer_of(gate, "GET", "//v1//models/unknown/")
    assert (status, content["error"]["code"]) == (404, "model_not_found")
    status, content = answer_of(gate, "GET", "/api/v1//nothing/")
    assert (status, content["type"]) == (404, "unknown_endpoint")


def test_a_model_is_found_by_its_path_in_a_url(gate, tmp_path):
    folder = make_model(tmp_path / "by path")
    gate.run(gate.gateway.models.add(name="org/by-path", path=str(folder)))
    encoded = str(folder).replace(" ", "%20")
    for form in (encoded, encoded.replace("/", "%2F"), encoded[1:]):
        status, content = answer_of(gate, "GET", f"/v1/models/{form}/")
        assert (status, content["id"]) == (200, "org/by-path")
    assert answer_of(gate, "GET", "/v1/models//org//by-path")[1]["id"] == "org/by-path"
