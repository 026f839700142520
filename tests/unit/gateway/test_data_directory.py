from __future__ import annotations

from gateway.storage.data_directory import keep_api_key, locked_data_directory
from tests.support.files import watch_syncs


def test_a_new_directory_and_its_key_survive_a_power_failure(tmp_path, monkeypatch):
    synced = watch_syncs(monkeypatch)
    data_dir = tmp_path / "new" / "data"
    with locked_data_directory(data_dir):
        key = keep_api_key(data_dir)
    assert {tmp_path, data_dir.parent, data_dir} <= {*synced}
    assert (data_dir / "api_key").read_text().strip() == key
    with locked_data_directory(data_dir):
        assert keep_api_key(data_dir) == key
