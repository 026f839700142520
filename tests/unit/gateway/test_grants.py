"""The grants of people who sign in, when rules change."""

from __future__ import annotations

import pytest

from gateway.owners.auth.grants import grant_access
from gateway.owners.auth.identity import Caller
from gateway.owners.auth.keys import KeyStore
from gateway.storage.database import Database
from tandem.errors import PermissionDenied
from tandem.settings.oidc import OidcSettings
from tests.support.postgres import url_for

pytestmark = pytest.mark.usefixtures("each_database")

ADMIN = {"ann@example.com": {"role": "admin", "owner": "root"}}
MEMBER = {"@example.com": {"role": "member"}}


@pytest.fixture
async def database(tmp_path):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    yield database
    await database.close()


@pytest.fixture
async def keys(database):
    keys = KeyStore(database=database)
    await keys.open()
    return keys


async def sign_in(keys: KeyStore, rules: dict, *, name: str = "ann", sub: str = "") -> Caller:
    claims = {
        "sub": sub or f"{name}-1",
        "email": f"{name}@example.com",
        "email_verified": True,
    }
    settings = OidcSettings(issuer="https://example.com", client_id="tandem", rules=rules)
    return await grant_access(claims, settings=settings, keys=keys)


def is_valid(keys: KeyStore, caller: Caller) -> bool:
    return keys.ended(keys.get(caller.key_id)) is None


async def test_a_sign_in_as_another_owner_ends_the_grant_of_the_earlier_owner(keys, database):
    before = await sign_in(keys, ADMIN)
    after = await sign_in(keys, MEMBER)
    assert (before.owner, after.owner) == ("root", "ann@example.com")
    restarted = KeyStore(database=database)
    await restarted.open()
    for each in (keys, restarted):
        assert (is_valid(each, before), is_valid(each, after)) == (False, True)


async def test_a_person_without_a_rule_loses_the_grant_and_can_get_it_back(keys):
    before = await sign_in(keys, ADMIN)
    with pytest.raises(PermissionDenied, match="no rule lets ann@"):
        await sign_in(keys, {"bob@example.com": {"role": "member"}})
    assert not is_valid(keys, before)
    assert is_valid(keys, await sign_in(keys, ADMIN))


async def test_a_person_whose_new_owner_is_somebody_else_loses_the_grant(keys):
    await sign_in(keys, MEMBER, sub="another-account")
    before = await sign_in(keys, ADMIN)
    with pytest.raises(PermissionDenied, match="exists and is somebody else"):
        await sign_in(keys, MEMBER)
    assert not is_valid(keys, before)


async def test_revoking_the_only_grant_leaves_the_person_none(keys):
    before = await sign_in(keys, ADMIN)
    after = await sign_in(keys, MEMBER)
    await keys.revoke(after.key_id)
    for rules in (MEMBER, ADMIN):
        with pytest.raises(PermissionDenied, match="an admin has ended your access"):
            await sign_in(keys, rules)
    assert not is_valid(keys, before)


async def test_two_browsers_share_a_grant_and_a_demotion_reaches_both(keys):
    first = await sign_in(keys, {"ann@example.com": {"role": "admin"}})
    second = await sign_in(keys, MEMBER)
    assert first.key_id == second.key_id
    assert keys.get(first.key_id).role == "member"


async def test_a_sign_in_ends_no_grant_of_another_person_of_the_owner(keys):
    team = {"@example.com": {"role": "member", "owner": "team"}}
    bob = await sign_in(keys, team, name="bob")
    await sign_in(keys, team)
    await sign_in(keys, ADMIN)
    assert is_valid(keys, bob)
