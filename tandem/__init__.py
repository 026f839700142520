"""Code that gateway, trainer and sampler share, and all code that users import or type.

- Shared: generated stubs (`v1`, `wire.v1`), `settings`, `errors`, `telemetry`, `protocol` (between
  processes), `weights` (versions and model files), `backends`, `custom_losses`.
- On each host: the `agent`, which starts workers.
- For users: the command line (`cli`), `stack` (a gateway and its agent), `rl`, `demo`.

No module imports torch or vLLM at its own import. New code belongs here only if two services or
users need it."""

__version__ = "0.2.0"
