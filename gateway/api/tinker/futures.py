"""Results of accepted requests: long polls for one request, or for all samples of a client."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Literal

from pydantic import BaseModel, Field
from starlette.responses import FileResponse, Response

from gateway.api.dependencies import Access, AccessDep
from gateway.api.fields import Answer
from gateway.api.request_body import JSON, PROTOBUF, BoundedRequest, parse
from gateway.api.routing import Router, binary, json_content, model_response
from gateway.api.tinker.json_bodies import ForwardBackwardResult, SampleResult, result_in_json
from gateway.identifiers import split_request_id, unknown_request
from gateway.storage.futures.completion_feed import Target
from gateway.storage.futures.table import Future, Outcome, Result
from tandem.errors import InvalidRequest, TandemError, UnknownRequest, UnknownSampler

WEIGHT_VERSION_HEADER = "X-Tandem-Weight-Version"

LONG_POLL = 30.0
"""Most seconds that a request waits for its result. One that waits for a place or a start is
answered within 2 s, and when the reason changes (`FutureTable.wait_for_news`)."""

_SHORTEST = 2 / 3
"""The shortest long poll, as a share of `LONG_POLL`. Thousands that begin together end apart."""

INLINE_BYTES = 2**20
"""The largest result sent at once to a client that prefers the size first. Its limit of 50 MiB has
room for these, and each question costs a round trip."""

_QUICKLY_CONVERTED = 16 * 2**10
"""Bytes of a protobuf result whose JSON takes about a millisecond."""

router = Router("/api/v1", tag="SDK")


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


class FailedOperation(Answer):
    """An accepted operation that failed. The status is 200, because the question was answered."""

    error: str
    type: str
    category: Literal["user", "server"]


class ResultSize(Answer):
    """The size of a large result, for a client that asked for it."""

    request_id: str
    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int


class RunCreated(Answer):
    type: Literal["create_model"]
    model_id: str


class Stepped(Answer):
    type: Literal["optim_step"]
    metrics: dict[str, float | None]


class StateSaved(Answer):
    type: Literal["save_weights"]
    path: str


class SavedForSampler(Answer):
    """The path of a named checkpoint, or the sampling session of an ephemeral one."""

    type: Literal["save_weights_for_sampler"]
    path: str | None = None
    sampling_session_id: str | None = None


class Exported(Answer):
    type: Literal["save_weights_external"]
    path: str
    size_bytes: int


class StateLoaded(Answer):
    type: Literal["load_weights"]
    path: str
    model_id: str


class CustomLossCreated(Answer):
    type: Literal["create_custom_loss"]
    loss_id: str


class TryAgain(Answer):
    """Not finished yet."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity"]
    queue_state_reason: str | None


class Finished(Answer):
    state: Literal["finished"] = "finished"
    request_id: str
    response_payload_uncompressed_size: int


class Failed(Answer):
    state: Literal["failed"] = "failed"
    request_id: str


class FinishedSamples(Answer):
    completions: list[Finished | Failed]
    cursor: int = Field(ge=0)


AnyResult = (
    FailedOperation
    | ResultSize
    | RunCreated
    | Stepped
    | StateSaved
    | SavedForSampler
    | Exported
    | StateLoaded
    | CustomLossCreated
    | ForwardBackwardResult
    | SampleResult
)
_RESULT_BYTES = binary(
    "ForwardBackwardOutput or SampleResponse of protos/tandem/wire/v1/tinker.proto"
)


# Raw: this is the most frequent route, and its answers are mostly finished bytes. It takes half the
# time of FastAPI's parsing and serialising. retrieve_futures answers many samples at once, so there
# it is not worth it.
@router.operation(
    "POST",
    "/retrieve_future",
    role="reader",
    audit=None,
    errors=[UnknownRequest],
    raw=json_content(Retrieve),
    responses={
        200: {
            "model": AnyResult,
            "description": "The result, by the kind of the operation, or why there is none. A "
            "batch's or sample's result is protobuf, or JSON if `Accept` names JSON alone.",
            "content": {PROTOBUF: {"schema": _RESULT_BYTES}},
        },
        408: {"model": TryAgain, "description": "Not finished; ask again."},
        410: {"model": FailedOperation, "description": "A sample to be asked for again."},
    },
)
async def retrieve_future(request: BoundedRequest) -> Response:
    """Return the result of an accepted request.

    200 with the result, or with `{"error", "category", "type"}` if the operation failed. 408 while
    it is not finished, 410 for a sample to request again, 404 otherwise. A large result is answered
    with its size if the client allows that."""
    access = Access(request)
    gateway = access.gateway
    body = await request.read(partial(parse, Retrieve))
    request_id = body.request_id
    await access.request(request_id)
    future = gateway.futures.get(request_id)
    if future is not None:
        timeout = LONG_POLL * random.uniform(_SHORTEST, 1)
        outcome = await gateway.futures.wait_for_news(future, timeout=timeout)
        if outcome is None:
            return _try_again(future)
        size = outcome.size if isinstance(outcome, Result) else 0
        if body.allow_metadata_only and size > INLINE_BYTES:
            return model_response(ResultSize(request_id=request_id, response_payload_size=size))
        if access.caller.may_change:  # a reader's look does not count as the owner's fetch
            gateway.futures.note_fetched(future)
        return await _result(access, request, request_id, outcome)
    recalled = await gateway.journal.recall(request_id)
    recalled = recalled or await gateway.custom_losses.recall(request_id)
    if recalled is not None and not isinstance(recalled, UnknownRequest):
        return await _result(access, request, request_id, recalled)
    owner = split_request_id(request_id)
    if owner is not None and ":sample:" in owner[0] and await gateway.sampling.known(owner[0]):
        return _gone(f"the sample {request_id} is no longer here; ask for it again")
    raise recalled or unknown_request(request_id)


