"""The sampler: one process that samples from weight versions.

`service` is the process and its gRPC face, `scheduler` decides what the engine does next with the
`work` that others hand it (`in_flight`: what goes on with newer weights), `lifecycle` is what the
engine holds and whether it is awake, `weights` verifies and loads weight versions and LoRA
adapters, and `engine` is the protocol that separates them from `vllm`, the only folder that knows
vLLM; `service` also puts an engine into a process of its own. `structured_output` compiles regexes,
JSON schemas and Lark grammars for the model's tokens.

A sample: servicer -> request parser -> scheduler -> engine -> response. Token ids come in; token
ids, their logprobs and the name of the weight version go out. A load: servicer -> scheduler ->
lifecycle -> loader -> engine, which loads in its worker and scores the canary. A sleep or a wake:
servicer -> scheduler -> lifecycle -> engine.
"""
