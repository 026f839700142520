"""What the gateway, the trainer and the sampler share, and what a user imports or types.

Generated stubs (`tandem.v1`, `tandem.wire.v1`), weight versions, settings, telemetry and
errors live here, and so does the `tandem` command. Nothing here imports torch or vLLM.
"""

__version__ = "0.1.0"
