"""`tandem demo`: a small policy learns one-digit addition by reinforcement learning.

It does only what a user could do: write a base model in the Hugging Face layout (`tiny_model`),
start the stack as `tandem up` does, and train over the unmodified `tinker` SDK, first on imperfect
examples (`warm_up`), then by reinforcement (`reinforcement`). `addition` is the task, `data` makes
its datums, `run` is the whole demo, and `report` is what it prints and keeps.
"""
