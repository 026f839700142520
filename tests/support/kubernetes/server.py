"""An API server in memory for the real client.

There is no port: `Session` stands for connections. Every change has a version, from which a watch
can continue. `compact` forgets old versions, and a watch from there answers 410. `calls` lists all
requests. `meddle` causes faults."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import aiohttp
import kubernetes_validate

from tests.support.kubernetes.validation import faults_of

KINDS = {
    "pods": "Pod",
    "secrets": "Secret",
    "services": "Service",
    "networkpolicies": "NetworkPolicy",
    "events": "Event",
    "resourceclaims": "ResourceClaim",
    "deployments": "Deployment",
}
PROTECTION = "resource.kubernetes.io/delete-protection"
_PATH = re.compile(
    r"/(?:api/v1|apis/[^/]+/[^/]+)/namespaces/([^/]+)/([a-z]+)(?:/([^/]+))?(?:/([a-z]+))?"
)


@dataclass(frozen=True)
class Call:
    """`verb` is RBAC's. `number` counts requests without watches."""

    verb: str
    resource: str
    subresource: str
    name: str
    at: float
    number: int

    @property
    def rule(self) -> tuple[str, str]:
        return self.verb, f"{self.resource}/{self.subresource}".rstrip("/")


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict | str
    headers: tuple[tuple[str, str], ...] = ()


class Lost(Exception):
    """The connection breaks, before the request is carried out or `after`."""

    def __init__(self, *, after: bool) -> None:
        super().__init__()
        self.after = after


class Hangs(Lost):
    """No answer ever comes."""


def refusal(status: int, reason: str, message: str, *, retry_after: int = 0) -> Answer:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": status,
    }
    headers = (("Retry-After", str(retry_after)),) if retry_after else ()
    return Answer(status, body, headers)


class Refusal(Exception):
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body)
        self.answer = answer


