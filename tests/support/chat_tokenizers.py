"""Small tokenizers with chat templates in the manner of well-known models."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

THINKING = """\
{#- removes the thinking of turns before the last question, and groups tool replies -#}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set parts = message.content.split("</think>") %}
        {%- set content = message.content if loop.index0 > ns.last else parts[-1].lstrip("\n") %}
        {{- "<|im_start|>assistant\n" + content + "<|im_end|>\n" }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- "<|im_start|>user" }}
        {%- endif %}
        {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- "<|im_end|>\n" }}
        {%- endif %}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{% endif %}"""

HEADERS = """\
{{- "<bos>" }}
{%- for message in messages %}
    {{- "<|header|>" + message.role + "<|end_header|>\n\n" + message.content | trim + "<|eot|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|header|>assistant<|end_header|>\n\n" }}{% endif %}"""

ROLES = """\
{%- for message in messages %}
    {{- "<|" + message.role + "|>\n" + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>\n" }}{% endif %}"""

PLAIN = """\
{%- for message in messages %}
    {{- message.role + ": " + message.content + "\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "assistant: " }}{% endif %}"""

CHANNELS = """\
{#- an old answer ends with another token than the newest one -#}
{%- for message in messages %}
    {{- "<|header|>" + message.role + "<|end_header|>" + message.content }}
    {{- "<|return|>" if loop.last and message.role == "assistant" else "<|eot|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|header|>assistant<|end_header|>" }}{% endif %}"""

ENDS = {
    "chatml": (CHATML, "<|im_end|>"),
    "thinking": (THINKING, "<|im_end|>"),
    "headers": (HEADERS, "<|eot|>"),
    "roles": (ROLES, "<|user|>"),
    "plain": (PLAIN, "\n"),
    "channels": (CHANNELS, "<|return|>"),
}
"""By name: a template, and the text at which its models end an answer."""

_CONTROL = (
    *("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|end_header|>", "<|eot|>"),
    *("<|return|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
)
_TAGS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)


def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A token per byte, some longer ones, control tokens and tags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ċ", "Ċ"), ("1", "2"), ("a", "Ċ")]
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in _CONTROL])
    tokenizer.add_tokens([AddedToken(each, special=False) for each in _TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=ENDS[name][0],
        clean_up_tokenization_spaces=False,
    )
