"""The samples of one request while they are computed: submitted, awaited and cancelled together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Receive

from gateway.api.openai.errors import EngineStarting
from gateway.checkpoints.versions import WeightVersion
from gateway.futures.table import Future, Outcome
from gateway.identifiers import request_id_of
from gateway.sampling.router import SamplerRouter
from gateway.sampling.sampler import Sampler
from gateway.sampling.sessions import SamplingSession
from gateway.sessions.registry import SessionRegistry
from tandem.errors import GatewayRestarted, OperationTimedOut, TandemError
from tandem.settings import OpenAISettings
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2


class ClientDisconnected(Exception):
    """The client no longer waits for the response."""


@dataclass(frozen=True)
class NewTokens:
    """Tokens of a sample of the prompt with this index."""

    prompt: int
    delta: sampler_pb2.SampleDelta


@dataclass(frozen=True)
class Finished:
    """All samples of the prompt with this index."""

    prompt: int
    response: tinker_pb2.SampleResponse


@dataclass(frozen=True)
class _Ended:
    prompt: int
    outcome: Outcome


class Generation:
    """Submits one sample request per prompt and yields what comes of them, with `next` or `all`.

    `poll_interval` in seconds: how often a waiting request checks its timeouts and keeps its
    session alive. `max_unread`: events of a stream that may wait for a slow reader; more stay in
    the engine. `closing` tells whether the gateway is shutting down.
    """

    def __init__(
        self,
        *,
        settings: OpenAISettings,
        sessions: SessionRegistry,
        samplers: SamplerRouter,
        session: SamplingSession,
        sampler: Sampler,
        owner: str,
        version: WeightVersion,
        closing: Callable[[], bool],
        poll_interval: float = 2.0,
        max_unread: int = 64,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._samplers = samplers
        self._session = session
        self._sampler = sampler
        self._owner = owner
        self._version = version
        self._closing = closing
        self._poll_interval = poll_interval
        self._events: asyncio.Queue[NewTokens | _Ended | ClientDisconnected] = asyncio.Queue()
        self._unread_slots = asyncio.Semaphore(max_unread)
        self._futures: list[Future] = []
        self._disconnect_listener: asyncio.Task[None] | None = None
        self._unfinished = 0
        self._started_at = time.monotonic()

    def submit(self, request: sampler_pb2.SampleRequest, *, seq_id: int, stream: bool) -> None:
        """Submit the request of the next prompt, the way that the SDK's samples are submitted.
        Raises `Overloaded`."""
        prompt = len(self._futures)
        request_id = request_id_of(owner=self._session.id, seq_id=seq_id)
        request.operation_id = request_id
        request.session_id = self._session.session_id
        request.seq_id = seq_id
        request.version.CopyFrom(self._version.to_proto())
        sampler = self._sampler
        future = Future(
            request_id=request_id,
            source="sample",
            kind="sample",
            owner=self._owner,
            describe=lambda: sampler.describe(request_id),
        )

        async def put(delta: sampler_pb2.SampleDelta) -> None:
            await self._unread_slots.acquire()
            self._events.put_nowait(NewTokens(prompt=prompt, delta=delta))

        self._samplers.submit(
            sampler,
            future=future,
            version=self._version,
            request=request,
            tell=put if stream else None,
        )
        self._futures.append(future)
        self._unfinished += 1
        future.on_end(
            lambda outcome: self._events.put_nowait(_Ended(prompt=prompt, outcome=outcome))
        )

    def listen_for_disconnect(self, receive: Receive) -> None:
        """End the wait when the client disconnects. Its request has been read completely."""

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._events.put_nowait(ClientDisconnected())

        self._disconnect_listener = asyncio.create_task(listen())

    @property
    def session_id(self) -> str:
        """The sampling session in which it samples."""
        return self._session.id

    @property
    def has_unread(self) -> bool:
        """Whether `next` would return at once."""
        return not self._events.empty()

    async def next(self) -> NewTokens | Finished | None:
        """Return the next event; None when every prompt is finished.

        Raises the error of a sample, `EngineStarting` or `OperationTimedOut` when its time is up,
        `GatewayRestarted`, or `ClientDisconnected`.
        """
        if self._unfinished == 0:
            return None
        event = await self._wait()
        if isinstance(event, ClientDisconnected):
            raise event
        if isinstance(event, NewTokens):
            self._unread_slots.release()
            return event
        if isinstance(event.outcome, TandemError):
            raise event.outcome
        self._unfinished -= 1
        response = tinker_pb2.SampleResponse.FromString(event.outcome.body)
        return Finished(prompt=event.prompt, response=response)

    async def all(self) -> list[tinker_pb2.SampleResponse]:
        """Return the responses in the order of the prompts. Raises as `next`."""
        found: dict[int, tinker_pb2.SampleResponse] = {}
        while (event := await self.next()) is not None:
            if isinstance(event, Finished):
                found[event.prompt] = event.response
        return [found[prompt] for prompt in sorted(found)]

    def cancel(self) -> None:
        """Cancel what has not ended, here and in the engine."""
        if self._disconnect_listener is not None:
            self._disconnect_listener.cancel()
        for future in self._futures:
            if not future.ended:
                self._samplers.cancel(future.request_id)
        self._sessions.touch(self._session.session_id)

    async def _wait(self) -> NewTokens | _Ended | ClientDisconnected:
        while True:
            try:
                async with asyncio.timeout(self._poll_interval):
                    return await self._events.get()
            except TimeoutError:
                self._sessions.touch(self._session.session_id)
                self._check_timeouts()

    def _check_timeouts(self) -> None:
        waited = time.monotonic() - self._started_at
        if self._closing():
            raise GatewayRestarted("the gateway is shutting down; retry a little later")
        if self._sampler.state != "ready" and waited > self._settings.start_timeout:
            why = self._futures[-1].describe().reason
            raise EngineStarting(
                f"{why}; it goes on, so retry a little later (TANDEM_OPENAI_START_TIMEOUT)"
            )
        if waited > self._settings.request_timeout:
            raise OperationTimedOut(
                f"no response within {self._settings.request_timeout:g} s "
                "(TANDEM_OPENAI_REQUEST_TIMEOUT); ask for fewer tokens, or retry later"
            )
