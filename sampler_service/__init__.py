"""The sampler: one process that samples from weight versions.

- `service`: the process, its gRPC server, and the process of an engine.
- `scheduler`: chooses the next action of the engine. `work`: the samples and loads that others hand
  to it. `in_flight`: the samples that go on with newer weights.
- `lifecycle`: the weights that the engine holds, and its sleeps and wakes.
- `weights`: verifies and loads weight versions and LoRA adapters.
- `structured_output`: compiles regexes, JSON schemas and Lark grammars for the model's tokens.
- `engine`: the protocol that separates all these from `vllm`, the only folder that knows vLLM.

A sample: servicer -> request parser -> scheduler -> engine -> response. Token ids come in; token
ids, their logprobs and the name of the weight version go out. A load: servicer -> scheduler ->
lifecycle -> loader -> engine, which loads in its worker and scores the canary. A sleep or a wake:
servicer -> scheduler -> lifecycle -> engine.
"""
