"""What a host has, and has left."""

from __future__ import annotations

from types import SimpleNamespace

from tandem import host


def test_what_is_free_is_bounded_by_the_container_whose_cache_counts_as_free(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: SimpleNamespace(available=9000))
    assert host.free_memory_bytes() == 9000
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 1500\ninactive_file 2500\n")
    assert host.free_memory_bytes() == 3500
    (tmp_path / "memory.max").write_text("max\n")
    assert host.free_memory_bytes() == 9000