class FakeServer:
    """`meddle` is called before each request. It may return another answer, or raise `Lost`.

    `strict` checks fields against the schemas."""

    namespace = "rl"

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self.objects: dict[str, dict[str, dict]] = {plural: {} for plural in KINDS}
        self.calls: list[Call] = []
        self.logs: dict[str, str] = {}
        self.latency = 0.0
        self.meddle: Callable[[Call], Answer | None] = lambda _call: None
        self.on_change: list[Callable[[str, str, dict], None]] = []
        self.version = 1
        self.started = datetime.now(UTC)
        self._oldest = 1
        self._history: defaultdict[str, list[tuple[int, str, dict]]] = defaultdict(list)
        self._watches: set[asyncio.Queue] = set()

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def clock(self, beyond: float = 0.0) -> str:
        moment = self.started + timedelta(seconds=self.now + beyond)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

    # --- Objects ------------------------------------------------------------------------------

    def get(self, plural: str, name: str) -> dict | None:
        return self.objects[plural].get(name)

    def all(self, plural: str) -> list[dict]:
        return list(self.objects[plural].values())

    def put(self, plural: str, body: dict) -> dict:
        metadata = body["metadata"]
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.clock()}
        metadata["namespace"] = self.namespace
        self.objects[plural][metadata["name"]] = body
        self._note(plural, "ADDED", body)
        return body

    def change(self, plural: str, body: dict) -> None:
        if self.objects[plural].get(body["metadata"]["name"]) is body:
            self._note(plural, "MODIFIED", body)

    def remove(self, plural: str, name: str) -> None:
        body = self.objects[plural].pop(name, None)
        if body is not None:
            self._note(plural, "DELETED", body)

    def delete(self, plural: str, name: str, *, grace: int | None = None) -> dict | None:
        """A pod on a node, or a claim in use, is only marked."""
        body = self.objects[plural].get(name)
        if body is None:
            return None
        metadata = body["metadata"]
        if plural == "pods" and body["spec"].get("nodeName") and grace != 0:
            ended = body.get("status", {}).get("phase") in ("Failed", "Succeeded")
            usual = body["spec"].get("terminationGracePeriodSeconds", 30)
            grace = (0 if ended else usual) if grace is None else grace
            before = metadata.get("deletionGracePeriodSeconds")
            if before is None or grace < before:
                metadata["deletionTimestamp"] = self.clock(grace)
                metadata["deletionGracePeriodSeconds"] = grace
                self.change(plural, body)
            return body
        if metadata.get("finalizers"):
            if "deletionTimestamp" not in metadata:
                metadata["deletionTimestamp"] = self.clock()
                self.change(plural, body)
            return body
        self.remove(plural, name)
        return body

    def collect(self, owner: str) -> None:
        """Delete the objects of a missing owner, like the garbage collector."""
        for plural, objects in self.objects.items():
            for name, body in tuple(objects.items()):
                owners = body["metadata"].get("ownerReferences", [])
                if owners and all(each["uid"] == owner for each in owners):
                    self.delete(plural, name)

    def compact(self) -> None:
        self._oldest = self.version + 1
        self._history.clear()
        self.version += 1

    def close_watches(self, *, broken: bool = False) -> None:
        for queue in tuple(self._watches):
            queue.put_nowait(aiohttp.ClientPayloadError("cut off") if broken else None)

    def _note(self, plural: str, kind: str, body: dict) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        told = copy.deepcopy(body)
        self._history[plural].append((self.version, kind, told))
        for queue in self._watches:
            queue.put_nowait((plural, self.version, kind, told))
        for tell in self.on_change:
            tell(plural, kind, body)

    # --- Requests -----------------------------------------------------------------------------

    async def handle(self, method: str, url: str, body: str | None) -> Answer | AsyncIterator:
        parts = urlsplit(url)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if method == "POST":
            answer = self.answer_elsewhere(parts.path, json.loads(body or "{}"))
            if answer is not None:
                return answer
        match = _PATH.fullmatch(parts.path)
        assert match is not None, url
        namespace, plural, name, subresource = (each or "" for each in match.groups())
        watches = query.get("watch") == "true"
        verb = {"POST": "create", "DELETE": "delete", "PUT": "update", "PATCH": "patch"}.get(
            method, "watch" if watches else "get" if name else "list"
        )
        number = sum(call.verb != "watch" for call in self.calls)
        call = Call(verb, plural, subresource, name, self.now, number)
        self.calls.append(call)
        await asyncio.sleep(self.latency)
        lost: Lost | None = None
        try:
            if (answer := self.meddle(call)) is not None:
                return answer
        except Lost as error:
            if not error.after:
                await self._lose(error)
            lost = error
        if namespace != self.namespace:
            return refusal(404, "NotFound", f'namespaces "{namespace}" not found')
        if watches:
            return self._watch(plural, query)
        try:
            done = self._carry_out(call, query, json.loads(body) if body else None)
        except Refusal as refused:
            done = refused.answer
        if lost is not None:
            await self._lose(lost)
        return done

    def answer_elsewhere(self, path: str, body: dict) -> Answer | None:
        """Answer a request that is about no object, such as a review."""
        return None

    async def _lose(self, how: Lost) -> None:
        if isinstance(how, Hangs):
            await asyncio.Event().wait()
        raise aiohttp.ServerDisconnectedError

    def _carry_out(self, call: Call, query: dict[str, str], body: dict | None) -> Answer:
        plural, name = call.resource, call.name
        if call.verb == "create":
            assert body is not None
            return Answer(201, self._create(plural, query, body))
        if call.verb == "list":
            return Answer(200, self._list(plural, query))
        one = self.objects[plural].get(name)
        if one is None:
            raise Refusal(refusal(404, "NotFound", f'{plural} "{name}" not found'))
        if call.subresource == "log":
            return Answer(200, self.logs.get(name, ""))
        if call.verb == "get":
            return Answer(200, copy.deepcopy(one))
        if call.verb == "patch":
            for field, changes in (body or {})["metadata"].items():
                merged = one["metadata"].get(field, {}) | changes
                one["metadata"][field] = {key: value for key, value in merged.items() if value}
            self.change(plural, one)
            return Answer(200, copy.deepcopy(one))
        assert call.verb == "delete", call
        options = body or {}
        for field, wanted in options.get("preconditions", {}).items():
            if one["metadata"][field] != wanted:
                said = f"Precondition failed: {field} in precondition: {wanted}, in object: another"
                raise Refusal(refusal(409, "Conflict", said))
        left = self.delete(plural, name, grace=options.get("gracePeriodSeconds"))
        return Answer(200, copy.deepcopy(left or {}))

    def _create(self, plural: str, query: dict[str, str], body: dict) -> dict:
        kind, name = KINDS[plural], body["metadata"].get("name", "")
        body = copy.deepcopy(body)
        if self.strict and query.get("fieldValidation") == "Strict":
            _check_fields(body)
        if name in self.objects[plural]:
            raise Refusal(refusal(409, "AlreadyExists", f'{plural} "{name}" already exists'))
        if faults := faults_of(kind, body):
            said = faults[0] if len(faults) == 1 else f"[{', '.join(faults)}]"
            raise Refusal(refusal(422, "Invalid", f'{kind} "{name}" is invalid: {said}'))
        if plural == "pods":
            body["status"] = {"phase": "Pending"}
        if plural == "resourceclaims":
            for request in body["spec"].get("devices", {}).get("requests", []):
                if "exactly" in request:
                    request["exactly"].setdefault("allocationMode", "ExactCount")
                    request["exactly"]["count"] = request["exactly"].get("count") or 1
        return copy.deepcopy(self.put(plural, body))

    def _list(self, plural: str, query: dict[str, str]) -> dict:
        items = [copy.deepcopy(each) for each in self.all(plural) if _selected(each, query)]
        metadata = {"resourceVersion": str(self.version)}
        return {"kind": f"{KINDS[plural]}List", "metadata": metadata, "items": items}

    async def _watch(self, plural: str, query: dict[str, str]) -> AsyncIterator[dict | Exception]:
        since, end = int(query["resourceVersion"]), self.now + float(query["timeoutSeconds"])
        if since < self._oldest - 1:
            gone = refusal(410, "Expired", f"too old resource version: {since} ({self.version})")
            yield {"type": "ERROR", "object": gone.body}
            return
        queue: asyncio.Queue = asyncio.Queue()
        for version, kind, body in self._history[plural]:
            if version > since:
                queue.put_nowait((plural, version, kind, body))
        self._watches.add(queue)
        bookmark_at = self.now + 60
        try:
            while self.now < end:
                try:
                    async with asyncio.timeout(min(bookmark_at, end) - self.now):
                        told = await queue.get()
                except TimeoutError:
                    bookmark_at = self.now + 60
                    metadata = {"resourceVersion": str(self.version)}
                    yield {"type": "BOOKMARK", "object": {"metadata": metadata}}
                    continue
                if told is None:
                    return
                if isinstance(told, Exception):
                    raise told
                of_plural, _version, kind, body = told
                if of_plural == plural and _selected(body, query):
                    yield {"type": kind, "object": body}
        finally:
            self._watches.discard(queue)


