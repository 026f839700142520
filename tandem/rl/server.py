"""Tandem's own routes, which other Tinker servers lack: versions of samples, load of engines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.errors import describe
from tandem.protocol.own_machine import http_client

if TYPE_CHECKING:
    import httpx
    import tinker

_IDS = 100
"""Requests whose versions are asked for at once. An address has a limited length."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """`waiting` counts requests. `kv_used` is the used share of the KV cache, 0 to 1."""

    waiting: int
    kv_used: float


class TandemServer:
    """Asks the gateway of a run. All methods block, and an unreachable gateway counts as silent."""

    def __init__(self, client: httpx.Client, *, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def versions(self, requests: Sequence[str]) -> dict[str, dict[int, list[int]]]:
        """Return the optimizer step of each token, by request and sample. Requests that are
        unknown, or that were answered by one version, are absent."""
        found: dict[str, dict[int, list[int]]] = {}
        for start in range(0, len(requests), _IDS):
            ids = ",".join(requests[start : start + _IDS])
            answer = self._get("samples/versions", ids=ids)
            for request in (answer or {}).get("requests", []):
                found[request["request_id"]] = {
                    number: list(
                        itertools.chain.from_iterable(
                            [run["step"]] * run["tokens"] for run in sample
                        )
                    )
                    for number, sample in enumerate(request.get("samples", ()))
                }
        return found

    def load(self) -> EngineLoad | None:
        """Return the load of the run's engines, None unless one is awake."""
        answer = self._get(f"samplers/{self._run_id}")
        if answer is None or all(each["running"] is None for each in answer["engines"]):
            return None
        return EngineLoad(waiting=answer["waiting"], kv_used=answer["kv_used"])

    def newest_step(self) -> int | None:
        """Return the trainer's optimizer step, with those of a loaded checkpoint. None if the
        gateway is silent."""
        answer = self._get(f"runs/{self._run_id}")
        if answer is None:
            return None
        last = answer["last_step"]
        return int(last["step"] if last is not None else answer["parent_step"] or 0)

    def _get(self, path: str, **query: str) -> dict[str, Any] | None:
        import httpx

        try:
            answer = self._client.get(path, params=query)
            return answer.json() if answer.is_success else None
        except (httpx.HTTPError, ValueError):  # a proxy may answer with a page of its own
            return None


def find_server(training: tinker.TrainingClient) -> TandemServer | None:
    """Return the routes of the client's gateway, or None if it is not Tandem's. Raises
    `ConnectionError` if nobody answers."""
    import httpx

    # The SDK has no public names for its address and key.
    url = getattr(training.holder, "_base_url", None)
    key = getattr(training.holder, "_api_key", None)
    if not url or not key:
        return None
    address = f"{str(url).rstrip('/')}/api/tandem/v1/"
    client = http_client(address, headers={"X-API-Key": str(key)}, timeout=30)
    try:
        answer = client.get(f"runs/{training.model_id}")
        failure = f"status {answer.status_code}" if answer.is_server_error else ""
    except httpx.HTTPError as error:
        failure = describe(error)
    if not failure and answer.is_success:
        return TandemServer(client, run_id=str(training.model_id))
    client.close()
    if failure:
        raise ConnectionError(f"{url} does not answer: {failure}")
    return None
