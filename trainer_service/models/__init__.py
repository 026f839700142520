"""Hugging Face models: what is done with the code of transformers, whatever the architecture.

`files.py` has a model's directory and its safetensors files, and `huggingface.py` loads and
measures it; `logprobs.py` parts its head from its body, and makes log probabilities in chunks;
`packing.py` has it attend to packed rows. `activation_checkpointing.py` and `compiled_blocks.py`
change how its blocks are computed, `tensor_parallel.py` on how many ranks.

No architecture needs code of its own. What cannot be trained, or divided, is refused by what the
model is: in the gateway by its `config.json` (`tandem/weights/model_config.py`), else when the
trainer starts (`check_trainable`, `check_causal`, `tensor_parallel.py`). To hold another
architecture to all this, add a small model of it to `tests/support/architectures.py`.
"""
