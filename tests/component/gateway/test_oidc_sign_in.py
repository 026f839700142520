"""Signing in to the page at a provider of OpenID Connect."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey
from pydantic import ValidationError

from gateway.owners.auth import oidc
from gateway.owners.auth.oidc import OidcProvider
from tandem.errors import InvalidRequest
from tandem.settings.config_file import read_config_file
from tandem.settings.oidc import OidcSettings
from tests.support.gateway.browsers import browser, new_key, sign_in, token_in
from tests.support.gateway.running import running_gateway
from tests.support.oidc import Provider, query_of, running_provider

pytestmark = pytest.mark.filterwarnings(
    "ignore:get_jwt_config:DeprecationWarning"
)  # the provider's

RULES = {
    "boss@example.com": {"role": "admin", "hours": 1},
    "fifth@example.com": {"role": "member", "owner": "ann"},
    "group:ml": {"role": "maintainer", "owner": "team"},
    "@example.com": {"role": "member", "hours": 8},
    "group:guests": {"role": "reader"},
}


def settings_of(provider: Provider, rules=RULES, **more) -> dict:
    return {"oidc": OidcSettings(issuer=provider.url, client_id="tandem", rules=rules, **more)}


@pytest.fixture(scope="module")
def provider():
    with running_provider() as provider:
        for name in ("ann", "bob", "boss", "fifth", "lost"):
            address = f"{name}@example.com"
            provider.know(f"{name}-1", email=address, email_verified=True)
        yield provider


@pytest.fixture(autouse=True)
def honest(provider):
    provider.forge = None


@pytest.fixture(scope="module")
def gate(provider, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gateway")
    secret = folder / "secret"
    secret.write_text("client-secret-of-a-test\n")
    with running_gateway(folder, **settings_of(provider, client_secret_file=secret)) as gate:
        yield gate


def begin(client: httpx.Client, next: str = "/") -> str:
    """Return the provider's address for a browser that begins to sign in."""
    answer = client.get("/sign-in/oidc", params={"next": next})
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


def enter(client: httpx.Client, provider: Provider, sub: str, next: str = "/") -> httpx.Response:
    """Sign a browser in as a person, and return the gateway's answer."""
    return client.get(provider.approve(begin(client, next), sub))


def grant_of(gate, owner: str):
    found = [key for key in gate.gateway.keys.all() if key.owner == owner]
    return next(key for key in found if key.name.startswith("oidc:"))


def sentence(answer: httpx.Response) -> str:
    return re.search(r'role="alert">(.*?)</p>', answer.text, re.DOTALL)[1]


def test_an_allowed_person_signs_in_and_out(gate, provider):
    with browser(gate) as client:
        page = client.get("/sign-in?next=/devices")
        assert "Sign in at localhost" in page.text
        answer = enter(client, provider, "ann-1", "/devices")
        assert answer.status_code == 200, sentence(answer)
        assert 'content="0; url=/devices"' in answer.text
        (cookie,) = answer.headers.get_list("set-cookie")
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        page = client.get("/devices")
        assert page.status_code == 200
        assert "ann@example.com" in page.text
        key = grant_of(gate, "ann@example.com")
        assert (key.role, round((key.expires_at - time.time()) / 3600)) == ("member", 8)
        assert client.post("/sign-out", data={"form_token": token_in(page)}).status_code == 303
        assert client.get("/devices").status_code == 303


def test_the_flow_has_state_nonce_pkce_and_a_lax_cookie_of_its_own_path(gate, provider):
    with browser(gate) as client:
        answer = client.get("/sign-in/oidc")
        (cookie,) = answer.headers.get_list("set-cookie")
        assert {"HttpOnly", "SameSite=lax", "Path=/sign-in/oidc", "Max-Age=600"} <= {
            *cookie.split("; ")
        }
        asked = query_of(answer.headers["location"])
        assert asked["redirect_uri"] == f"{gate.url}/sign-in/oidc/callback"
        assert (asked["response_type"], asked["code_challenge_method"]) == ("code", "S256")
        assert asked["scope"].split() == ["openid", "email", "profile"]
        assert client.get(provider.approve(answer.headers["location"], "ann-1")).status_code == 200
        verifier = provider.forms[-1]["code_verifier"]
        assert asked["code_challenge"] == encoded(hashlib.sha256(verifier.encode()).digest())
        assert asked["nonce"] != asked["state"]


