from __future__ import annotations

import os

import pytest

from tandem.agent import service
from tandem.errors import InvalidRequest


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        (None, {"TORCHINDUCTOR_CACHE_DIR": "compiled", "VLLM_CACHE_ROOT": "compiled/vllm"}),
        ("/cache", {"TORCHINDUCTOR_CACHE_DIR": "/cache", "VLLM_CACHE_ROOT": "/cache"}),
    ],
)
def test_compiled_code_is_in_the_data_directory_unless_the_environment_names_another_place(
    monkeypatch, tmp_path, own, kept
):
    for name in kept:
        monkeypatch.setenv(name, own or "")
        if own is None:
            monkeypatch.delenv(name)
    for name in ("configure_logging", "set_process_limits"):
        monkeypatch.setattr(service, name, lambda **_: None)

    def no_further(_settings: object) -> None:
        raise InvalidRequest("the environment is made by then")

    monkeypatch.setattr(service, "pool_sizes", no_further)
    assert service.run(tmp_path) == 1
    assert {name: os.environ[name] for name in kept} == {
        name: str(tmp_path / place) for name, place in kept.items()
    }
