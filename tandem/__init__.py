"""Code that gateway, trainer and sampler share, and all code that users import or type.

- Shared: generated stubs (`v1`, `wire.v1`), `settings`, `errors`, `telemetry`, `protocol` (between
  processes), `weights` (versions and model files), `backends`, `custom_losses`.
- On each host: the `agent`, which starts workers.
- For users: the command line (`cli`), `stack` (a gateway and its agent), `track` with its code in
  `tracking`, `rl`, `demo`.

No module imports torch or vLLM at its own import. New code belongs here only if two services or
users need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.tracking.exporters import Exporter
    from tandem.tracking.run import TrackedRun

__version__ = "0.2.0"


def track(
    policy: Any,
    *,
    name: str | None = None,
    tags: Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    to: Sequence[str | Exporter] = (),
    url: str | None = None,
    api_key: str | None = None,
) -> TrackedRun:
    """Name a run and record its metrics and rollouts, in the background.

    `policy` is a `tinker.TrainingClient`, or the id of a run. With an id, `url` and `api_key` are
    by default TINKER_BASE_URL and TINKER_API_KEY. `config["total_steps"]` makes the progress known.
    `to` has `"wandb"`, `"tensorboard"` or an `Exporter`. Raises a `UserError` for the gateway's
    refusal, and for a missing package. docs/tracking.md has examples."""
    from tandem.tracking.run import start_tracking

    return start_tracking(
        policy, name=name, tags=tags, config=config, to=to, url=url, api_key=api_key
    )
