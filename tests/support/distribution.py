"""Distributes tests over processes for `make test`, and reports the death of such a process."""

from __future__ import annotations

import pytest
from xdist.dsession import DSession
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TOGETHER = ("tests/integration/", "tests/conformance/", "tests/component/sampler/")
"""Folders of tests that share a stack or engines."""


class ByModule(LoadScopeScheduling):
    """Gives a free process the next module, or the next of these folders."""

    def _split_scope(self, nodeid: str) -> str:
        return _shared_folder(nodeid) or nodeid.partition("::")[0]


def begin_with_longest(items: list[pytest.Item]) -> None:
    """Put long tests first, so that no process waits long at the end. xdist would begin with the
    modules of most tests (`--no-loadscope-reorder`)."""
    items.sort(key=lambda item: not _shared_folder(item.nodeid))


def end_with(node: WorkerController, error: object) -> None:
    """Report the test during which a process died, and end the session.

    The scheduler would start another process, but never give it the remaining tests."""
    session = node.config.pluginmanager.get_plugin("dsession")
    assert isinstance(session, DSession) and session.sched is not None
    test = session.sched.remove_node(node) if node in session.sched.nodes else None
    if test is not None:
        session.handle_crashitem(test, node)
    reason = f"{node.gateway.id} died {f'in {test}' if test else 'between two tests'}: {error}"
    pytest.exit(reason, returncode=pytest.ExitCode.TESTS_FAILED)


def _shared_folder(nodeid: str) -> str:
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), "")
