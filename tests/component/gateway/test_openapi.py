"""The OpenAPI document, from which docs/api.md is written."""

from __future__ import annotations

import base64
import hashlib
import re
import tempfile
from pathlib import Path

import httpx

from scripts.api_docs import PAGE, page
from tests.support.gateway.access_world import OPERATIONS
from tests.support.gateway.running import KEY, running_gateway

DOCUMENTED = {name: each for name, each in OPERATIONS.items() if each.include_in_schema}


def test_every_route_is_described_with_a_sentence_and_its_body():
    for name, operation in DOCUMENTED.items():
        assert operation.description, f"{name} has no docstring"
        facts = operation.openapi_extra or {}
        if operation.method == "PUT":
            assert operation.body_field is not None, f"{name} declares no body"
        if "x-tandem-raw" in facts:
            assert facts["requestBody"]["content"], name
            assert operation.responses[200]["model"], name


def test_the_page_in_the_docs_is_that_of_the_routes_there_are():
    assert PAGE.read_text() == page(), "docs/api.md is of other routes; run `make api-docs`"


def test_the_page_names_every_route_and_no_machine():
    text = page()
    for operation in DOCUMENTED.values():
        assert f"### {operation.method} {operation.path_format}\n" in text
    assert str(Path.cwd()) not in text
    assert tempfile.gettempdir() + "/" not in text


def test_the_document_is_served_for_a_key(tmp_path):
    with running_gateway(tmp_path) as gate, gate.http() as client:
        answer = client.get("/openapi.json")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        document = answer.json()
        served = {o["operationId"] for path in document["paths"].values() for o in path.values()}
        assert served == DOCUMENTED.keys()
        assert "422" not in answer.text, "wrong fields are refused with 400"
        assert KEY not in answer.text
        assert str(tmp_path) not in answer.text
        assert client.get("/openapi.json", headers={"X-API-Key": ""}).status_code == 401


def test_a_browser_signs_in_to_the_page_of_the_document(gate):
    accepts_pages = {"Accept": "text/html"}
    with httpx.Client(base_url=gate.url, headers=accepts_pages, verify=False) as browser:
        assert browser.get("/docs").headers["location"].startswith("/sign-in")
        form = browser.get("/sign-in").text
        token = re.search(r'name="form_token" value="(\w+)"', form)[1]
        browser.post("/sign-in", data={"form_token": token, "key": KEY})
        for path in ("/docs", "/docs/swagger-ui.css", "/openapi.json"):
            assert browser.get(path).status_code == 200


def test_the_page_of_the_document_needs_only_this_server(gate):
    with gate.http() as client:
        page = client.get("/docs")
        policy = page.headers["content-security-policy"]
        addresses = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(addresses) == 3
        for address in addresses:
            assert address.startswith("/docs/")
            assert client.get(address).status_code == 200
        [script] = re.findall(r"<script>(.*?)</script>", page.text, re.S)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
        assert "unsafe" not in policy
        assert "//" not in policy
        assert client.get("/docs/core.py").status_code == 404
