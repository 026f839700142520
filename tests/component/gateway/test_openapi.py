"""The description of the routes: complete, true to what the routes parse, and served."""

from __future__ import annotations

import ast
import inspect
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.api.description.document import document
from gateway.api.description.served import described_operations
from gateway.app import create_app
from scripts.api_docs import PAGE, page
from tests.support.gateway.running import KEY, running_gateway, settings_for


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return create_app(settings_for(tmp_path_factory.mktemp("gateway")))


@pytest.fixture(scope="module")
def operations(app):
    return described_operations(app)


def test_every_route_is_described_with_a_sentence_and_an_answer(app, operations):
    served = {(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}}
    assert len(operations) == len(served)
    for operation in operations:
        assert operation.sentences[0], f"{operation.path} has no docstring"
        assert operation.described.answers or operation.described.rules, operation.path
        if operation.method in ("POST", "PUT") and "read_body" in _names(operation.handler):
            assert operation.has_body, f"{operation.path} reads a body that is not described"


def test_a_route_without_a_description_is_found(tmp_path):
    async def unheard_of(_request: Request) -> Response:
        return Response()

    app = create_app(settings_for(tmp_path))
    app.router.routes.append(Route("/api/v1/unheard_of", unheard_of))
    with pytest.raises(LookupError, match=r"unheard_of.*has no description"):
        described_operations(app)


def test_what_is_described_is_what_the_routes_parse(operations):
    """Followed through the source: each model in a call of `parse` or `parse_query` by a route,
    or by a function of its module that the route names."""
    for operation in operations:
        described = operation.described
        said = {model for alternative in described.takes for model in alternative}
        parsed = _parsed(operation.handler, "parse") | _parsed(operation.handler, "parse_request")
        assert parsed == said, operation.path
        assert _parsed(operation.handler, "parse_query") == set(described.queries), operation.path


def test_the_page_in_the_docs_is_that_of_the_routes_there_are():
    assert PAGE.read_text() == page(), "docs/api.md is of other routes; run `make api-docs`"


def test_the_page_names_every_route_and_no_machine(operations):
    text = page()
    for operation in operations:
        assert f"### {operation.method} {operation.path}\n" in text
    assert str(Path.cwd()) not in text
    assert tempfile.gettempdir() + "/" not in text


def test_the_description_is_served_to_this_machine_without_a_key(tmp_path, operations):
    with running_gateway(tmp_path) as gate, gate.http(key="") as client:
        answer = client.get("/openapi.json")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == document(operations)
        assert KEY not in answer.text
        assert str(tmp_path) not in answer.text
        passed_on = client.get("/openapi.json", headers={"X-Forwarded-For": "192.0.2.1"})
        assert passed_on.status_code == 401


def test_a_method_that_a_path_does_not_take_is_405_and_names_those_it_takes(tmp_path):
    with running_gateway(tmp_path) as gate, gate.http() as client:
        answer = client.put("/api/v1/auth/apikey/me")
        assert answer.status_code == 405
        assert answer.headers["allow"] == "DELETE, GET, HEAD"
        assert answer.json()["category"] == "user"


def _names(function) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _parsed(function, parser: str) -> set[type[BaseModel]]:
    module = sys.modules[function.__module__]
    found: set[type[BaseModel]] = set()
    seen, waiting = set(), [function]
    while waiting:
        current = waiting.pop()
        seen.add(current)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(current)))):
            if not isinstance(node, ast.Name):
                continue
            named = getattr(module, node.id, None)
            if (
                inspect.isfunction(named)
                and named not in seen
                and named.__module__ == (module.__name__)
            ):
                waiting.append(named)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(current)))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == parser:
                found.add(getattr(module, node.args[0].id))
    return found
