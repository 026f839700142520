"""Code that the gateway, the trainer and the sampler share, and everything a user types or imports.

Shared: the generated stubs (`v1`, `wire.v1`), `settings` (the `…_settings` are parts of them),
`errors`, `telemetry`, `protocol` (between processes), `weights` (weight versions and the files of
models), `backends` (names of trainer backends) and `custom_losses`. On each host, the `agent`
starts workers. For users: the `tandem` command (`cli`), `stack` (a gateway and its agent), `rl`
(advantages and schedules for training loops) and `demo`. Nothing imports torch or vLLM at its own
import.
"""

__version__ = "0.2.0"
