"""Calls to the API server, with objects as plain JSON.

The client's generated classes refuse unknown fields of newer servers, so only its configuration,
credentials and connections are used.

A call without an answer, or with 429 or 5xx, is repeated until its time is over, with growing
pauses. During an outage one call at a time probes the server, so that waiting calls cause no storm.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
import orjson
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.rest import RESTResponse

from gateway.workers.launchers.kubernetes.names import PODS, Resource
from gateway.workers.launchers.kubernetes.templates import Object
from tandem.errors import describe

_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 15.0
_JITTER = 0.3
_AT_ONCE = 16
_LOG_BYTES = 2**16


class ApiFault(Exception):
    """A call failed.

    ApiFault
    ├── Unanswered: no answer, or a server fault, for the whole time of the call
    └── Refused: an answer with a status below 500"""


class Unanswered(ApiFault):
    """The call's effect is unknown. `retry_after` is the server's wanted pause in seconds."""

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(ApiFault):
    """`reason` is the server's word, such as "AlreadyExists"."""

    def __init__(self, *, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Listed:
    items: list[Object]
    version: str


@dataclass(frozen=True)
class WatchEvent:
    """`type` is ADDED, MODIFIED, DELETED or BOOKMARK."""

    type: str
    object: Object


class Api:
    """`connect` returns the client at the first call. `timeout` bounds one request, `patience` a
    call with repetitions, both in seconds."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[ApiClient]],
        *,
        namespace: str,
        timeout: float = 30.0,
        patience: float = 60.0,
    ) -> None:
        self._connect = connect
        self._client: ApiClient | None = None
        self._connecting = asyncio.Lock()
        self._namespace = namespace
        self._timeout = timeout
        self._patience = patience
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._asking = asyncio.Lock()
        self._failures = 0
        self._said = "too many calls wait"
        self._resume_at = 0.0

    @property
    def trouble(self) -> str:
        return f"the API server does not answer ({self._said})" if self._failures else ""

    async def create(self, resource: Resource, body: Object) -> Object:
        """Create an object. Unknown fields are refused, not silently dropped."""
        query = {"fieldValidation": "Strict"}
        return await self._call(_HttpRequest("POST", resource.path, query=query, body=body))

    async def read(self, resource: Resource, name: str) -> Object | None:
        try:
            return await self._call(_HttpRequest("GET", resource.path + "/{name}", name=name))
        except Refused as error:
            if error.status == 404:
                return None
            raise

    async def find(self, resource: Resource, name: str) -> Object | None:
        """Do as `read`, with only the right to list."""
        listed = await self.list(resource, fields=f"metadata.name={name}")
        return listed.items[0] if listed.items else None

    async def delete(
        self, resource: Resource, name: str, *, uid: str, version: str, grace: int | None = None
    ) -> None:
        """Delete an object with this uid and `version` ("": any), so that a changed pod or claim
        stays. Raises `Refused` with status 404 if it is gone, and 409 if it changed. `grace` is a
        pod's time to end in seconds; 0 forgets it without its node's answer."""
        seen = {"uid": uid} | ({"resourceVersion": version} if version else {})
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": seen}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        await self._call(_HttpRequest("DELETE", resource.path + "/{name}", name=name, body=body))

    async def patch(self, resource: Resource, name: str, metadata: Object) -> None:
        """Set labels and annotations. None removes one."""
        request = _HttpRequest(
            "PATCH",
            resource.path + "/{name}",
            name=name,
            body={"metadata": metadata},
            content_type="application/merge-patch+json",
        )
        await self._call(request)

    async def list(self, resource: Resource, *, labels: str = "", fields: str = "") -> Listed:
        query = _selectors(labels=labels, fields=fields)
        answer = await self._call(_HttpRequest("GET", resource.path, query=query))
        return Listed(answer.get("items") or [], answer["metadata"].get("resourceVersion", ""))

    async def log(self, pod: str, *, container: str, lines: int) -> str:
        query = {"container": container, "tailLines": str(lines), "limitBytes": str(_LOG_BYTES)}
        request = _HttpRequest("GET", PODS.path + "/{name}/log", name=pod, query=query)
        return (await self._send(request)).decode(errors="replace")

    async def watch(
        self, resource: Resource, *, version: str, labels: str, seconds: float
    ) -> AsyncIterator[WatchEvent]:
        """Yield changes after a version, for about `seconds`. A BOOKMARK comes first, when the
        server has accepted. Raises `Unanswered`, and `Refused` with status 410 for an old version.
        """
        query = _selectors(labels=labels) | {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, int(seconds))),
        }
        patient = aiohttp.ClientTimeout(sock_connect=self._timeout)
        request = _HttpRequest("GET", resource.path, query=query)
        async with AsyncExitStack() as opened:
            async with self._turn():
                try:
                    async with asyncio.timeout(self._timeout):
                        answer = await opened.enter_async_context(self._answer(request, patient))
                        refusal = b"" if answer.status == 200 else await answer.read()
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    raise self._failed(describe(error)) from error
                await self._judge(answer, refusal)
            yield WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": version}})
            try:
                async for line in answer.response.content:
                    event = orjson.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise _refused(status.get("code", 500), orjson.dumps(status))
                    yield WatchEvent(event["type"], event["object"])
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                said = f"a watch of {resource.plural} broke: {describe(error)}"
                raise Unanswered(said) from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _call(self, request: _HttpRequest) -> Object:
        content = await self._send(request)
        try:
            answer: Object = orjson.loads(content)
        except orjson.JSONDecodeError as error:  # perhaps from a proxy, so the effect is unknown
            raise Unanswered(f"the API server's answer cannot be read: {error}") from error
        return answer

    async def _send(self, request: _HttpRequest) -> bytes:
        pause = _FIRST_PAUSE
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    try:
                        async with self._slots, self._turn():
                            return await self._exchange(request)
                    except Unanswered as error:
                        await asyncio.sleep(max(error.retry_after, jittered(pause)))
                        pause = min(2 * pause, _LONGEST_PAUSE)
        except TimeoutError:
            raise Unanswered(f"the API server does not answer ({self._said})") from None

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """During an outage, wait for the turn to probe the server."""
        if not self._failures:
            yield
            return
        async with self._asking:
            if (wait := self._resume_at - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(wait)
            yield

    async def _exchange(self, request: _HttpRequest) -> bytes:
        bound = aiohttp.ClientTimeout(total=self._timeout)
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._answer(request, bound) as answer,
            ):
                content: bytes = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._failed(describe(error)) from error
        await self._judge(answer, content)
        return content

    async def _judge(self, answer: RESTResponse, content: bytes) -> None:
        """Raise `Unanswered` or `Refused` for an error status."""
        status, asked = answer.status, answer.headers.get("Retry-After", "")
        if status == 401:
            await self._renew_token()
        if status in (401, 429) or status >= 500:
            said = f"{status} {_refused(status, content)}"
            raise self._failed(said, retry_after=float(asked) if asked.isdecimal() else 0.0)
        self._failures = 0
        if status >= 400:
            raise _refused(status, content)

    async def _renew_token(self) -> None:
        """Get a new token, because a plugin's token expires."""
        with suppress(ApiFault):
            fresh = await self._connect()
            assert self._client is not None
            self._client.configuration.api_key = fresh.configuration.api_key
            await fresh.close()

    def _failed(self, why: str, *, retry_after: float = 0.0) -> Unanswered:
        self._failures += 1
        self._said = why
        pause = min(_FIRST_PAUSE * 2.0 ** min(self._failures, 16), _LONGEST_PAUSE)
        self._resume_at = asyncio.get_running_loop().time() + max(retry_after, jittered(pause))
        return Unanswered(f"the API server does not answer ({why})", retry_after=retry_after)

    @asynccontextmanager
    async def _answer(
        self, request: _HttpRequest, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[RESTResponse]:
        async with self._connecting:
            client = self._client = self._client or await self._connect()
        serialized = await client.param_serialize(
            request.method,
            request.path,
            path_params={"namespace": self._namespace, "name": request.name},
            query_params=list(request.query.items()),
            header_params={"Accept": "application/json", "Content-Type": request.content_type},
            body=request.body,
            auth_settings=["BearerToken"],
        )
        answer = await client.call_api(*serialized, _request_timeout=timeout)
        try:
            yield answer
        finally:
            answer.response.close()


@dataclass(frozen=True)
class _HttpRequest:
    method: str
    path: str
    name: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    body: Object | None = None
    content_type: str = "application/json"


def _selectors(*, labels: str = "", fields: str = "") -> dict[str, str]:
    chosen = {"labelSelector": labels, "fieldSelector": fields}
    return {key: value for key, value in chosen.items() if value}


def _refused(status: int, content: bytes) -> Refused:
    try:
        said = orjson.loads(content)
        return Refused(
            status=status, reason=said.get("reason") or "", message=said.get("message") or ""
        )
    except (orjson.JSONDecodeError, AttributeError):  # a proxy's page
        return Refused(status=status, reason="", message=content[:200].decode(errors="replace"))


def jittered(pause: float) -> float:
    """Add a random part, so that waiting callers do not ask together."""
    return pause * (1 + _JITTER * random.random())
