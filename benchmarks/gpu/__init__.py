"""`make bench-gpu`: Tandem's use of a GPU.

- `moves`: the speed at which workers leave the device and return, and the bytes they leave on it.
- `speed`: training beside a plain loop, sampling beside vLLM alone, publishing, new weights from
  trainer to engine, and the difference of their logprobs.
- `memory`: device memory of trainers beside their memory plan.
- `workers`: the real workers that all of these call, and their models.
- `alone`: the plain loop and vLLM alone, in separate processes."""
