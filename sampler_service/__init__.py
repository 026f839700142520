"""The sampler: one process with one engine, which samples from weight versions.

- `service`: the process, its gRPC server, and an engine's own process.
- `scheduler`: chooses the engine's next action. `work`: the queue of requests and loads.
  `in_flight`: samples that continue with newer weights.
- `lifecycle`: the engine's state, its loaded weights, its sleeps and wakes.
- `weights`: verifies and loads weight versions and LoRA adapters.
- `structured_output`: compiles regexes, JSON schemas and Lark grammars for the model's tokens.
- `engine`: the protocol between all these and `vllm`, the only folder that imports vLLM.

A sample passes servicer, request parser, scheduler, engine and response encoder. Token ids come in.
Token ids, logprobs and the name of the weight version go out. A load passes servicer, scheduler,
lifecycle, loader and engine. A sleep or wake passes servicer, scheduler, lifecycle and engine.

To add an engine, implement `Engine` in a folder beside `vllm` and construct it in
`service/process.py`. To add a metric, add it to `metrics`.
"""
