"""The side entrance: OpenAI's completions, chat completions and models, under `/v1`.

A request becomes samples of the same kind that the SDK asks for, so that limits, usage, weight
versions and metrics are the same for both. What is here is the translation: text and messages
into tokens, tokens into text, and fields into a sample's settings. `routes` is the entrance.
"""
