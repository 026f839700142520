"""OpenAI's completions, chat completions and models, under `/v1`.

`routes` parse a request with a model of `schemas`. `InferenceService` (`service`) resolves the
model's name (`models`), makes prompts and engine requests of the body (`prompts`, with the
model's `tokenizer` and `chat_template`), and samples from the engine of the owner's implicit
session the way that the SDK does (`generation`), so that limits, usage and metrics are the same
for both. `responses` writes text (`detokenizer`), logprobs and usage in OpenAI's form, and
`errors` the errors.

A new field of a request: declare it in `schemas`, where the fields that are refused are listed
too, and use it in `prompts` (what is sampled) or `responses` (what is shown).
"""
