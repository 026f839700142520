"""vLLM behind the `Engine` protocol; no other folder imports vLLM.

`environment` sets the process's environment before `libraries` imports vLLM, and `start` makes an
engine, in the sampler's process or one of its own; `internals` says with which versions of vLLM all
this was checked, and changes what is changed in it; `configuration` is what it is started with, and
`engine` is `VllmEngine`, with what is `pending` in it and the `sampling_parameters` of each sample;
`grammars` masks tokens with compiled grammars; `memory` is the engine's share of a GPU, and its
sleep; `prefix_cache` lets samples share a prompt's prefill; `sampled_logprobs` collects what was
drawn as arrays. The rest runs inside vLLM's worker: `worker_extension` loads weights in place,
`prompt_scoring` scores prompts, `adapter_sums` says whether the engine holds an adapter. Another
engine would be a folder like this one, constructed in `service/process.py`.
"""