@pytest.mark.parametrize(
    ("sub", "claims", "owner", "role"),
    [
        (
            "boss-1",
            {"email": "Boss@Example.com", "email_verified": True},
            "boss@example.com",
            "admin",
        ),
        (
            "new-1",
            {"email": "new@example.com", "email_verified": "true"},
            "new@example.com",
            "member",
        ),
        ("g-1", {"groups": ["other", "ml"]}, "team", "maintainer"),
        ("g-2", {"groups": "ml"}, "team", "maintainer"),
        (
            "g-3",
            {"email": "guest@other.org", "email_verified": True, "groups": ["guests"]},
            "guest@other.org",
            "reader",
        ),
    ],
)
def test_the_first_fitting_rule_gives_owner_and_role(gate, provider, sub, claims, owner, role):
    provider.know(sub, **claims)
    with browser(gate) as client:
        answer = enter(client, provider, sub)
        assert answer.status_code == 200, sentence(answer)
        assert client.get("/").status_code == 200
    assert grant_of(gate, owner).role == role


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"email": "eve@evil.org", "email_verified": True}, "rule lets eve@evil.org sign in"),
        ({"email": "eve@example.com"}, "without a confirmed"),
        ({"email": "eve@example.com", "email_verified": False}, "without a confirmed"),
        ({"email": "eve@example.com", "email_verified": 1.5}, "without a confirmed"),
        ({"email": ["eve@example.com"], "email_verified": True}, "without a confirmed"),
        ({"email": "eve@evil.org@example.com", "email_verified": True}, "without a confirmed"),
        ({"email": "\u212aate@example.com", "email_verified": True}, "without a confirmed"),
        ({"email": "eve@xexample.com", "email_verified": True}, "rule lets eve@"),
        ({"email": "e/ve@example.com", "email_verified": True}, "owner can be named after"),
        ({"email": "eve@example.com\n", "email_verified": True}, "rule lets eve@"),
        ({"email": f"{'e' * 60}@example.com", "email_verified": True}, "owner can be named after"),
        ({"groups": ["guests"]}, "owner can be named after"),
        ({"groups": {"ml": False}, "email": "local"}, "without a confirmed"),
    ],
)
def test_others_are_refused_with_a_sentence(gate, provider, claims, said):
    provider.know("eve-1", **claims)
    with browser(gate) as client:
        answer = enter(client, provider, "eve-1")
        assert answer.status_code == 403
        assert said in sentence(answer)
        assert "ask an admin of this gateway" in sentence(answer)
        assert 'name="key"' in answer.text
        assert client.get("/").status_code == 303


def test_another_person_never_gets_an_existing_owner(gate, provider):
    new_key(gate, owner="taken@example.com")
    provider.know("taken-1", email="taken@example.com", email_verified=True)
    provider.know("one-1", email="one@example.com", email_verified=True)
    provider.know("two-1", email="ONE@example.com", email_verified=True)
    with browser(gate) as client:
        assert enter(client, provider, "one-1").status_code == 200
    for sub in ("taken-1", "two-1"):
        with browser(gate) as client:
            answer = enter(client, provider, sub)
            assert answer.status_code == 403
            assert "exists and is somebody else" in sentence(answer)


def test_a_key_for_programs_of_the_same_owner_changes_nothing(gate, provider):
    with browser(gate) as client:
        assert enter(client, provider, "bob-1").status_code == 200
        new_key(gate, owner="bob@example.com")
        assert enter(client, provider, "bob-1").status_code == 200


def test_a_rule_may_name_an_existing_owner(gate, provider):
    new_key(gate, owner="ann")
    with browser(gate) as client:
        assert enter(client, provider, "fifth-1").status_code == 200
    assert grant_of(gate, "ann").role == "member"


