from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tandem.errors import WorkerStartFailed
from trainer_service.backends import backend_named


def test_the_built_in_backend_is_found_by_its_name():
    assert backend_named("fsdp2").__name__ == "Fsdp2Backend"


def test_a_backend_of_an_installed_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    class Backend:
        pass

    module = ModuleType("of_this_test")
    module.Backend = Backend
    monkeypatch.setitem(sys.modules, "of_this_test", module)
    metadata = tmp_path / "of_this_test-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: of-this-test\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[tandem.trainer_backends]\nown = of_this_test:Backend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert backend_named("own") is Backend


def test_an_unknown_backend_is_refused_with_those_known():
    with pytest.raises(WorkerStartFailed, match=r"unknown trainer backend 'fsdp3'; known: .*fsdp2"):
        backend_named("fsdp3")
