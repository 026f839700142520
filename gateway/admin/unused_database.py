"""Opens the database of a data directory while no gateway uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from gateway.storage.database import Database
from gateway.storage.drivers import is_postgresql
from gateway.storage.leadership import Leadership
from tandem.errors import InvalidRequest
from tandem.settings.gateway import GatewaySettings


@asynccontextmanager
async def unused_database(settings: GatewaySettings) -> AsyncIterator[Database]:
    """Open the database for the block. The caller has locked the data directory. Raise
    `InvalidRequest` if the gateway of another directory uses the database."""
    url = settings.database_url
    async with AsyncExitStack() as stack:
        leadership: Leadership | None = None
        if is_postgresql(url):
            opened = Leadership.open(url=url, timeout=settings.leader_timeout)
            leadership = await stack.enter_async_context(opened)
            if not await leadership.take_unless_used():
                raise InvalidRequest(
                    "a gateway uses the database: one of another data directory, in another "
                    "container or on another host; stop it first, or ask it for keys there"
                )
        database = Database(url=url, data_dir=settings.data_dir, leadership=leadership)
        stack.push_async_callback(database.close)
        await database.open()
        yield database
