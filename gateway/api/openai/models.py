"""Models by name, and their list. A name is a base model's, a `tinker://RUN/sampler_weights/NAME`
path, or a training run's id for its newest weights for sampling."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from gateway.api.openai.schemas import Model
from gateway.checkpoints.base_models import BaseModelEntry
from gateway.checkpoints.catalog import Checkpoint
from gateway.checkpoints.versions import WeightVersion
from gateway.core import Gateway
from gateway.identifiers import relative_version_folder, unknown_run
from gateway.owners.auth.identity import Caller, Readers
from gateway.sampling.sessions import base_version
from tandem.errors import UnknownModel, UnknownWeights
from tandem.settings.chosen_names import is_run_id

_SCHEME = "tinker://"
_MAX_LISTED = 1000


@dataclass(frozen=True)
class SamplingTarget:
    """The source of a request's samples. `rank` is its adapter's, or 0."""

    model: BaseModelEntry
    version: WeightVersion
    rank: int


class ModelDirectory:
    def __init__(self, gateway: Gateway) -> None:
        self._models = gateway.models
        self._checkpoints = gateway.checkpoints
        self._versions = gateway.versions
        self._runs = gateway.runs

    @asynccontextmanager
    async def resolve(self, name: str, caller: Caller) -> AsyncIterator[SamplingTarget]:
        """Yield the name's target and keep its files for the block. Raises `UnknownModel`,
        `UnknownWeights` or `InvalidRequest`."""
        if name.startswith(_SCHEME):
            async with self._checkpoints.reading(name, readers=Readers((caller,))) as checkpoint:
                if checkpoint.path.kind != "sampler_weights":
                    raise UnknownWeights(
                        f"{name!r} is not for sampling; use what save_weights_for_sampler wrote "
                        "(tinker://RUN/sampler_weights/NAME)"
                    )
                yield await self._target(await self._versions.version(checkpoint.version))
        elif is_run_id(name):
            with ExitStack() as pinned:
                with self._checkpoints.pins.resolving(name):
                    version = await self._newest(name, caller)
                    folder = relative_version_folder(version.name)
                    pinned.enter_context(self._checkpoints.pins.pinned(folder))
                yield await self._target(version)
        else:
            model = self._models.get(name)
            yield SamplingTarget(model=model, version=base_version(model), rank=0)

    async def list_models(self, caller: Caller) -> list[Model]:
        """Return the base models, then the weights of the caller's runs for sampling, newest
        first."""
        saved, _total = await self._checkpoints.of_owner(caller.owner, limit=_MAX_LISTED, offset=0)
        return [
            *(self._model(entry.name, created=entry.added_at) for entry in self._models.all()),
            *(self._saved(c) for c in saved if c.path.kind == "sampler_weights"),
        ]

    async def one(self, name: str, caller: Caller) -> Model:
        """Return one model. Raises as `resolve`."""
        async with self.resolve(name, caller) as target:
            model, version = target.model, target.version
            if not version.run_id:
                return self._model(model.name, created=model.added_at)
            if name.startswith(_SCHEME):
                return self._saved(await self._checkpoints.get(name, readers=Readers((caller,))))
            owner = (await self._checkpoints.origin(name)).owner
            return self._model(name, of=model.name, owner=owner, created=version.created_at)

    async def _newest(self, run_id: str, caller: Caller) -> WeightVersion:
        origin = await self._checkpoints.origin(run_id)
        if not origin.owner or not caller.may_see(origin.owner):
            raise UnknownModel(unknown_run(run_id).message)
        run = self._runs.get(run_id)
        if run is not None:  # its client may sample weights that are not durable yet
            await run.dispatcher.until_recorded()
        newest = run.newest if run is not None else ""
        for name in filter(None, (newest, await self._checkpoints.newest_version(run_id))):
            try:
                return await self._versions.version(name)
            except UnknownWeights:
                continue  # unnamed and collected
        raise UnknownModel(
            f"the run {run_id} has saved nothing for sampling yet, or no longer has it; call "
            "save_weights_for_sampler"
        )

    async def _target(self, version: WeightVersion) -> SamplingTarget:
        rank = 0
        if version.adapter:
            rank = (await self._checkpoints.origin(version.run_id)).training.rank
        model = self._models.get(version.base_model)
        return SamplingTarget(model=model, version=version, rank=rank)

    def _saved(self, saved: Checkpoint) -> Model:
        return self._model(
            str(saved.path), of=saved.base_model, owner=saved.owner, created=saved.created_at
        )

    def _model(self, name: str, *, of: str = "", owner: str = "tandem", created: float) -> Model:
        """`of` is the base model of weights, `created` in seconds since 1970."""
        length = None
        with suppress(UnknownModel):  # it may have been removed
            length = self._models.context_length(self._models.get(of or name))
        return Model(
            id=name,
            object="model",
            created=int(created),
            owned_by=owner,
            root=of or name,
            parent=of or None,
            max_model_len=length,
        )
