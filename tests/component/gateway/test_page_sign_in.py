"""Signing in to the page: cookies, form tokens, keys and codes."""

from __future__ import annotations

import re
import time

import pytest

from gateway.api.pages.templates import HEADERS, static_files
from gateway.owners.auth import page_sessions
from tandem.protocol.sign_in_code import make_code
from tests.support.gateway.browsers import browser, new_key, sign_in, token_in
from tests.support.gateway.running import KEY, running_gateway
from tests.support.waiting import wait_until


def test_a_browser_without_a_session_gets_the_form_and_a_program_gets_json(gate):
    with browser(gate) as client:
        answer = client.get("/?offset=2")
        assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in")
        assert client.get("/sign-in").status_code == 200
        told = client.get("/", headers={"Accept": "*/*"})
        assert (told.status_code, told.json()["type"]) == (401, "unauthenticated")


def test_a_key_signs_a_browser_in_until_it_signs_out(gate):
    with browser(gate) as client:
        answer = sign_in(client, next="/?offset=1")
        assert (answer.status_code, answer.headers["location"]) == (303, "/?offset=1")
        (cookie,) = (c for c in answer.headers.get_list("set-cookie") if "_form" not in c)
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert KEY not in cookie
        page = client.get("/")
        assert page.status_code == 200
        kept = dict(client.cookies)
        left = client.post("/sign-out", data={"form_token": token_in(page)})
        assert left.status_code == 303
        client.cookies.update(kept)  # as a thief's browser would
        assert client.get("/").status_code == 303
        assert client.get("/", headers={"Accept": "*/*"}).status_code == 401


def test_a_cookie_is_no_key_of_the_api(gate):
    with browser(gate) as client:
        sign_in(client)
        assert client.get("/api/tandem/v1/runs").status_code == 401


def test_a_revoked_key_ends_its_sessions(gate):
    key_id, secret = new_key(gate)
    with browser(gate) as client:
        assert sign_in(client, secret).status_code == 303
        assert client.get("/").status_code == 200
        gate.run(gate.gateway.keys.revoke(key_id))
        assert client.get("/").status_code == 303


def test_a_session_outlives_the_gateway_and_a_sign_out_does_too(tmp_path):
    with running_gateway(tmp_path) as gate, browser(gate) as client:
        sign_in(client)
        stays = next(value for name, value in client.cookies.items() if "_form" not in name)
        client.cookies.clear()
        sign_in(client)
        ends = next(value for name, value in client.cookies.items() if "_form" not in name)
        client.post("/sign-out", data={"form_token": token_in(client.get("/"))})
    with running_gateway(tmp_path) as gate, browser(gate) as client:
        name = f"tandem_{client.base_url.port}"
        client.cookies.set(name, stays)
        assert client.get("/").status_code == 200
        client.cookies.set(name, ends)
        assert client.get("/").status_code == 303


@pytest.mark.parametrize("token", ["", "0" * 64])
def test_a_form_of_another_site_changes_nothing(gate, token):
    with browser(gate) as client:
        client.get("/sign-in")
        refused = client.post("/sign-in", data={"form_token": token, "key": KEY})
        assert refused.status_code == 400
        assert "the form is too old" in refused.text.lower()
        sign_in(client)
        assert client.post("/sign-out", data={"form_token": token}).status_code == 400
        assert client.get("/").status_code == 200


@pytest.mark.parametrize("path", ["/sign-in", "/sign-out", "/runs/s-1:train:0/stop"])
def test_a_long_form_is_refused_before_it_is_decoded(gate, path):
    with browser(gate) as client:
        sign_in(client)
        refused = client.post(path, data={"form_token": "x", "key": "&" * 8192})
    assert refused.status_code == 413
    assert "16384 at most" in refused.text


def test_a_form_without_its_cookie_is_refused(gate):
    from gateway.api.pages.routing import form_token

    with browser(gate) as client:
        refused = client.post("/sign-in", data={"form_token": form_token(""), "key": KEY})
        assert refused.status_code == 400