def test_a_grant_expires_in_the_middle_and_a_repeated_sign_in_renews_it(gate, provider):
    now = time.time()
    clocks = (gate.gateway.keys, gate.gateway.page_sessions)
    try:
        with browser(gate) as early, browser(gate) as late:
            assert enter(early, provider, "lost-1").status_code == 200
            for each in clocks:
                each._clock = lambda: now + 7 * 3600
            assert early.get("/").status_code == 200
            assert enter(late, provider, "lost-1").status_code == 200
            for each in clocks:
                each._clock = lambda: now + 8 * 3600 + 60
            assert early.get("/").status_code == 303, "its own eight hours are over"
            assert late.get("/").status_code == 200
    finally:
        for each in clocks:
            each._clock = time.time
    assert len([k for k in gate.gateway.keys.all() if k.owner == "lost@example.com"]) == 1


def test_a_revoked_grant_ends_at_once_and_refuses_until_its_hours_are_over(gate, provider):
    provider.know("rev-1", email="rev@example.com", email_verified=True)
    with browser(gate) as client:
        assert enter(client, provider, "rev-1").status_code == 200
        key = grant_of(gate, "rev@example.com")
        gate.run(gate.gateway.keys.revoke(key.id))
        assert client.get("/").status_code == 303
        answer = enter(client, provider, "rev-1")
        assert (answer.status_code, "ended your access" in sentence(answer)) == (403, True)
        key.expires_at = time.time() - 1
        assert enter(client, provider, "rev-1").status_code == 200
        assert client.get("/").status_code == 200


def test_two_tabs_sign_in_at_once_with_one_grant(gate, provider):
    provider.know("tabs-1", email="tabs@example.com", email_verified=True)
    with browser(gate) as client, ThreadPoolExecutor(2) as threads:
        backs = [provider.approve(begin(client, path), "tabs-1") for path in ("/", "/devices")]
        answers = [*threads.map(client.get, backs)]
    assert ['url=/"' in answers[0].text, 'url=/devices"' in answers[1].text] == [True, True]
    assert len([k for k in gate.gateway.keys.all() if k.owner == "tabs@example.com"]) == 1


def test_a_used_answer_is_refused(gate, provider):
    with browser(gate) as client:
        back = provider.approve(begin(client), "ann-1")
        assert client.get(back).status_code == 200
        again = client.get(back)
        assert (again.status_code, "used before" in sentence(again)) == (400, True)
        gate.gateway.oidc._used.clear()  # as after a restart
        again = client.get(back)
        assert (again.status_code, "invalid_grant" in sentence(again)) == (400, True)


@pytest.mark.parametrize(
    "change", ["no cookie", "other cookie", "state", "no state", "old", "next"]
)
def test_an_answer_for_another_browser_is_refused_before_the_provider_is_asked(
    gate, provider, change, monkeypatch
):
    if change == "old":
        monkeypatch.setattr(oidc, "FLOW_SECONDS", -1)
    with browser(gate) as client:
        back = provider.approve(begin(client), "ann-1")
        state = query_of(back)["state"]
        if change == "no cookie":
            client.cookies.clear()
        elif change == "other cookie":
            client.cookies.clear()
            begin(client)
        elif change == "state":
            back = back.replace(state, "1" + state)
        elif change == "no state":
            back = back.replace(state, "")
        elif change == "next":
            path = b"//evil.org".hex()
            end, nonce, _, signature = state.split(".")
            back = back.replace(state, f"{end}.{nonce}.{path}.{signature}")
        exchanges = len(provider.forms)
        answer = client.get(back)
        assert answer.status_code == 400
        assert "begin it again" in sentence(answer)
        assert len(provider.forms) == exchanges
        assert client.get("/").status_code == 303


def signed(change):
    return lambda claims, key: jwt.encode({"alg": "RS256"}, {**claims, **change(claims)}, key)


def encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).decode().rstrip("=")


def unsigned(claims, key, *, alg="none") -> str:
    return ".".join([*(encoded(json.dumps(part).encode()) for part in ({"alg": alg}, claims)), ""])


def by_secret(claims, key) -> str:
    return jwt.encode({"alg": "HS256"}, claims, OctKey.import_key("client-secret-of-a-test"))


