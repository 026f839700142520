"""Code that gateway, trainer and sampler share, and all code that users import or type.

- Shared: generated stubs (`v1`, `wire.v1`), `settings`, `errors`, `telemetry`, `protocol` (between
  processes), `weights` (weight versions and model files), `backends` (descriptions of trainer
  backends), `custom_losses`.
- On each host: the `agent`, which starts workers.
- For users: the `tandem` command (`cli`), `stack` (a gateway and its agent), `rl` (advantages and
  schedules), `demo`.

No module imports torch or vLLM at its own import. New code belongs here only if two services or a
user's program need it.
"""

__version__ = "0.2.0"
