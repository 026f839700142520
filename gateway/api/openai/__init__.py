"""OpenAI's completions, chat completions and models, under `/v1`.

`routes` parse a request with a model of `schemas`. `InferenceService` (`service`) resolves the
model's name (`models`), makes prompts and engine requests of the request (`prompts`, with the
model's `tokenizer` and `chat_template`), and samples with the engine of the owner's implicit
session the way that the SDK does, so that limits, usage and metrics are the same for both.
`responses` writes text, logprobs and usage in OpenAI's form, and `routes` the errors.

A new request field: declare it in `schemas`, where refused fields are listed too, and use it in
`prompts` (what is sampled) or `responses` (what is shown).
"""
