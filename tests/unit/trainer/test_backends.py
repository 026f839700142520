from __future__ import annotations

import pytest

from tandem.errors import WorkerStartFailed
from trainer_service.backends import backend_named, trainer_backend


def test_the_built_in_backend_is_found_by_its_name():
    assert backend_named("fsdp2").__name__ == "Fsdp2Backend"


def test_a_registered_backend_is_found_by_its_name():
    @trainer_backend("of this test")
    class Backend:
        pass

    assert backend_named("of this test") is Backend


def test_an_unknown_backend_is_refused_with_those_known():
    with pytest.raises(WorkerStartFailed, match=r"unknown trainer backend 'fsdp3'; known: .*fsdp2"):
        backend_named("fsdp3")
