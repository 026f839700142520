"""`make bench-gpu`: what Tandem makes of a GPU.

- `moves`: how fast workers leave the device and come back, and what they leave on it;
- `speed`: training beside a plain loop, sampling beside vLLM alone, versions that are published,
  new weights from the trainer to the engine, and how far the logprobs of the two are apart;
- `memory`: what trainers take of the device beside what was planned for them;
- `workers`: the real workers that both call, and their models;
- `alone`: the plain loop and vLLM alone, in processes of their own.
"""
