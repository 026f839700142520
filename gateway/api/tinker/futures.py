"""What became of accepted requests: by long poll, one by one or all of a client's samples."""

from __future__ import annotations

import time
from typing import Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.file_answer import FileAnswer
from gateway.api.wire import (
    JSON,
    PROTOBUF,
    caller_of,
    gateway_of,
    json_response,
    parse,
    read_body,
)
from gateway.futures.completion_feed import Completion, Target
from gateway.futures.table import Future, Outcome, Waiting
from gateway.identifiers import split_request_id
from tandem.errors import InvalidRequest, TandemError, UnknownRequest

WEIGHT_VERSION_HEADER = "X-Tandem-Weight-Version"

INLINE_BYTES = 2**20
"""The largest result that is sent at once to a client that would rather hear its size first.
The SDK holds 50 MiB of results at once: fifty small ones more do no harm, and a question for
each of them would cost a round trip each."""


class Retrieve(BaseModel):
    request_id: str
    allow_metadata_only: bool = False


class SamplesTarget(BaseModel):
    type: Literal["sampling_session"]
    sampling_session_id: str
    cloned_sampler_id: int = Field(0, ge=0)


class RetrieveMany(BaseModel):
    target: SamplesTarget
    prev_cursor: int = Field(0, ge=0)
    timeout: float | None = Field(None, ge=0, allow_inf_nan=False)
    retrieved_request_ids: list[str] = Field(default_factory=list)


class Cancel(BaseModel):
    request_id: str


async def retrieve_future(request: Request) -> Response:
    """What became of an accepted request. 200 with the result, or with `{"error", "category",
    "type"}` where the operation failed; 408 while it has not ended; 410 for a sample that is to
    be asked for again; 404 else.

    A large result is answered with its size alone where the client allows that."""
    gateway, caller = gateway_of(request), caller_of(request)
    body = parse(Retrieve, await read_body(request))
    request_id = body.request_id
    await gateway.access.request(request_id, caller)
    future = gateway.futures.get(request_id)
    if future is not None:
        outcome = await gateway.futures.wait(future, timeout=gateway.settings.long_poll)
        if outcome is None:
            return _try_again(future)
        if body.allow_metadata_only and not isinstance(outcome, TandemError):
            size = outcome.size
            if size > INLINE_BYTES:
                metadata = {"status": "complete_metadata", "response_payload_size": size}
                return json_response({"request_id": request_id, **metadata})
        if caller.may_change:  # what only a reader has seen must still be there for its owner
            future.fetched_at = time.monotonic()
        return _answer(outcome)
    recalled = await gateway.recall(request_id)
    if recalled is not None and not isinstance(recalled, UnknownRequest):
        return _answer(recalled)
    owner = split_request_id(request_id)
    if owner is not None and ":sample:" in owner[0] and await gateway.sampling.known(owner[0]):
        return _gone(f"the sample {request_id} is no longer here; ask for it again")
    raise recalled or UnknownRequest(f"there is no request {request_id!r} on this server")


async def retrieve_futures(request: Request) -> Response:
    """Which samples of a client have ended since its last poll. 410 when the cursor is of an
    earlier gateway: what the client waits for is not known here."""
    gateway = gateway_of(request)
    body = parse(RetrieveMany, await read_body(request))
    target = body.target
    await gateway.access.past_sampling_session(target.sampling_session_id, caller_of(request))
    longest = gateway.settings.long_poll
    polled = await gateway.completions.poll(
        Target(target.sampling_session_id, target.cloned_sampler_id),
        after=body.prev_cursor,
        timeout=longest if body.timeout is None else min(body.timeout, longest),
        retrieved=body.retrieved_request_ids,
    )
    if polled is None:
        return _gone("the gateway restarted, and the samples waited for are gone; ask again")
    return json_response(
        {
            "completions": [_completion(done) for done in polled.completions],
            "cursor": polled.cursor,
        }
    )


async def cancel_future(request: Request) -> Response:
    """Gives up a sample, here and in its engine. 204 also for one that has ended, or that
    nobody knows any more: asking twice does no harm. Operations of a run cannot be given up,
    since what comes after them counts on them."""
    gateway = gateway_of(request)
    request_id = parse(Cancel, await read_body(request)).request_id
    await gateway.access.request(request_id, caller_of(request))
    owner = split_request_id(request_id)
    if owner is None:
        raise UnknownRequest(f"there is no request {request_id!r} on this server")
    if ":sample:" not in owner[0]:
        raise InvalidRequest(
            f"{request_id} is an operation of a run; only samples can be cancelled"
        )
    gateway.samplers.cancel(request_id)
    return Response(status_code=204)


def _gone(sentence: str) -> Response:
    body = {"error": sentence, "type": UnknownRequest.type, "category": "server"}
    return json_response(body, status=410)


def _completion(done: Completion) -> dict[str, object]:
    if done.size is None:
        return {"state": "failed", "request_id": done.request_id}
    return {
        "state": "finished",
        "request_id": done.request_id,
        "response_payload_uncompressed_size": done.size,
    }


def _answer(outcome: Outcome) -> Response:
    if isinstance(outcome, TandemError):
        # The SDK shows its user the sentence alone, so that the type is part of it.
        return json_response(
            {
                "error": f"{outcome.type}: {outcome.message}",
                "type": outcome.type,
                "category": outcome.category,
            }
        )
    headers = {WEIGHT_VERSION_HEADER: outcome.weight_version} if outcome.weight_version else None
    media = PROTOBUF if outcome.media == "protobuf" else JSON
    if outcome.file is not None:
        return FileAnswer(outcome.file, size=outcome.file_bytes, media_type=media, headers=headers)
    return Response(outcome.body, media_type=media, headers=headers)


def _try_again(future: Future) -> Response:
    waiting: Waiting = future.describe()
    return json_response(
        {
            "type": "try_again",
            "request_id": future.request_id,
            "queue_state": "paused_capacity" if waiting.paused else "active",
            "queue_state_reason": waiting.reason,
        },
        status=408,
    )
