"""OpenAI's completions, chat completions and models, and Anthropic's messages, under `/v1`.

`routes` parses a request with a model of `schemas`. `InferenceService` (`service`) resolves the
model (`models`), makes engine requests (`prompts`, with `tokenizer` and `chat_template`), and
samples with the owner's implicit session, so limits, usage and metrics are the SDK's. `responses`
writes text, logprobs and usage, and `routes` the errors. `parsing` chooses the parsers of tool
calls, which run in the sampler. `anthropic` turns messages into OpenAI's form and back. `traces`
has the addresses of recorded agents, and `recording` continues and keeps their tokens.

To add a request field, declare it in `schemas`, which also lists refused fields. Use it in
`prompts` or `responses`."""
