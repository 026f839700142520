from __future__ import annotations

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from gateway.owners.auth.audit import AuditLog
from gateway.owners.auth.bootstrap import read_bootstrap_key, take_bootstrap_key
from gateway.owners.auth.keys import BOOTSTRAP_NAME, KeyStore, NewKey
from gateway.storage.database import Database
from tandem.errors import InvalidRequest
from tandem.settings.gateway import GatewaySettings
from tests.support.audit_log import days_of_tests
from tests.support.postgres import url_for

pytestmark = pytest.mark.usefixtures("each_database")

FIRST, SECOND = f"tml-{'a' * 32}", f"tml-{'b' * 43}"


@pytest.fixture
async def database(tmp_path):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    yield database
    await database.close()


async def started(database, folder, secret: str = "", *, local: str = "tml-local") -> KeyStore:
    """Start a gateway with this bootstrap key. Return its keys."""
    keys = KeyStore(database=database)
    await keys.open()
    keys.set_local(local)
    settings = GatewaySettings()
    if secret:
        (file := folder / "bootstrap").write_text(secret)
        settings = GatewaySettings(bootstrap_key_file=file)
    await take_bootstrap_key(settings, keys=keys, audit=AuditLog(database=database))
    return keys


def ended(keys: KeyStore, *secrets: str) -> list[str | None]:
    return [keys.ended(keys.find(secret.encode())) for secret in secrets]


async def acts(database) -> list[tuple[str, str]]:
    log = AuditLog(database=database)
    return [
        (entry.action, entry.target)
        for day in days_of_tests()
        for entry in await log.of_day(day=day, event_type="organizations")
    ]


async def test_the_key_of_the_setting_is_an_admins_and_is_made_once(database, tmp_path):
    for _ in range(2):
        keys = await started(database, tmp_path, FIRST)
        key = keys.find(FIRST.encode())
        assert (key.owner, key.role, key.local) == ("local", "admin", False)
        assert len(keys.all()) == 2, "the local one and this one"
    assert await acts(database) == [("apikey_create", key.id)]


async def test_another_key_in_its_place_revokes_it_and_the_audit_log_has_both(database, tmp_path):
    before = (await started(database, tmp_path, FIRST)).find(FIRST.encode())
    keys = await started(database, tmp_path, SECOND)
    assert ended(keys, FIRST, SECOND) == ["revoked", None]
    after = keys.find(SECOND.encode())
    expected = [("apikey_create", before.id), ("apikey_create", after.id)]
    assert await acts(database) == [*expected, ("apikey_delete", before.id)]
    assert ended(await started(database, tmp_path, SECOND), FIRST, SECOND) == ["revoked", None]


async def test_without_the_setting_the_key_stays_as_it_is(database, tmp_path):
    await started(database, tmp_path, FIRST)
    assert ended(await started(database, tmp_path), FIRST) == [None]


async def test_a_key_that_was_revoked_stays_revoked_and_replaces_no_other(database, tmp_path):
    """As after a start with an old key, or after the admin revoked it."""
    await started(database, tmp_path, FIRST)
    await started(database, tmp_path, SECOND)
    with capture_logs() as lines:
        keys = await started(database, tmp_path, FIRST)
    assert ended(keys, FIRST, SECOND) == ["revoked", None]
    assert [line["event"] for line in lines] == ["bootstrap_key_revoked"]
    assert FIRST not in str(lines)


async def test_a_key_that_is_already_anothers_is_refused(database, tmp_path):
    keys = await started(database, tmp_path)
    _, secret = await keys.create(NewKey(owner="ann", role="member"))
    for key, local in ((secret, "tml-local"), (FIRST, FIRST)):
        with pytest.raises(InvalidRequest, match="is already the key k-") as refused:
            await started(database, tmp_path, key, local=local)
        assert key not in str(refused.value)


def test_nobody_makes_a_key_that_looks_like_the_bootstrap_key():
    with pytest.raises(ValidationError, match="TANDEM_BOOTSTRAP_KEY_FILE"):
        NewKey(owner="ann", role="member", name=BOOTSTRAP_NAME)


def test_what_is_no_key_is_refused_in_a_sentence_that_does_not_show_it(tmp_path):
    file = tmp_path / "key"
    bad = (
        "secret",
        "tml-secret",
        "a" * 40,
        f"tml-{'a' * 31}",
        f"tml-{'a' * 32} b",
        f"tml-{'é' * 40}",
    )
    for text in (*bad, f"tml-{'a' * 201}"):
        file.write_text(f"{text}\n")
        settings = GatewaySettings(bootstrap_key_file=file)
        with pytest.raises(InvalidRequest, match="openssl rand") as refused:
            read_bootstrap_key(settings)
        assert text not in str(refused.value)
    file.write_text("\n")
    with pytest.raises(InvalidRequest, match="openssl rand"):
        read_bootstrap_key(GatewaySettings(bootstrap_key_file=file))
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read_bootstrap_key(GatewaySettings(bootstrap_key_file=tmp_path / "none"))


def test_the_key_of_a_file_is_its_text_without_the_end_of_the_line(tmp_path):
    (tmp_path / "key").write_text(f"{FIRST}\n")
    assert read_bootstrap_key(GatewaySettings(bootstrap_key_file=tmp_path / "key")) == FIRST
    assert read_bootstrap_key(GatewaySettings()) == ""
