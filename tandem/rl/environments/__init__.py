"""Environments of one or more turns.

To write one, write a class with `reset(example)` and `step(answer)`. An object of it is one
episode. `reset` returns the first prompt: text, token ids, or messages for the chat template.
`step` gets the text of the policy's answer. It returns a `Step` with a reward, and with the next
observation unless the episode is over. `tandem.rl.train` takes the class, or any function without
arguments that returns an environment. docs/environments.md has examples.

`rollout` runs an episode, and `Renderer` makes token ids of prompts and observations. An episode
is one sequence of tokens: each prompt continues the one before."""

from tandem.rl.environments.chat import Renderer
from tandem.rl.environments.episode import Environment, SampleFunction, Step, rollout
from tandem.rl.environments.tools import Tool, ToolEnvironment, make_tool, parse_tool_calls

__all__ = [
    "Environment",
    "Renderer",
    "SampleFunction",
    "Step",
    "Tool",
    "ToolEnvironment",
    "make_tool",
    "parse_tool_calls",
    "rollout",
]
