"""Engines that start beside their run's trainer, before its first save needs them."""

from __future__ import annotations

from contextlib import suppress

from sqlalchemy import select

from gateway.runs.run import Run
from gateway.runs.tools import RunTools
from gateway.sampling.sampler import Sampler
from gateway.storage.tables import runs
from gateway.workers.standing import are_devices_idle
from tandem.errors import TandemError


def sampler_of(run: Run, tools: RunTools) -> Sampler:
    """Return the sampler of a run. Raises as `SamplerRouter.ensure`."""
    return tools.samplers.ensure(
        session_id=run.session_id,
        model=run.model,
        rank=run.training.rank,
        all_weights=run.training.lora is None,
        kept=run.host.sampler,
    )


async def start_engines(run: Run, tools: RunTools) -> None:
    """Start a new run's engines if its owner's run before it sampled the same base model, and if
    their devices are idle."""
    if not run.host.sampler:
        return
    with suppress(TandemError):  # the first save reports it
        if not await _sampled_before(run, tools):
            return
        sampler = sampler_of(run, tools)
        overview = tools.samplers.supervisor.overview()
        if are_devices_idle(overview, [engine.key for engine in sampler.engines]):
            sampler.start()


async def _sampled_before(run: Run, tools: RunTools) -> bool:
    same = (runs.c.owner == run.owner, runs.c.base_model == run.model.name, runs.c.id != run.id)
    before = select(runs.c.newest).where(*same).order_by(runs.c.created_at.desc()).limit(1)
    row = await tools.journal.database.read_one(before)
    return row is not None and row["newest"] != ""
