"""Models with a tokenizer and a chat template, for the OpenAI-compatible routes."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import openai
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.support.gateway.running import KEY, Gate, make_model, running_gateway

CHAT_TEMPLATE = """\
{%- if tools %}<|system|>You may call: {{ tools | tojson }}{{ eos_token }}
{% endif %}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant", "tool"] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- "<|" + message.role + "|>" + message.content | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- "(" + call.function.name + " " + call.function.arguments | tojson + ")" }}
    {%- endfor %}
    {{- eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if thinking %}<think>{% endif %}{% endif %}"""

CHAT = [{"role": "user", "content": "hi"}]


def byte_tokenizer() -> Tokenizer:
    """A token per byte, as in GPT-2, and a few longer ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "th", "the", "Ġthe", "âĤ"]  # the last: two bytes of a euro sign
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("â", "Ĥ")]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<eos>", "<bos>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer


def sentence_tokenizer() -> Tokenizer:
    """Return a tokenizer of Llama's kind: words with a mark for the blank before them, and
    bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "hello", "!", "a", "▁a"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in pieces[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def letter_tokenizer() -> Tokenizer:
    pieces = ["<unk>", "<eos>", *"abcdefghijklmnopqrstuvwxyz "]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def write_speaking_model(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    template: str | None = CHAT_TEMPLATE,
    window: int = 64,
    **config: object,
) -> Path:
    """Write a model's folder without weights. `window` is its longest sequence."""
    make_model(folder, window=window)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<eos>", "bos_token": "<bos>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named, **config})
    )
    return folder


@contextmanager
def speaking_gateway(tmp_path: Path, **changes):
    """Run a gateway with `speaker`, which has a token per byte, and `tiny`, without a tokenizer."""
    with running_gateway(tmp_path, **changes) as gate:
        folder = write_speaking_model(tmp_path / "speaker", byte_tokenizer())
        gate.run(gate.gateway.models.add(name="speaker", path=str(folder)))
        yield gate


def client_of(gate: Gate, *, key: str = KEY, **changes) -> openai.OpenAI:
    changes = {"max_retries": 0, "timeout": 30} | changes
    return openai.OpenAI(base_url=f"{gate.url}/v1", api_key=key, **changes)


def complete(client: openai.OpenAI, **changes):
    return client.completions.create(**({"model": "speaker", "prompt": "x"} | changes))


def chat(client: openai.OpenAI, **changes):
    return client.chat.completions.create(**({"model": "speaker", "messages": CHAT} | changes))


def async_client_of(gate: Gate, **changes) -> openai.AsyncOpenAI:
    changes = {"max_retries": 0, "timeout": 30} | changes
    return openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=KEY, **changes)


def says(gate: Gate, text: str, *, end: bool = True):
    """Make the newest engine continue every prompt with this text."""
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    end_token = [tokenizer.token_to_id("<eos>")] if end else []
    engine = gate.worker("sampler")[1]
    engine.speak = lambda _prompt: [*tokens, *end_token]
    return engine
