"""vLLM behind the `Engine` protocol. No other folder imports vLLM.

- `environment`: sets the process's environment, before `libraries` imports vLLM.
- `start`: makes an engine. `configuration`: vLLM's arguments.
- `internals`: the checked versions of vLLM, and all changes to it.
- `engine`: `VllmEngine`. `pending`: its open requests. `sampling_parameters`: vLLM's parameters of
  a sample. `sampled_logprobs`: logprobs as arrays.
- `grammars`: masks tokens. `prefix_cache`: lets samples share a prompt's prefill.
- `memory`: the engine's share of a GPU, and its sleep.
- In vLLM's worker: `worker_extension` loads weights, `prompt_scoring` scores prompts,
  `adapter_sums` compares an adapter with its files.

Another engine would be a folder like this one, constructed in `service/process.py`."""
