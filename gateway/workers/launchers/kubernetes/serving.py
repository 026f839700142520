"""The label of the serving gateway's pod.

All replicas are ready when their process answers, or no rolling upgrade would end. Only the leader
serves, so it moves this label to its own pod, and the Service selects by it."""

from __future__ import annotations

import asyncio

from gateway.workers.launchers.kubernetes.api import Api, Refused
from gateway.workers.launchers.kubernetes.names import PODS
from tandem.errors import describe
from tandem.telemetry import get_log

SERVING = "tandem.dev/serving"


async def move_label(api: Api, *, instance: str, pod: str) -> None:
    """Move the label of a gateway to one pod. Raises `ApiFault`."""
    listed = await api.list(PODS, labels=f"{SERVING}={instance}")
    labelled = {each["metadata"]["name"] for each in listed.items}
    if pod not in labelled:
        await api.patch(PODS, pod, {"labels": {SERVING: instance}})
    for other in labelled - {pod}:
        try:
            await api.patch(PODS, other, {"labels": {SERVING: None}})
        except Refused as error:
            if error.status != 404:
                raise


async def keep_label(api: Api, *, instance: str, pod: str, period: float) -> None:
    """Move the label every `period` seconds, because a slow gateway may have moved it."""
    while True:
        await asyncio.sleep(period)
        try:
            await move_label(api, instance=instance, pod=pod)
        except Exception as error:  # noqa: BLE001 - it is kept with the next try
            get_log().warning("serving_label_not_kept", reason=describe(error))
