"""`tandem demo`: a small policy learns one-digit addition by reinforcement learning.

Everything in it is what a user would write or run: a base model in the Hugging Face layout,
the stack as `tandem up` starts it, and a loop over the unmodified `tinker` SDK.
"""
