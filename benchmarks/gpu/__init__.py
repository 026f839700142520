"""`make bench-gpu`: Tandem's use of a GPU.

- `goals`: the goals, which the results are compared with.
- `plan`: the order of the parts, and their expected seconds. The tests come last.
- `speed`: training beside a plain loop, and sampling beside vLLM alone.
- `versions`: new weights from a trainer to an engine, until the first token.
- `joint`: LoRA runs in joint passes, beside one run.
- `starts`: workers from idle processes.
- `recovery`: a killed trainer.
- `moves`: the speed at which workers leave the device and return, and the bytes they leave on it.
- `memory`: device memory of trainers beside their memory plan.
- `sizes`: the models. `workers`: the real workers of all parts.
- `alone`: the plain loop and vLLM alone, in separate processes.

A new part is a function in `PARTS` of `__main__`, with a row in `PLAN` and its goals in `GOALS`."""
