from __future__ import annotations

from gateway.owners.auth.signing import is_signed, sign
from gateway.storage.data_directory import keep_api_key, keep_signing_key

KEY = bytes(32)


def test_the_key_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    key = keep_signing_key(tmp_path)
    assert len(key) == 32
    assert keep_signing_key(tmp_path) == key
    assert (tmp_path / "signing_key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["signing_key"]


def test_the_local_key_is_made_once_and_readable_by_its_owner_alone(tmp_path):
    key = keep_api_key(tmp_path)
    assert key.startswith("tml-")
    assert keep_api_key(tmp_path) == key
    assert (tmp_path / "api_key").stat().st_mode & 0o777 == 0o600


def test_a_signature_holds_for_the_same_parts_and_key_alone():
    signature = sign(KEY, "trace", "s-1", 17)
    assert is_signed(KEY, signature, "trace", "s-1", 17)
    for parts in [("trace", "s-1", 18), ("trace", "s-11", 7), ("traces", "-1", 17), ("trace",)]:
        assert not is_signed(KEY, signature, *parts)
    assert not is_signed(b"x" * 32, signature, "trace", "s-1", 17)
    assert not is_signed(KEY, signature[:-1], "trace", "s-1", 17)
    assert not is_signed(KEY, "ä", "trace", "s-1", 17)


def test_parts_are_kept_apart():
    assert sign(KEY, "a", "bc") != sign(KEY, "ab", "c")
