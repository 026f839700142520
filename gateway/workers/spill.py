"""The folder on disk for the state of sleeping trainers."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from tandem.settings.gateway import GatewaySettings


def spill_folder(settings: GatewaySettings) -> Path:
    return settings.spill_dir or settings.data_dir.absolute() / "spill"


async def free_on_disk(settings: GatewaySettings) -> int:
    """Return the free bytes for the state of sleepers. Raises `OSError`."""

    def ask(folder: Path) -> int:
        there = next(each for each in (folder, *folder.parents) if each.exists())
        return shutil.disk_usage(there).free

    free = await asyncio.to_thread(ask, spill_folder(settings))
    return max(0, free - settings.min_free_bytes)
