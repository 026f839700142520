"""OpenAI's completions, chat completions and models, under `/v1`.

`routes` parses a request with a model of `schemas`. `InferenceService` (`service`) resolves the
model's name (`models`) and makes engine requests (`prompts`, with `tokenizer` and `chat_template`).
It samples with the owner's implicit session, as the SDK does, so limits, usage and metrics are
equal. `responses` writes text, logprobs and usage, and `routes` the errors.

To add a request field, declare it in `schemas`, which also lists refused fields. Use it in
`prompts` for sampling or in `responses` for the answer.
"""
