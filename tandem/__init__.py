"""Code that gateway, trainer and sampler share, and all code that users import or type.

- Shared: generated stubs (`v1`, `wire.v1`), `settings`, `errors`, `telemetry`, `protocol` (between
  processes), `weights` (versions and model files), `backends`, `custom_losses`.
- On each host: the `agent`, which starts workers.
- For users: the command line (`cli`), `stack` (a gateway and its agent), `track` with its code in
  `tracking`, `rl`, `demo`.

No module imports torch or vLLM at its own import. New code belongs here only if two services or
users need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.2.0"
__all__ = ["__version__", "track"]

if TYPE_CHECKING:
    from tandem.tracking.run import track
else:

    def __getattr__(name: str) -> object:
        """Import `track` at its first use: workers do without its libraries."""
        if name != "track":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tandem.tracking.run import track

        return track