def test_a_bad_key_is_counted_and_named_in_a_sentence(gate):
    def counted() -> float:
        samples = gate.gateway.metrics.refused_keys.collect()[0].samples
        return sum(each.value for each in samples if each.name.endswith("_total"))

    before = counted()
    with browser(gate) as client:
        answer = sign_in(client, "tml-wrong")
    assert answer.status_code == 401
    assert "The API key is missing or wrong" in answer.text
    assert "tml-wrong" not in answer.text
    wait_until(lambda: counted() == before + 1)


def test_a_key_for_metrics_signs_nobody_in(gate):
    with browser(gate) as client:
        answer = sign_in(client, new_key(gate, "metrics")[1])
        assert answer.status_code == 403
        assert client.get("/").status_code == 303


def test_the_link_of_tandem_up_signs_in_once(gate):
    code = make_code(KEY, now=time.time())
    with browser(gate) as client:
        assert sign_in(client, "", code=code).status_code == 303
        assert client.get("/").status_code == 200
    with browser(gate) as client:
        again = sign_in(client, "", code=code)
        assert (again.status_code, "used before" in again.text) == (400, True)


@pytest.mark.parametrize("kind", ["other key", "before the start", "too old", "from a proxy", ""])
def test_another_code_signs_nobody_in(gate, kind, monkeypatch):
    code = make_code("tml-other" if kind == "other key" else KEY, now=time.time())
    if kind == "before the start":
        code = make_code(KEY, now=gate.gateway.started_at - 2)
    elif kind == "too old":
        monkeypatch.setattr(page_sessions, "CODE_SECONDS", 0)
    elif kind == "":
        code = "1.2.\u00e4"
    with browser(gate) as client:
        if kind == "from a proxy":
            client.headers["X-Forwarded-For"] = "192.0.2.1"
        assert sign_in(client, "", code=code).status_code == 400
        assert client.get("/").status_code == 303


@pytest.mark.parametrize(
    "asked", ["//evil.example", "https://evil.example", "/\\evil.example", "/\tx", "javascript:1"]
)
def test_a_sign_in_leads_to_no_other_site(gate, asked):
    with browser(gate) as client:
        assert sign_in(client, next=asked).headers["location"] == "/"


def test_a_key_keeps_a_bounded_number_of_sessions(gate, monkeypatch):
    monkeypatch.setattr(page_sessions, "MOST_SESSIONS", 2)
    secret = new_key(gate)[1]
    clients = [browser(gate) for _ in range(3)]
    for client in clients:
        sign_in(client, secret)
    assert [client.get("/").status_code for client in clients] == [303, 200, 200]
    for client in clients:
        client.close()


def test_every_page_forbids_foreign_and_inline_scripts(gate):
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    with browser(gate) as client:
        pages = [client.get("/sign-in"), sign_in(client, "tml-wrong")]
        sign_in(client)
        pages += [client.get("/"), client.get("/?offset=x")]
    assert [page.status_code for page in pages] == [200, 401, 200, 400]
    for page in pages:
        assert page.headers["content-security-policy"] == policy
        assert page.headers["cache-control"] == "no-store"
        assert not re.search(r"<script>|<style|\sstyle=|\son\w+=|javascript:", page.text)
        assert "http://" not in page.text.replace("http://www.w3.org/", "")
        assert "https://" not in page.text


def test_static_files_are_kept_for_good_and_named_by_their_content(gate):
    with browser(gate) as client:
        names = re.findall(r'"(/static/[^"]+)"', client.get("/sign-in").text)
        assert len({*names}) >= 3
        for name in names:
            answer = client.get(name)
            assert answer.status_code == 200
            assert "immutable" in answer.headers["cache-control"]
        assert client.get("/static/other.css").status_code == 404
    assert all(re.search(r"\.[0-9a-f]{12}\.\w+$", name) for name in static_files())
