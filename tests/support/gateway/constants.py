"""Changes the gateway's constants, for tests that would have to wait or send much.

A test names a constant like a setting, in lower case. `changed` separates both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from gateway.owners.limits import BOUNDS

_PLACES = {
    "dispatch_window": "gateway.runs.dispatcher.DISPATCH_WINDOW",
    "dispatch_window_bytes": "gateway.runs.dispatcher.DISPATCH_WINDOW_BYTES",
    "sequence_gap_timeout": "gateway.runs.dispatcher.GAP_TIMEOUT",
    "max_queued_operations": "gateway.runs.admission.MOST_QUEUED",
    "max_waiting_samples": "gateway.sampling.router.MAX_WAITING_SAMPLES",
    "engine_quantum": "gateway.workers.placing.ENGINE_QUANTUM",
    "sampler_superseded_ttl": "gateway.sampling.sessions.SUPERSEDED_TTL",
    "sampler_newest_kept": "gateway.sampling.sessions.NEWEST_KEPT",
    "reaper_interval": "gateway.housekeeping.ROUND_INTERVAL",
    "log_max_bytes": "gateway.housekeeping.LOG_MAX_BYTES",
    "log_ttl": "gateway.housekeeping.LOG_TTL",
    "long_poll": "gateway.api.tinker.futures.LONG_POLL",
    "worker_heartbeat": "gateway.workers.processes.MOST_SECONDS",
    "worker_stop_timeout": "gateway.core._PATIENCE",
    "recovery.replay": "gateway.runs.recovery.replay_log.REPLAY_SECONDS",
    "recovery.log_bytes": "gateway.runs.recovery.replay_log.LOG_BYTES",
    "openai.max_choices": "gateway.api.openai.service.MAX_CHOICES",
    "limit.result_bytes": "gateway.core.RESULT_BYTES",
    "limit.results": "gateway.core.RESULTS",
    "http.max_connections": "gateway.api.http_connection.MAX_CONNECTIONS",
    "http.max_header_bytes": "gateway.api.http_connection.MAX_HEADER_BYTES",
    "http.header_timeout": "gateway.api.http_connection.HEADER_TIMEOUT",
    "http.write_timeout": "gateway.api.http_connection.WRITE_TIMEOUT",
    "http.linger": "gateway.api.http_connection.LINGER",
    "http.keep_alive": "gateway.api.http_connection.KEEP_ALIVE",
    "http.body_gap_timeout": "gateway.api.request_body.BODY_GAP_TIMEOUT",
    "http.body_timeout": "gateway.api.request_body.BODY_TIMEOUT",
}
_FOLDED = ("recovery", "openai", "http")


@contextmanager
def changed(changes: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Change constants during the block. Yields the settings among the changes."""
    settings: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            if name in _PLACES:
                patch.setattr(_PLACES[name], value)
            elif name in (*_FOLDED, "limit"):
                assert isinstance(value, Mapping)
                for inner, each in value.items():
                    if place := _PLACES.get(f"{name}.{inner}"):
                        patch.setattr(place, each)
                    elif name in _FOLDED:
                        settings[f"{name}_{inner}"] = each
                    elif inner in BOUNDS:
                        patch.setitem(BOUNDS, inner, each)
                    else:
                        limits = settings.setdefault("limit", {})
                        assert isinstance(limits, dict)
                        limits[inner] = each
            else:
                settings[name] = value
        yield settings
