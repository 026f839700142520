"""Which tests go to the same process when `make test` runs them in several."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/integration/", "tests/conformance/", "tests/component/sampler/")
"""Folders whose tests share a stack, or engines."""


class ByModule(LoadScopeScheduling):
    """Gives a process that is free the next module, or the next of these folders."""

    def _split_scope(self, nodeid: str) -> str:
        return _shared_folder(nodeid) or nodeid.partition("::")[0]


def begin_with_longest(items: list[pytest.Item]) -> None:
    """So that at the end no process waits long for another."""
    items.sort(key=lambda item: not _shared_folder(item.nodeid))


def _shared_folder(nodeid: str) -> str:
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), "")
