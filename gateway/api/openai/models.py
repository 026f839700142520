"""What the name of a model stands for, and which names there are.

A name is a base model's, a `tinker://RUN/sampler_weights/NAME` path, or a run's id, which stands
for what the run saved last for sampling: a model in training.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from gateway.api.access import Access
from gateway.auth.identity import Caller
from gateway.checkpoints.base_models import BaseModelEntry, BaseModels
from gateway.checkpoints.catalog import Checkpoint, CheckpointCatalog
from gateway.checkpoints.versions import VersionStore, WeightVersion
from gateway.identifiers import relative_version_folder
from gateway.runs.registry import RunRegistry
from gateway.sampling.sessions import base_version
from tandem.errors import UnknownModel, UnknownWeights

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,18}")
_SCHEME = "tinker://"
_MOST_LISTED = 1000


@dataclass(frozen=True)
class Served:
    """What a request samples from: `name` is how the client calls it, `rank` that of the
    adapter, 0 where it has none."""

    name: str
    model: BaseModelEntry
    version: WeightVersion
    rank: int


@dataclass(frozen=True)
class Listed:
    """A model in a list. `created` in seconds since 1970."""

    name: str
    base_model: str
    owner: str
    created: float
    max_length: int | None


class ServedModels:
    def __init__(
        self,
        *,
        models: BaseModels,
        checkpoints: CheckpointCatalog,
        versions: VersionStore,
        runs: RunRegistry,
        access: Access,
    ) -> None:
        self._models = models
        self._checkpoints = checkpoints
        self._versions = versions
        self._runs = runs
        self._access = access

    @asynccontextmanager
    async def reading(self, name: str, caller: Caller) -> AsyncIterator[Served]:
        """What the name stands for now; its files stay while the block runs. Raises
        `UnknownModel`, `UnknownWeights` or `InvalidRequest`, the same for what is another
        owner's as for what is not there."""
        if name.startswith(_SCHEME):
            readers = self._access.readers(caller)
            async with self._checkpoints.reading(name, readers=readers) as checkpoint:
                yield await self._of_checkpoint(name, checkpoint)
        elif _RUN_ID.fullmatch(name):
            with ExitStack() as pinned:
                with self._checkpoints.pins.resolving(name):
                    version = await self._newest(name, caller)
                    folder = relative_version_folder(version.name)
                    pinned.enter_context(self._checkpoints.pins.pinned(folder))
                yield await self._of_version(name, version)
        else:
            model = self._models.get(name)
            yield Served(name=name, model=model, version=base_version(model), rank=0)

    async def all(self, caller: Caller) -> list[Listed]:
        """Base models, and what the caller's runs saved for sampling, newest first."""
        found = [self._listed_base(entry) for entry in self._models.all()]
        saved, _total = await self._checkpoints.of_owner(caller.owner, limit=_MOST_LISTED, offset=0)
        found += [self._listed(c) for c in saved if c.path.kind == "sampler_weights"]
        return found

    async def one(self, name: str, caller: Caller) -> Listed:
        """Raises as `reading`."""
        async with self.reading(name, caller) as served:
            if not served.version.run_id:
                return self._listed_base(served.model)
            if name.startswith(_SCHEME):
                return self._listed(await self._access.checkpoint(name, caller))
            return Listed(
                name=name,
                base_model=served.model.name,
                owner=(await self._checkpoints.origin(name)).owner,
                created=await self._versions.created_at(served.version.name),
                max_length=served.model.max_length,
            )

    async def _newest(self, run_id: str, caller: Caller) -> WeightVersion:
        """What the run saved last for sampling, if it is still there."""
        origin = await self._checkpoints.origin(run_id)
        if not origin.owner or not caller.may_see(origin.owner):
            raise UnknownModel(f"there is no training run {run_id!r} on this server")
        run = self._runs.get(run_id)
        names = [run.facts.newest] if run is not None and run.facts.newest else []
        saved = await self._checkpoints.of_run(run_id)
        names += [c.version for c in reversed(saved) if c.path.kind == "sampler_weights"]
        for name in names:
            try:
                return await self._versions.version(name)
            except UnknownWeights:
                continue  # it was saved without a name, or has lost it
        raise UnknownModel(
            f"the run {run_id} has saved nothing for sampling yet, or no longer has it; call "
            "save_weights_for_sampler"
        )

    async def _of_checkpoint(self, name: str, checkpoint: Checkpoint) -> Served:
        if checkpoint.path.kind != "sampler_weights":
            raise UnknownWeights(
                f"{name!r} is not for sampling; that is what save_weights_for_sampler wrote "
                "(tinker://RUN/sampler_weights/NAME)"
            )
        return await self._of_version(name, await self._versions.version(checkpoint.version))

    async def _of_version(self, name: str, version: WeightVersion) -> Served:
        rank = 0
        if version.adapter:
            rank = (await self._checkpoints.origin(version.run_id)).training.rank
        model = self._models.get(version.base_model)
        return Served(name=name, model=model, version=version, rank=rank)

    def _listed_base(self, entry: BaseModelEntry) -> Listed:
        return Listed(
            name=entry.name,
            base_model="",
            owner="tandem",
            created=entry.added_at,
            max_length=entry.max_length,
        )

    def _listed(self, checkpoint: Checkpoint) -> Listed:
        entry = next((m for m in self._models.all() if m.name == checkpoint.base_model), None)
        return Listed(
            name=str(checkpoint.path),
            base_model=checkpoint.base_model,
            owner=checkpoint.owner,
            created=checkpoint.created_at,
            max_length=entry.max_length if entry is not None else None,
        )