@router.operation(
    "POST",
    "/retrieve_futures",
    role="ci",  # it also drops samples
    audit=None,
    errors=[UnknownSampler],
    response_model=FinishedSamples,
    responses={410: {"model": FailedOperation, "description": "A cursor of an earlier gateway."}},
)
async def retrieve_futures(body: RetrieveMany, access: AccessDep) -> FinishedSamples | Response:
    """Return a client's samples that finished since its last poll. 410 for a cursor of an earlier
    gateway, which lost the client's samples."""
    target = body.target
    await access.past_sampling_session(target.sampling_session_id)
    longest = LONG_POLL
    polled = await access.gateway.completions.poll(
        Target(target.sampling_session_id, target.cloned_sampler_id),
        after=body.prev_cursor,
        timeout=longest if body.timeout is None else min(body.timeout, longest),
        retrieved=body.retrieved_request_ids,
    )
    if polled is None:
        return _gone("the gateway restarted, and the samples waited for are gone; ask again")
    completions, cursor = polled
    return FinishedSamples(
        completions=[
            Failed.of(done, state="failed")
            if done.size is None
            else Finished.of(done, state="finished", response_payload_uncompressed_size=done.size)
            for done in completions
        ],
        cursor=cursor,
    )


@router.operation(
    "POST",
    "/cancel_future",
    role="ci",
    audit=None,
    errors=[UnknownRequest],
    rules=["Only samples can be cancelled."],
)
async def cancel_future(body: Cancel, access: AccessDep) -> None:
    """Cancel a sample, here and in its engine. Idempotent: 204 also for a finished or forgotten
    one. Operations of a run cannot be cancelled, because later ones build on them."""
    request_id = body.request_id
    await access.request(request_id)
    owner = split_request_id(request_id)
    if owner is None:
        raise unknown_request(request_id)
    if ":sample:" not in owner[0]:
        raise InvalidRequest(
            f"{request_id} is an operation of a run; only samples can be cancelled"
        )
    access.gateway.samplers.cancel(request_id)


def _gone(sentence: str) -> Response:
    gone = FailedOperation(error=sentence, type=UnknownRequest.type, category="server")
    return model_response(gone, status=410)


async def _result(
    access: Access, request: BoundedRequest, request_id: str, outcome: Outcome
) -> Response:
    if isinstance(outcome, TandemError):
        # The SDK shows only the sentence, so it includes the type.
        sentence = f"{outcome.type}: {outcome.message}"
        return model_response(FailedOperation.of(outcome, error=sentence))
    headers = {WEIGHT_VERSION_HEADER: outcome.weight_version} if outcome.weight_version else None
    media = PROTOBUF if outcome.media == "protobuf" else JSON
    accepted = request.headers.get("accept", "")
    if media == PROTOBUF and JSON in accepted and PROTOBUF not in accepted:
        body = await _in_json(access, request_id, outcome)
        return Response(body, media_type=JSON, headers=headers)
    if outcome.file is not None:
        return FileResponse(outcome.file, media_type=media, headers=headers)
    return Response(outcome.body, media_type=media, headers=headers)


async def _in_json(access: Access, request_id: str, result: Result) -> str:
    """Convert a protobuf result: a small one at once, large ones in a thread, one at a time."""
    body = result.body
    if result.file is not None:
        body = await asyncio.to_thread(result.file.read_bytes)

    def convert() -> str:
        return result_in_json(body, of_sample=":sample:" in request_id).model_dump_json()

    if len(body) <= _QUICKLY_CONVERTED:
        return convert()
    async with access.gateway.parsing.turn(access.caller.owner):
        return await asyncio.to_thread(convert)


def _try_again(future: Future) -> Response:
    waiting = future.describe()
    return model_response(
        TryAgain(
            request_id=future.request_id,
            queue_state="paused_capacity" if waiting.paused else "active",
            queue_state_reason=waiting.reason,
        ),
        status=408,
    )
