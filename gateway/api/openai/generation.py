"""The samples of one request: asked for together, waited for together, given up together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import Receive

from gateway.api.openai.errors import NotReady
from gateway.api.openai.models import Served
from gateway.futures.table import Future, Outcome, Result
from gateway.identifiers import request_id_of
from gateway.sampling.router import SamplerRouter
from gateway.sampling.sampler import Sampler
from gateway.sampling.sessions import SamplingSession
from gateway.sessions.registry import SessionRegistry
from tandem.errors import GatewayRestarted, OperationTimedOut, TandemError
from tandem.settings import OpenAISettings
from tandem.v1 import sampler_pb2
from tandem.wire.v1 import tinker_pb2

_GLANCE = 2.0
"""Seconds after which whoever waits looks whether there is still something to wait for."""

_UNREAD = 64
"""Events of a stream that may wait in memory for their reader. The engine what comes
beyond that."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class NewTokens:
    """Tokens of a sample of the prompt with this number."""

    prompt: int
    delta: sampler_pb2.SampleDelta


@dataclass(frozen=True)
class Done:
    """All samples of the prompt with this number."""

    prompt: int
    response: tinker_pb2.SampleResponse


Event = NewTokens | Done


@dataclass(frozen=True)
class _Ended:
    prompt: int
    outcome: Outcome


class Generator:
    """Brings requests to engines, by the way that the SDK's samples take."""

    def __init__(
        self,
        *,
        settings: OpenAISettings,
        sessions: SessionRegistry,
        samplers: SamplerRouter,
        closing: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._samplers = samplers
        self._closing = closing

    @asynccontextmanager
    async def running(
        self,
        *,
        owner: str,
        served: Served,
        session: SamplingSession,
        sampler: Sampler,
        requests: Sequence[sampler_pb2.SampleRequest],
        seq_ids: Sequence[int],
        stream: bool,
        receive: Receive,
    ) -> AsyncIterator[Running]:
        """Asks for the samples; what has not ended with the block is given up. Raises
        `Overloaded`."""
        running = Running(
            settings=self._settings,
            sessions=self._sessions,
            samplers=self._samplers,
            session=session,
            sampler=sampler,
            closing=self._closing,
        )
        try:
            for request, place in zip(requests, seq_ids, strict=True):
                running.ask(request, place=place, owner=owner, served=served, stream=stream)
            running.listen(receive)
            yield running
        finally:
            running.give_up()


class Running:
    """The samples of a request while they are computed."""

    def __init__(
        self,
        *,
        settings: OpenAISettings,
        sessions: SessionRegistry,
        samplers: SamplerRouter,
        session: SamplingSession,
        sampler: Sampler,
        closing: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._samplers = samplers
        self._session = session
        self._sampler = sampler
        self._closing = closing
        self._events: asyncio.Queue[NewTokens | _Ended | ClientGone] = asyncio.Queue()
        self._room = asyncio.Semaphore(_UNREAD)
        self._futures: list[Future] = []
        self._listener: asyncio.Task[None] | None = None
        self._left = 0
        self._since = time.monotonic()

    def ask(
        self,
        request: sampler_pb2.SampleRequest,
        *,
        place: int,
        owner: str,
        served: Served,
        stream: bool,
    ) -> None:
        """Raises `Overloaded`."""
        prompt = len(self._futures)
        request_id = request_id_of(owner=self._session.id, seq_id=place)
        request.operation_id = request_id
        request.session_id = self._session.session_id
        request.seq_id = place
        request.version.CopyFrom(served.version.to_proto())
        sampler = self._sampler
        future = Future(
            request_id=request_id,
            source="sample",
            kind="sample",
            owner=owner,
            describe=lambda: sampler.describe(request_id),
        )

        async def tell(delta: sampler_pb2.SampleDelta) -> None:
            await self._room.acquire()
            self._events.put_nowait(NewTokens(prompt=prompt, delta=delta))

        self._samplers.submit(
            sampler,
            future=future,
            version=served.version,
            request=request,
            tell=tell if stream else None,
        )
        self._futures.append(future)
        self._left += 1
        future.on_end(
            lambda outcome: self._events.put_nowait(_Ended(prompt=prompt, outcome=outcome))
        )

    def listen(self, receive: Receive) -> None:
        """From now on the client's going away ends the wait. The body has been read."""

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._events.put_nowait(ClientGone())

        self._listener = asyncio.create_task(until_gone())

    @property
    def unread(self) -> bool:
        """Whether there is something that `next` would return at once."""
        return not self._events.empty()

    async def next(self) -> Event | None:
        """What happens next; None: everything has ended. Raises what a sample failed with,
        `NotReady`, `OperationTimedOut` or `ClientGone`."""
        if self._left == 0:
            return None
        event = await self._wait()
        if isinstance(event, ClientGone):
            raise event
        if isinstance(event, NewTokens):
            self._room.release()
            return event
        if isinstance(event.outcome, TandemError):
            raise event.outcome
        self._left -= 1
        return Done(prompt=event.prompt, response=_response(event.outcome))

    async def all(self) -> list[tinker_pb2.SampleResponse]:
        """The answers to all prompts, in their order. Raises as `next`."""
        found: dict[int, tinker_pb2.SampleResponse] = {}
        while (event := await self.next()) is not None:
            if isinstance(event, Done):
                found[event.prompt] = event.response
        return [found[prompt] for prompt in sorted(found)]

    def give_up(self) -> None:
        """Ends what has not ended, here and in the engine."""
        if self._listener is not None:
            self._listener.cancel()
        for future in self._futures:
            if not future.ended:
                self._samplers.cancel(future.request_id)
        self._sessions.touch(self._session.session_id)

    async def _wait(self) -> NewTokens | _Ended | ClientGone:
        while True:
            try:
                async with asyncio.timeout(_GLANCE):
                    return await self._events.get()
            except TimeoutError:
                self._sessions.touch(self._session.session_id)
                self._check_patience()

    def _check_patience(self) -> None:
        waited = time.monotonic() - self._since
        if self._closing():
            raise GatewayRestarted("the gateway is being stopped; ask again a little later")
        if self._sampler.state != "ready" and waited > self._settings.start_timeout:
            why = self._futures[-1].describe().reason
            raise NotReady(
                f"{why}; it goes on, so ask again a little later (TANDEM_OPENAI_START_TIMEOUT)"
            )
        if waited > self._settings.request_timeout:
            raise OperationTimedOut(
                f"no answer within {self._settings.request_timeout:g} s "
                "(TANDEM_OPENAI_REQUEST_TIMEOUT); ask for fewer tokens, or a little later"
            )


def _response(result: Result) -> tinker_pb2.SampleResponse:
    return tinker_pb2.SampleResponse.FromString(result.body)
