from __future__ import annotations

import pytest
from pydantic import ValidationError
from sqlalchemy import select

from gateway.owners.auth.keys import KeyStore, NewKey, digest_of, id_of
from gateway.storage.database import Database
from gateway.storage.tables import keys as table
from tandem.cli.keys import parse_duration
from tandem.errors import InvalidRequest, UnknownKey, UserError
from tandem.protocol.http_host import is_loopback
from tests.support.postgres import on_sqlite, url_for

pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
async def database(tmp_path):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    yield database
    await database.close()


def new(role: str = "member", **about) -> NewKey:
    return NewKey(owner="ann", role=role, **about)


KEY = "tml-test-key"


@on_sqlite
async def test_the_database_holds_the_hash_of_a_key_and_never_the_key(database, tmp_path):
    keys = KeyStore(database=database)
    key, secret = await keys.create(new(name="laptop"))
    assert secret.startswith("tml-")
    assert len(secret) == 4 + 43, "256 bits in base64"
    row = await database.read_one(select(table))
    assert row["digest"] == digest_of(secret.encode())
    assert row["id"] == key.id == id_of(row["digest"])
    await database.close()
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
    assert key.id.encode() in kept
    assert secret.encode() not in kept
    assert secret.removeprefix("tml-").encode() not in kept


async def test_keys_are_found_again_after_a_restart_as_they_were_left(database):
    now = [1000.0]
    before = KeyStore(database=database, clock=lambda: now[0])
    _, good = await before.create(new())
    gone, revoked = await before.create(new())
    _, short = await before.create(new(expires_in=10.0))
    await before.revoke(gone.id)
    now[0] = 1011.0
    after = KeyStore(database=database, clock=lambda: now[0])
    await after.open()
    states = {secret: after.ended(after.find(secret.encode())) for secret in (good, revoked, short)}
    assert states == {good: None, revoked: "revoked", short: "expired"}
    assert after.find(b"tml-unknown") is None
    assert after.find(b"") is None


async def test_two_keys_whose_ids_are_the_same_are_still_two_keys(database):
    """An id is the beginning of a hash. The whole hash decides."""
    keys = KeyStore(database=database)
    key, secret = await keys.create(new())
    keys._keys[key.id] = type(key)(**{**vars(key), "digest": key.digest[:6] + bytes(26)})
    assert keys.find(secret.encode()) is None


async def test_the_last_use_is_written_behind_and_once_for_many_uses(database):
    now = [1000.0]
    keys = KeyStore(database=database, clock=lambda: now[0])
    key, _ = await keys.create(new())
    for now[0] in (1001.0, 1002.0, 1003.0):
        keys.note_use(key)
    await database.flush()
    assert (await database.read_one(select(table)))["last_used_at"] is None
    keys.write_uses()
    await database.flush()
    assert (await database.read_one(select(table)))["last_used_at"] == 1003.0
    assert not keys._unwritten
    again = KeyStore(database=database)
    await again.open()
    assert again.get(key.id).last_used_at == 1003.0


async def test_what_cannot_be_a_key_is_refused_with_what_is_wrong(database):
    keys = KeyStore(database=database)
    for owner in ("", "../x", "a b", "-a", "a" * 65, "\u00e9", "a/b", "a\n"):
        with pytest.raises(ValidationError, match="owner"):
            NewKey(owner=owner, role="member")
    with pytest.raises(ValidationError, match="printable"):
        new(name="a\x1b[31m")
    for expires_in in (0.0, -1.0, 1e12, float("nan")):
        with pytest.raises(ValidationError, match="expires_in"):
            new(expires_in=expires_in)
    with pytest.raises(UnknownKey, match="k-000000000000"):
        await keys.revoke("k-000000000000")
    with pytest.raises(InvalidRequest, match="local key"):
        await keys.revoke(keys.set_local(KEY).id)


def test_durations_are_read_as_they_are_meant():
    assert [parse_duration(text) for text in ("1s", "2m", "12h", "30d", "8w")] == [
        1, 120, 43_200, 2_592_000, 4_838_400,
    ]  # fmt: skip
    for text in ("", "30", "d", "0d", "-1d", "1y", "1.5d", "99999999d"):
        with pytest.raises(UserError, match="not a duration"):
            parse_duration(text)


def test_loopback_is_what_only_this_machine_reaches():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "", "example.org")))
