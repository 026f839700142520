"""vLLM behind the `Engine` protocol. No other folder imports vLLM.

- `environment`: sets the process's environment, before `libraries` imports vLLM.
- `start`: makes an engine, in the sampler's process or its own.
- `internals`: the checked versions of vLLM, and all changes to its internals.
- `configuration`: vLLM's arguments and configuration.
- `engine`: `VllmEngine`. `pending`: its open requests. `sampling_parameters`: the parameters of
  each sample.
- `grammars`: masks tokens with compiled grammars.
- `memory`: the engine's share of a GPU, and its sleep.
- `prefix_cache`: lets samples of one prompt share its prefill.
- `sampled_logprobs`: collects logprobs as arrays.

The other modules run in vLLM's worker. `worker_extension` loads weights in place, `prompt_scoring`
scores prompts, and `adapter_sums` compares an adapter with its files. Another engine would be a
folder like this one, constructed in `service/process.py`.
"""