def by_public_key(claims, key) -> str:
    text = unsigned(claims, key, alg="HS256").removesuffix(".")
    digest = hmac.digest(key.as_pem(private=False), text.encode(), "sha256")
    return f"{text}.{encoded(digest)}"


def by_stranger(claims, key) -> str:
    return jwt.encode({"alg": "RS256"}, claims, RSAKey.generate_key(2048))


@pytest.mark.parametrize(
    "forge",
    [
        unsigned,
        by_secret,
        by_public_key,
        by_stranger,
        signed(lambda claims: {"nonce": "of-another"}),
        signed(lambda claims: {"nonce": None}),
        signed(lambda claims: {"iss": "http://localhost:1"}),
        signed(lambda claims: {"aud": "another"}),
        signed(lambda claims: {"aud": "another", "azp": "tandem"}),
        signed(lambda claims: {"aud": ["tandem", "another"]}),
        signed(lambda claims: {"aud": ["tandem", "another"], "azp": "another"}),
        signed(lambda claims: {"exp": int(time.time()) - 3600}),
        signed(lambda claims: {"exp": None}),
        signed(lambda claims: {"iat": int(time.time()) + 3600}),
        signed(lambda claims: {"sub": ""}),
        signed(lambda claims: {"at_hash": "AAAA"}),
        lambda claims, key: "no token",
        lambda claims, key: "",
    ],
)
def test_a_wrong_id_token_signs_nobody_in(gate, provider, forge):
    provider.forge = forge
    with browser(gate) as client:
        answer = enter(client, provider, "ann-1")
        assert answer.status_code == 403
        assert "the ID token of localhost was refused" in sentence(answer).replace("The", "the")
        assert client.get("/").status_code == 303


def test_keys_are_kept_and_asked_for_once_more_at_an_unknown_one(gate, provider):
    with browser(gate) as client:
        assert enter(client, provider, "ann-1").status_code == 200
        known = provider.paths.count("/jwks")
        assert enter(client, provider, "ann-1").status_code == 200
        assert provider.paths.count("/jwks") == known
        provider.change_key()
        provider.forge = lambda claims, key: jwt.encode(
            {"alg": "RS256", "kid": key.kid}, claims, key
        )
        assert enter(client, provider, "ann-1").status_code == 200
        assert provider.paths.count("/jwks") == known + 1
        provider.forge = lambda claims, key: jwt.encode({"alg": "RS256", "kid": "?"}, claims, key)
        assert enter(client, provider, "ann-1").status_code == 403
        assert provider.paths.count("/jwks") == known + 2
    assert provider.paths.count("/.well-known/openid-configuration") == 1


@pytest.mark.parametrize(
    "next", ["//evil.org", "https://evil.org", "/\\evil.org", "javascript:1", "/\tx"]
)
def test_a_sign_in_leads_to_no_other_site(gate, provider, next):
    with browser(gate) as client:
        answer = enter(client, provider, "ann-1", next)
        assert 'content="0; url=/"' in answer.text
        assert "evil" not in answer.text


def test_a_long_path_is_not_sent_to_the_provider(gate, provider):
    with browser(gate) as client:
        answer = enter(client, provider, "ann-1", "/?" + "x" * 1000)
        assert 'content="0; url=/"' in answer.text


def test_a_person_who_declines_is_told_so(gate, provider):
    with browser(gate) as client:
        state = query_of(begin(client))["state"]
        back = f"/sign-in/oidc/callback?state={state}&error="
        answer = client.get(f"{back}access_denied")
        assert (answer.status_code, "(access_denied)" in sentence(answer)) == (403, True)
        assert "<b" not in sentence(client.get(f"{back}<b>"))


def test_sign_ins_and_refusals_are_in_the_audit_log(gate, provider):
    provider.know("mallory-1", email="mallory@evil.org", email_verified=True)
    with browser(gate) as client:
        enter(client, provider, "ann-1")
        enter(client, provider, "mallory-1")
    with gate.http() as client:
        text = client.get("/api/v1/audit").text
    assert grant_of(gate, "ann@example.com").id in text
    assert "no rule lets mallory@evil.org sign in" in text


