"""`tandem demo`: a small model learns one-digit addition by reinforcement learning.

It does only things that a user could do. It writes a base model in the Hugging Face layout
(`tiny_model`) and starts the stack like `tandem up`. Then `tandem.rl` trains the model, first with
`sft` on imperfect examples, then with `train`. `addition` has the task and the settings of both.
`report` prints and stores results, and `run` is the whole demo. To change it, start with
`addition`."""
