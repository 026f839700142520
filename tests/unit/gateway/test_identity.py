from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import jwt
import pytest

from gateway.owners.auth.identity import Caller, Identity, Readers
from gateway.owners.auth.keys import KeyStore, digest_of, id_of
from gateway.storage.database import Database
from tandem.errors import TokenRefused, Unauthenticated

KEY = "tml-test-key"
SIGNING_KEY = b"k" * 32


KEY_ID = id_of(digest_of(KEY.encode()))


def identity(*, signing_key: bytes = SIGNING_KEY, ttl: float = 600) -> Identity:
    """Only the local key exists. The database is never opened."""
    keys = KeyStore(database=Database(url="sqlite://", data_dir=Path()))
    keys.set_local(KEY)
    return Identity(keys=keys, signing_key=signing_key, token_ttl=ttl)


def forged(**changes: object) -> bytes:
    now = int(time.time())
    claims = {
        "iss": "tandem-gateway",
        "sub": "tml:organization_user:local",
        "iat": now,
        "exp": now + 600,
        "key": KEY_ID,
        "role": "admin",
    } | changes
    return jwt.encode({k: v for k, v in claims.items() if v is not None}, SIGNING_KEY).encode()


def test_a_token_names_the_caller_of_its_key():
    known = identity()
    caller = known.identify(KEY.encode())
    assert (caller.owner, caller.role, caller.expires_at) == ("local", "admin", None)
    again = known.identify(known.issue(caller).encode())
    assert (again.owner, again.key_id, again.role) == ("local", caller.key_id, "admin")
    assert again.expires_at == pytest.approx(time.time() + 600, abs=60)


def test_only_the_key_and_its_own_tokens_are_taken():
    known = identity()
    for wrong in (b"", b"tml-other", KEY.encode() + b"x", KEY[:-1].encode()):
        with pytest.raises(Unauthenticated) as refused:
            known.identify(wrong)
        assert not isinstance(refused.value, TokenRefused)
    assert known.identify(forged()).owner == "local", "the forgery is a good one otherwise"
    unsigned = jwt.encode({"sub": "x"}, None, algorithm="none").encode()
    for token in (
        unsigned,
        forged(exp=int(time.time()) - 1),
        forged(exp=None),
        forged(iss="another"),
        forged(key="k-000000000007"),
        forged()[:-4] + b"AAAA",
        b"eyJ not a token",
        identity(signing_key=b"x" * 32).issue(known.identify(KEY.encode())).encode(),
    ):
        with pytest.raises(TokenRefused):
            known.identify(token)


def test_a_token_ends_with_its_key_and_with_its_time_also_when_it_was_seen_before():
    keys, later = KeyStore(database=Database(url="sqlite://", data_dir=Path())), [0.0]
    keys.set_local(KEY)
    known = Identity(
        keys=keys, signing_key=SIGNING_KEY, token_ttl=600, clock=lambda: time.time() + later[-1]
    )
    token = known.issue(known.identify(KEY.encode())).encode()
    assert known.identify(token).owner == "local"
    keys.set_local("tml-new")
    with pytest.raises(TokenRefused, match="no longer valid"):
        known.identify(token)
    keys.set_local(KEY)
    later.append(601.0)
    with pytest.raises(TokenRefused):
        known.identify(token)


def test_a_token_cannot_renew_itself_for_ever():
    known = identity(ttl=600)
    first = known.identify(known.issue(known.identify(KEY.encode())).encode())
    longer = identity(ttl=6000)
    second = longer.identify(longer.issue(first).encode())
    assert second.expires_at == first.expires_at


def test_owner_and_role_are_those_of_the_key_whatever_the_token_says():
    """Even with a valid signature, as an earlier version may have issued."""
    caller = identity().identify(forged(sub="tml:organization_user:eve", role="reader"))
    assert (caller.owner, caller.role) == ("local", "admin")


def test_a_token_does_not_outlive_its_key():
    keys = KeyStore(database=Database(url="sqlite://", data_dir=Path()))
    local = keys.set_local(KEY)
    ends = time.time() + 60
    keys._keys[local.id] = replace(local, expires_at=ends)
    known = Identity(keys=keys, signing_key=SIGNING_KEY, token_ttl=600)
    token = known.issue(known.identify(KEY.encode()))
    claims = jwt.decode(token, SIGNING_KEY, algorithms=["HS256"])
    assert claims["exp"] == int(ends)


def test_a_key_of_ci_changes_things_but_not_on_the_page():
    ci, member = (Caller(owner="ann", key_id="k-1", role=role) for role in ("ci", "member"))
    assert (ci.may_change, ci.may_use_page) == (True, False)
    assert member.may_use_page


def test_a_key_for_metrics_sees_nothing_of_its_own_owner_and_lends_nothing():
    scraper = Caller(owner="ann", key_id="k-1", role="metrics")
    assert not scraper.may_see("ann")
    assert not scraper.may_change
    assert not Readers((scraper,)).may_read(owner="ann", public=False)
    assert Caller(owner="ann", key_id="k-2", role="reader").may_see("ann")
