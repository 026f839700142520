"""The recorder keeps the tokens of an agent's chats, so that the agent can be trained on them.

A client makes a trace and points its agent at the trace's address, which answers as OpenAI's and
Anthropic's API (`gateway.api.traces`). `conversation` finds the recorded turn that a request
continues, and makes sequences for training. `store` holds the traces and their files."""
