"""Keys, the tokens exchanged for them, and their callers."""

from __future__ import annotations

import jwt
import tinker

from gateway.owners.auth.keys import digest_of, id_of
from tests.support.gateway.running import KEY

KEY_ID = id_of(digest_of(KEY.encode()))


def test_whoami_names_the_owner_of_the_key(gate):
    who = tinker.RestClient(base_url=gate.url, api_key=KEY).whoami().result()
    assert who.user_urn == "tml:organization_user:local"
    assert who.org_urn == "tml:organization:tandem"
    assert who.email is None


def test_every_client_goes_on_with_a_token_and_its_key_is_sent_once(gate):
    with gate.service() as service:
        service.create_lora_training_client("tiny:full").result()
        token = service.holder.run_coroutine_threadsafe(service.holder.get_identity_jwt()).result()
        assert token.startswith("eyJ")
        direct = tinker.RestClient(base_url=gate.url, api_key=token)
        assert direct.whoami().result().user_urn.endswith(":local")
        assert direct.list_sessions().result().sessions


def test_an_expired_token_is_told_apart_so_that_the_sdk_gets_a_new_one(gate):
    with gate.http() as client:
        expired = jwt.encode(
            {
                "iss": "tandem-gateway",
                "sub": "tml:organization_user:local",
                "iat": 1,
                "exp": 2,
                "key": KEY_ID,
                "role": "admin",
            },
            gate.gateway.signing_key,
        )
        answer = client.get("/api/v1/sessions", headers={"X-API-Key": expired})
        assert answer.status_code == 401
        assert 'error="invalid_token"' in answer.headers["WWW-Authenticate"]
        assert answer.json()["type"] == "token_refused"
        answer = client.get("/api/v1/sessions", headers={"X-API-Key": "tml-wrong"})
        assert answer.status_code == 401
        assert "invalid_token" not in answer.headers["WWW-Authenticate"]


def test_the_sdk_replaces_a_token_that_the_gateway_refuses(gate):
    """For example after a new signing key."""
    rest = tinker.RestClient(base_url=gate.url, api_key=KEY + "")
    assert rest.whoami().result()
    gate.run(lambda: setattr(gate.gateway.identity, "_signing_key", b"n" * 32))
    gate.run(lambda: gate.gateway.identity._read.cache_clear())
    assert rest.list_sessions().result() is not None


def test_a_key_can_be_asked_about_and_the_local_one_is_not_deleted(gate):
    with gate.http() as client:
        about = client.get("/api/v1/auth/apikey/me").json()
        assert about["key_id"] == int(KEY_ID.removeprefix("k-"), 16)
        assert about["details"]["user_details"]["email"] == "local"
        assert KEY not in str(about)
        refused = client.delete("/api/v1/auth/apikey/me")
        assert refused.status_code == 403
        assert "local key" in refused.json()["detail"]
        assert client.get("/api/v1/sessions").status_code == 200
