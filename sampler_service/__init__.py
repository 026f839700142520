"""The sampler: one process with one engine, which samples from weight versions.

- `service`: the process, its gRPC server, and an engine's own process.
- `scheduler`: chooses the engine's next action, from the queue in `work`.
- `lifecycle`: the engine's state, loads, sleeps and wakes.
- `weights`: verifies and loads weight versions and LoRA adapters.
- `structured_output`: compiles grammars for the model's tokens.
- `engine`: the protocol in front of `vllm`, the only folder that imports vLLM.

A sample passes servicer, request parser, scheduler and engine. Token ids come in. Token ids,
logprobs and the name of the weight version go out. A load passes servicer, scheduler, lifecycle,
loader and engine.

`Generation` is the engine for another program, without a server. It is imported on demand.

To add an engine, implement `Engine` in a folder beside `vllm` and construct it in
`service/process.py`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sampler_service.generation import GeneratedSample, Generation

__all__ = ["GeneratedSample", "Generation"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sampler_service import generation

    return getattr(generation, name)
