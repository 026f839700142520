"""What the gateway, the trainer and the sampler share, and what a user imports or types.

Shared: the generated stubs (`v1`, `wire.v1`), `settings` (the `…_settings` are parts of them),
`errors`, `telemetry`, `weights` (published weight versions), `model_config` (what a model's files
say), `worker` (the handshake between a launcher and a worker) and `worker_server`. Runs on each
host: `agent`, which starts the workers. For users: the `tandem` command (`cli`), `stack` (a gateway
and its agent, each a `supervised_process`), `rl` (advantages and schedules for training loops) and
`demo`. Nothing imports torch or vLLM.
"""

__version__ = "0.1.0"
