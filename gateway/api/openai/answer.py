"""What the answers of both endpoints have in common: who made them, from what, and how much."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.api.openai.choice import Choice, TextRules
from gateway.api.openai.tokenizer import ModelTokenizer

VERSION_HEADER = "X-Tandem-Weight-Version"

Json = dict[str, object]


@dataclass
class Usage:
    """Tokens of a request: of its prompts, of these from the prefix cache, and sampled ones."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def content(self) -> Json:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Heading:
    """What stands in every answer, and in every part of a streamed one."""

    kind: str
    model: str
    weight_version: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def content(self, choices: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "tandem_weight_version": self.weight_version,
            "choices": list(choices),
        }


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(14)}"


def choices_of(
    *, tokenizer: ModelTokenizer, prompts: Sequence[Sequence[int]], n: int, rules: TextRules
) -> list[Choice]:
    """`n` for each prompt, in the order of the prompts."""
    return [
        Choice(index=at * n + i, tokenizer=tokenizer, prompt=prompt, rules=rules)
        for at, prompt in enumerate(prompts)
        for i in range(n)
    ]
