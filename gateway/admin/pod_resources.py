"""`tandem config --resources`: the requests of a model's pods, by worker and pool."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from gateway.admin.request import answer_request
from gateway.workers.declared_groups import group_of_claim
from gateway.workers.launchers.kubernetes.resources import pod_request, resources_of
from gateway.workers.model_sizes import read_size
from gateway.workers.request_maker import RequestMaker
from gateway.workers.run_options import default_options
from tandem.protocol.worker import LoraSpec, TrainingSpec, WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings
from tandem.settings.gateway import GatewaySettings
from tandem.settings.workers import SamplerSettings


class PodResourcesRequest(BaseModel):
    """`model` is its folder."""

    model: Path


def table(path: Path, settings: GatewaySettings) -> list[dict[str, object]]:
    """Return the requests of a model's default workers in each pool. Without pools, assume one
    without devices. Raises `InvalidRequest`."""
    read_size(path)
    rows: list[dict[str, object]] = []
    default = ClaimPoolSettings(name="cpu", roles=["trainer", "sampler"])
    for pool in settings.claim_pools or [default]:
        for about, spec in _examples(path, settings, pool):
            if spec.kind in pool.roles:
                resources = resources_of(spec, pool=pool, settings=settings)
                rows.append({"pool": pool.name, "worker": about, **asdict(resources)})
    return rows


def _examples(
    path: Path, settings: GatewaySettings, pool: ClaimPoolSettings
) -> Iterator[tuple[str, WorkerSpec]]:
    options, group = default_options(settings), group_of_claim(pool, 0)
    maker = RequestMaker(
        settings=settings, groups=lambda: (group,), prepare=partial(pod_request, pools=[pool])
    )
    about: dict[str, str] = {"key": "", "owner": "", "session": "", "model": str(path)}
    spec = WorkerSpec(
        worker_id="",
        kind="trainer",
        secret="",
        model_name=path.name,
        model_path=str(path),
        session_id="",
        trainer=options.trainer_settings(settings),
    )
    lora = LoraSpec()
    ranks = f"{options.ranks} rank{'' if options.ranks == 1 else 's'}"
    for trained, training in (
        ("all parameters", TrainingSpec()),
        (f"adapters of rank {lora.rank}", TrainingSpec(lora=lora)),
    ):
        request = maker.trainer(**about, options=options, training=training, engines=())
        memory = {"host_memory": request.host_bytes}
        yield f"trainer with {ranks}, of {trained}", spec.model_copy(update=memory)
    request = maker.engine(**about, sampler="", options=options, max_lora_rank=0)
    sampler: dict[str, object] = {
        "kind": "sampler",
        "trainer": None,
        "sampler": SamplerSettings.of(settings.sampler),
        "host_memory": request.host_bytes,
    }
    yield "sampler", spec.model_copy(update=sampler)


def _answer(request: PodResourcesRequest, settings: GatewaySettings) -> dict[str, object]:
    return {"rows": table(request.model, settings)}


if __name__ == "__main__":
    sys.exit(answer_request(PodResourcesRequest, _answer))
