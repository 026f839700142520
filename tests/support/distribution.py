"""Which tests go to the same process when `make test` runs them in several, and what is said when
such a process dies."""

from __future__ import annotations

import pytest
from xdist.dsession import DSession
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TOGETHER = ("tests/integration/", "tests/conformance/", "tests/component/sampler/")
"""Folders whose tests share a stack, or engines."""


class ByModule(LoadScopeScheduling):
    """Gives a process that is free the next module, or the next of these folders."""

    def _split_scope(self, nodeid: str) -> str:
        return _shared_folder(nodeid) or nodeid.partition("::")[0]


def begin_with_longest(items: list[pytest.Item]) -> None:
    """So that at the end no process waits long for another."""
    items.sort(key=lambda item: not _shared_folder(item.nodeid))


def end_with(node: WorkerController, error: object) -> None:
    """Report the test during which a process of tests has died, and end the session. The scheduler
    would start another process, which is never given what is left to do."""
    session = node.config.pluginmanager.get_plugin("dsession")
    assert isinstance(session, DSession) and session.sched is not None
    test = session.sched.remove_node(node) if node in session.sched.nodes else None
    if test is not None:
        session.handle_crashitem(test, node)
    reason = f"{node.gateway.id} died {f'in {test}' if test else 'between two tests'}: {error}"
    pytest.exit(reason, returncode=pytest.ExitCode.TESTS_FAILED)


def _shared_folder(nodeid: str) -> str:
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), "")