_known_shapes: set[str] = set()


def _check_fields(body: dict) -> None:
    """Check each shape of object once, because the schemas are slow to read."""
    shape = json.dumps(_shape_of(body), sort_keys=True)
    if shape in _known_shapes:
        return
    try:
        kubernetes_validate.validate(body, "1.37", strict=True)
    except kubernetes_validate.ValidationError as error:
        said = f"strict decoding error: {error.message}"
        raise Refusal(refusal(400, "BadRequest", said)) from error
    _known_shapes.add(shape)


def _shape_of(value: object) -> object:
    if isinstance(value, dict):
        return {key: _shape_of(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shape_of(each) for each in value]
    return type(value).__name__


def _selected(body: dict, query: dict[str, str]) -> bool:
    labels = body["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = term.partition("=")
        part, _, name = key.partition(".")
        assert part in ("metadata", "involvedObject"), key
        if body.get(part, {}).get(name) != value:
            return False
    return True


class Session:
    """The connections of one client.

    A `severed` one reaches nobody, like a killed gateway. From request `sever_at` on it is severed,
    and that request may still be carried out. While not `awake`, all its messages wait."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.severed = asyncio.Event()
        self.awake = asyncio.Event()
        self.awake.set()
        self.sever_at: int | None = None
        self.sever_after = False
        self.requests = 0

    async def request(self, *, method: str, url: str, data: str | None = None, **_others: object):
        await self.awake.wait()
        if "watch=true" not in url:
            if self.requests == self.sever_at:
                if self.sever_after:
                    await self.server.handle(method, url, data)
                self.severed.set()
            self.requests += 1
        if self.severed.is_set():
            await asyncio.Event().wait()
        answer = await self.server.handle(method, url, data)
        if isinstance(answer, Answer):
            return _Response(answer.status, dict(answer.headers), answer.body)
        return _Response(200, {}, "", content=self._lines(answer))

    async def _lines(self, events: AsyncIterator[dict]) -> AsyncIterator[bytes]:
        async for event in events:
            await self.awake.wait()
            if self.severed.is_set():
                await asyncio.Event().wait()
            yield json.dumps(event).encode() + b"\n"

    async def close(self) -> None: ...


class _Response(SimpleNamespace):
    def __init__(self, status: int, headers: dict, body: dict | str, *, content=None) -> None:
        super().__init__(status=status, reason="", headers=headers, content=content)
        self._body = body if isinstance(body, str) else json.dumps(body)

    async def read(self) -> bytes:
        return self._body.encode()

    def close(self) -> None: ...
