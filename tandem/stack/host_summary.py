"""What trainers find on the host of a stack, and their number of ranks there, for people."""

from __future__ import annotations

from collections import Counter

from tandem.agent.host import Host
from tandem.settings.gateway import GatewaySettings

_GIB = 2**30


def usual_ranks(settings: GatewaySettings, host: Host) -> int:
    """Return the ranks of the demo's trainer: TANDEM_TRAINER_RANKS, else one on a GPU, else two."""
    if "ranks" in settings.trainer.model_fields_set:
        return settings.trainer.ranks
    if _on_gpus(settings, host):
        return 1
    devices = [len(group.devices) for group in settings.groups if "trainer" in group.roles]
    return min(2, max(devices, default=2))


def describe_found(settings: GatewaySettings, host: Host, *, ranks: int) -> str:
    """Examples: "found one NVIDIA H200 (140 GiB): trainers run 1 rank", "no GPU: trainers run 2
    ranks on 2 cores"."""
    kinds = Counter((each.name, each.memory_bytes // _GIB) for each in host.accelerators)
    devices = " and ".join(
        f"one {name} ({gib} GiB)" if count == 1 else f"{count} {name} ({gib} GiB each)"
        for (name, gib), count in kinds.items()
    )
    run = f"trainers run {_count(ranks, 'rank')}"
    if settings.groups:
        run += f" on {', '.join(g.name for g in settings.groups if 'trainer' in g.roles)}"
    elif not _on_gpus(settings, host):
        run += f" on {_count(len(host.cores), 'core')}"
    return f"{f'found {devices}' if devices else 'no GPU'}: {run}"


def _on_gpus(settings: GatewaySettings, host: Host) -> bool:
    if settings.groups:
        devices = [each for g in settings.groups if "trainer" in g.roles for each in g.devices]
        return any(each.startswith("cuda:") for each in devices)
    return bool(host.accelerators) and settings.trainer.device != "cpu"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
