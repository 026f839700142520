"""OpenAI's completions, chat completions and models, under `/v1`.

`routes` parses a request with a model of `schemas`. `InferenceService` (`service`) resolves the
model (`models`), makes engine requests (`prompts`, with `tokenizer` and `chat_template`), and
samples with the owner's implicit session, so limits, usage and metrics are the SDK's. `responses`
writes text, logprobs and usage, and `routes` the errors.

To add a request field, declare it in `schemas`, which also lists refused fields. Use it in
`prompts` or `responses`."""