def test_a_program_gets_a_typed_error(gate):
    with browser(gate) as client:
        answer = client.get("/sign-in/oidc/callback?state=x&code=y", headers={"Accept": "*/*"})
        assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")


def test_without_an_answer_of_the_provider_keys_go_on_working(tmp_path):
    with running_provider() as provider:
        gone = settings_of(provider)
    with running_gateway(tmp_path, **gone) as gate, browser(gate) as client:
        answer = client.get("/sign-in/oidc")
        assert answer.status_code == 503
        assert "does not answer properly" in sentence(answer)
        told = client.get("/sign-in/oidc", headers={"Accept": "*/*"})
        assert (told.status_code, told.json()["type"]) == (503, "sign_in_failed")
        assert sign_in(client).status_code == 303
        assert client.get("/").status_code == 200


def test_a_silent_provider_is_given_up_after_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(oidc, "_DEADLINE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        chosen = OidcSettings(issuer=url, client_id="tandem", rules=RULES)
        with running_gateway(tmp_path, oidc=chosen) as gate, browser(gate) as client:
            assert client.get("/sign-in/oidc").status_code == 503


@pytest.mark.parametrize(
    "discovery",
    [
        {"issuer": "http://localhost:1"},
        {"token_endpoint": "http://example.com/token"},
        {"jwks_uri": "file:///etc/passwd"},
        {"authorization_endpoint": 7},
    ],
)
def test_a_provider_that_describes_itself_wrongly_is_not_used(tmp_path, discovery):
    with running_provider() as provider, running_gateway(tmp_path, **settings_of(provider)) as gate:
        provider.discovery = discovery
        with browser(gate) as client:
            assert client.get("/sign-in/oidc").status_code == 503


def test_an_address_that_the_id_token_lacks_comes_from_the_provider(gate, provider):
    provider.forge = lambda claims, key: jwt.encode(
        {"alg": "RS256"}, {n: c for n, c in claims.items() if "email" not in n}, key
    )
    with browser(gate) as client:
        assert enter(client, provider, "ann-1").status_code == 200


def test_a_public_client_names_itself_in_the_form(tmp_path, provider):
    with running_gateway(tmp_path, **settings_of(provider)) as gate, browser(gate) as client:
        enter(client, provider, "ann-1")  # which this provider refuses
    assert provider.forms[-1]["client_id"] == "tandem"
    assert {"code", "code_verifier"} <= provider.forms[-1].keys()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"issuer": "http://login.example.com"}, "must begin with https://"),
        ({"client_secret_file": Path("missing")}, "(missing) cannot be read"),
        (
            {"client_secret_file": Path(os.devnull)},
            "(/dev/null) is empty; write the client's secret",
        ),
    ],
)
def test_settings_that_cannot_work_end_the_start(provider, change, said):
    settings = settings_of(provider)["oidc"].model_copy(update=change)
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        OidcProvider(settings)


@pytest.mark.parametrize("change", [{"rules": {}}, {"client_id": ""}, {"secret": "x"}])
def test_incomplete_settings_are_refused(change):
    whole = {"issuer": "https://x", "client_id": "y", "rules": RULES}
    OidcSettings.model_validate(whole)
    for wrong in (change, {"rules": {"ann": {"role": "member"}}}):
        with pytest.raises(ValidationError):
            OidcSettings.model_validate({**whole, **wrong})


def test_a_gateway_without_a_provider_has_no_such_page(tmp_path):
    with running_gateway(tmp_path) as gate, browser(gate) as client:
        assert "/sign-in/oidc" not in client.get("/sign-in").text
        assert client.get("/sign-in/oidc").status_code == 404
        assert client.get("/sign-in/oidc/callback").status_code == 404


def test_the_settings_file_of_the_docs_is_read_in_its_order(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    file = tmp_path / "tandem.toml"
    file.write_text(re.search(r"```toml\n(\[oidc\].*?)```", page, re.DOTALL)[1])
    (text,) = (each.text for each in read_config_file(file).values())
    rules = OidcSettings.model_validate_json(text).rules
    assert [rule.role for rule in rules.values()] == ["admin", "maintainer", "member"]
