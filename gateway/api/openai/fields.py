"""Which fields of a request are taken, which change nothing, and which are refused.

A field that this server does not know is refused, as OpenAI does, since a result that silently
lacks what was asked for is worse than none. Of those that it knows and does not do, the value
that means "off" is taken: clients send their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gateway.api.openai.errors import FieldRefused

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "prediction",  # it may only make an answer faster
        "priority",
        "request_id",
        "spaces_between_special_tokens",
        "include_reasoning",
    }
)
"""Whatever they are, the tokens are the same."""


def _is(*values: object) -> Callable[[object], bool]:
    return lambda value: any(value == v and type(value) is not bool for v in values)


def _empty(value: object) -> bool:
    return value in ("", [], {}, False)


_OFF: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "presence_penalty": (_is(0), "penalties are not offered; leave it out, or 0"),
    "frequency_penalty": (_is(0), "penalties are not offered; leave it out, or 0"),
    "repetition_penalty": (_is(1), "penalties are not offered; leave it out, or 1"),
    "length_penalty": (_is(1), "there is no beam search; leave it out"),
    "min_p": (_is(0), "it is not offered; use top_p or top_k"),
    "min_tokens": (_is(0), "it is not offered; leave it out"),
    "logit_bias": (_empty, "biases are not offered; leave it out"),
    "bad_words": (_empty, "it is not offered; leave it out"),
    "allowed_token_ids": (_empty, "it is not offered; use structured_outputs"),
    "logits_processors": (_empty, "no code of a client is executed"),
    "vllm_xargs": (_empty, "it is not offered; leave it out"),
    "use_beam_search": (_empty, "there is no beam search; leave it out"),
    "suffix": (_empty, "text is only continued, not filled in; leave it out"),
    "truncate_prompt_tokens": (_empty, "prompts are never cut; shorten it yourself"),
    "prompt_logprobs": (_empty, "use echo with logprobs in /v1/completions"),
    "chat_template": (_empty, "templates are those of the models; use chat_template_kwargs"),
    "functions": (_empty, "it is obsolete; use tools"),
    "function_call": (lambda v: v in ("none", "auto"), "it is obsolete; use tools"),
    "modalities": (lambda v: v == ["text"], "this server samples text alone"),
    "audio": (_empty, "this server samples text alone"),
    "web_search_options": (_empty, "there is no search; leave it out"),
    "reasoning_effort": (_empty, "give it to the model's template: chat_template_kwargs"),
    "verbosity": (_empty, "there is no such setting; leave it out"),
    "parallel_tool_calls": (
        lambda v: v is True,
        "calls are the model's own text, so that it cannot be held to one",
    ),
}
"""What would change the result: the values that mean "off", and what to do instead."""


def check_fields(extra: Mapping[str, object], *, known: Iterable[str]) -> None:
    """Raises `FieldRefused` for the first of the fields that cannot be ignored; `known` are
    those that are taken, for the sentence."""
    for name, value in extra.items():
        if value is None or name in HARMLESS:
            continue
        if name not in _OFF:
            raise FieldRefused(
                f"unknown field {name[:100]!r}; known: {', '.join(sorted(known))}", param=name[:100]
            )
        is_off, instead = _OFF[name]
        if not is_off(value):
            raise FieldRefused(f"{name} would change the result: {instead}", param=name)
