"""Continues the recorded tokens of a trace, and records the new turn."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from gateway.api.openai.prompts import PreparedPrompt, prompts_of
from gateway.api.openai.schemas import ChatCompletionRequest, Json
from gateway.api.openai.tokenizer import ModelTokenizer
from gateway.checkpoints.versions import WeightVersion
from gateway.recorder.conversation import (
    Conversations,
    Digests,
    RecordedTurn,
    RecordedVersion,
    encode_messages,
)
from gateway.recorder.store import Trace, TraceStore
from tandem.wire.v1 import tinker_pb2


class TurnRecording:
    """One request of a trace. Use: `prompt` returns the token ids to sample from, and `record`
    keeps the samples."""

    def __init__(
        self,
        store: TraceStore,
        trace: Trace,
        conversations: Conversations,
        request: ChatCompletionRequest,
    ) -> None:
        self._store = store
        self._trace = trace
        self._conversations = conversations
        self._request = request
        self._digests: Digests | None = None
        self._parent: int | None = None
        self._repeated = 0
        self._prompt: Sequence[int] = ()

    def prompt(self, tokenizer: ModelTokenizer, *, max_length: int | None) -> PreparedPrompt:
        """Return the recorded tokens of the longest conversation that the messages extend, and new
        tokens for the rest. Without one, tokenise all messages. Raises as `prompts_of`."""
        request = self._request
        shown = [request.shown_tools, request.documents, request.chat_template_kwargs]
        self._digests = Digests(request.messages, shown)
        found = self._conversations.find_parent(self._digests)
        if found is not None:
            number, messages = found
            text = tokenizer.chat_template().render_after(self._request, answer=messages - 1)
            if text is not None:
                text = _without_end(text, self._conversations.turns[number].tokens, tokenizer)
                self._parent, self._repeated = number, messages
                self._prompt = tokenizer.encode(
                    text, add_special_tokens=False, max_length=max_length
                )
                return PreparedPrompt([*self._conversations.tokens_of(number), *self._prompt])
        (prompt,) = prompts_of(self._request, tokenizer, max_length=max_length)
        self._prompt = prompt.token_ids
        return prompt

    async def record(
        self,
        sample: tinker_pb2.SampleResponse,
        answers: Sequence[Json],
        version: WeightVersion,
    ) -> None:
        """Record a turn for each sample. `version` has the step of samples that are not in flight.
        Raises `UnknownTrace` and `StorageFailed`."""
        digests = self._digests
        assert digests is not None
        await self._store.add_turns(
            self._trace,
            [
                RecordedTurn(
                    parent=self._parent,
                    prompt=array("i", self._prompt),
                    tokens=array("i", one.tokens),
                    logprobs=array("f", one.logprobs),
                    versions=_versions(one, version),
                    messages=encode_messages(
                        [*self._request.messages[self._repeated :], dict(answer)]
                    ),
                    digest=digests.after(answer),
                    stop_reason="length"
                    if one.stop_reason == tinker_pb2.STOP_REASON_LENGTH
                    else "stop",
                )
                for one, answer in zip(sample.sequences, answers, strict=True)
            ],
        )


def _versions(sample: tinker_pb2.SampledSequence, version: WeightVersion) -> list[RecordedVersion]:
    if sample.tandem_versions:
        return [
            RecordedVersion(run.version, run.step, run.tokens) for run in sample.tandem_versions
        ]
    return [RecordedVersion(version.name, version.step, len(sample.tokens) // 4)]


def _without_end(text: str, sampled: Sequence[int], tokenizer: ModelTokenizer) -> str:
    """Cut the end token from the template's text if the model has sampled it."""
    if not sampled or sampled[-1] not in tokenizer.end_tokens:
        return text
    end = tokenizer.token(sampled[-1])
    before, found, after = text.partition(end.text) if end is not None else (text, "", "")
    return after if found and not before.strip() else text
