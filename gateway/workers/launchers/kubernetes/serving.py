"""The label of the serving gateway's pod.

All replicas are ready when their process answers, or no rolling upgrade would end. Only the leader
serves, so it moves this label to its own pod, and the Service selects by it."""

from __future__ import annotations

import asyncio

from gateway.workers.launchers.kubernetes.api import PODS, Api, ApiFault, Refused
from tandem.telemetry import get_log

SERVING = "tandem.dev/serving"


class ServingLabel:
    """Puts the label `instance` on `pod` ("": no pod) and checks it every `period` seconds, because
    a slow gateway may have moved it."""

    def __init__(self, api: Api, *, instance: str, pod: str, period: float) -> None:
        self._api = api
        self._instance = instance
        self._pod = pod
        self._period = period
        self._keeping: asyncio.Task[None] | None = None
        self._log = get_log()

    async def put(self) -> None:
        """Put the label on the pod until `close`. Raises `ApiFault`."""
        if self._pod and self._keeping is None:
            await self._move()
            self._keeping = asyncio.create_task(self._keep(), name="serving-label")

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def _move(self) -> None:
        listed = await self._api.list(PODS, labels=f"{SERVING}={self._instance}")
        labelled = {each["metadata"]["name"] for each in listed.items}
        if self._pod not in labelled:
            await self._api.label(PODS, self._pod, {SERVING: self._instance})
        for other in labelled - {self._pod}:
            try:
                await self._api.label(PODS, other, {SERVING: None})
            except Refused as error:
                if error.status != 404:
                    raise

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            try:
                await self._move()
            except ApiFault as error:
                self._log.warning("serving_label_not_kept", reason=str(error))
            except Exception:  # noqa: BLE001 - it is kept with the next try
                self._log.exception("serving_label_not_kept")
