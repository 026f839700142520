"""`tandem demo`: a small model learns one-digit addition by reinforcement learning.

It does only things that a user could do. It writes a base model in the Hugging Face layout
(`tiny_model`) and starts the stack like `tandem up`. Then it trains with the unmodified `tinker`
SDK, first on imperfect examples (`warm_up`), then by `reinforcement`. `addition` is the task,
`data` makes datums, `report` prints and stores results, and `run` is the whole demo. To change it,
start with `configuration`."""
