"""A gateway with the trainer's real checks, and the objects of the requests."""

from __future__ import annotations

import http.client
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import orjson
from pydantic import TypeAdapter, ValidationError

from gateway.api.fields import Refusal
from gateway.api.routing import PathOperation
from tandem.errors import UserError
from tandem.v1 import trainer_pb2
from tandem.wire.v1 import tinker_pb2
from tests.fuzz.cases import Case
from tests.fuzz.secrets import Watch
from tests.fuzz.seeds import RUN, SESSION
from tests.fuzz.trainer import LIMITS
from tests.support.gateway.fake_trainer import FakeTrainer
from tests.support.gateway.running import KEY, Gate
from trainer_service.batches.validation import parse, validate

DEADLINE = 60.0
"""Seconds for every answer and operation."""
LONGEST_REFUSAL = 16 * 2**10
"""Bytes. A refusal does not repeat the request."""
_FRESH_RUN = 7_777_777
_SHOWN = frozenset({"exchange_token", "create_key"})


class CheckingTrainer(FakeTrainer):
    """Checks every batch as the real trainer does, but computes nothing."""

    async def ForwardBackward(self, request, context):
        run = await self._find(request.header.run_id, context)
        error = await self._admit(context, run, request.header)
        await self._apply("forward_backward", run, request)
        try:
            validate(parse(request.payload), limits=LIMITS, definition=request.loss_definition)
        except UserError as refused:
            error = refused
        if error is not None:
            return trainer_pb2.ForwardBackwardReply(failure=error.to_failure())
        output = tinker_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        return trainer_pb2.ForwardBackwardReply(output=output.SerializeToString(), tokens=1)

    async def _apply(self, kind, run, request):
        await super()._apply(kind, run, request)
        self.requests.clear()
        self.applied.clear()


@dataclass(frozen=True)
class Answer:
    status: int
    media: str
    body: bytes


class World:
    """A session with a run, a sampler and checkpoints. Their ids replace the placeholders."""

    def __init__(self, gate: Gate, operations: Sequence[PathOperation], watch: Watch) -> None:
        self._gate = gate
        self._operations = {o.name: o for o in operations}
        self._watch = watch
        self._connection = http.client.HTTPConnection(urlsplit(gate.url).netloc, timeout=DEADLINE)
        self.session_id = gate.session_id()
        # This session sends no heartbeats, and a slow machine may take long for a request. Sessions
        # of requests end at once to keep memory small.
        gate.gateway.sessions.require(self.session_id).ttl = 10 * DEADLINE
        self.run_id = gate.run_id(self.session_id)
        for spec in gate.launcher.specs:
            watch.know(spec.secret)
        gate.launcher.specs.clear()
        self.seq_id = 1
        self._open: list[str] = []
        self._prepare()

    def _prepare(self) -> None:
        with self._gate.http() as client:
            sampling = {
                "session_id": self.session_id,
                "sampling_session_seq_id": 0,
                "base_model": "tiny",
            }
            assert client.post("/api/v1/create_sampling_session", json=sampling).status_code == 200
            for route, name in (("save_weights", "kept"), ("save_weights_external", "export")):
                saving = {"model_id": self.run_id, "seq_id": self.seq_id, "path": name}
                answer = client.post(f"/api/v1/{route}", json=saving)
                assert answer.status_code == 200, answer.text
                self._gate.retrieve(answer.json()["request_id"])
                self.seq_id += 1

    def send(self, case: Case) -> Answer:
        """Send a request. Its answer must be in time, be declared and contain no secret."""
        answer = self._exchange(case)
        operation = self._operations[case.operation]
        astray = "%2F" in case.target  # the router reads another path
        check_answer(
            operation, status=answer.status, media=answer.media, body=answer.body, astray=astray
        )
        text = answer.body.decode("utf-8", "replace")
        if case.operation in _SHOWN and answer.status == 200:
            self._learn(answer)
        else:
            self._watch.check_text(f"the answer of {case.operation}", [text])
        if answer.status == 200 and operation.path.startswith("/api/v1/"):
            self._note(answer)
        elif self._is_taken():  # a refused request may still take its seq_id
            self.seq_id += 1
        return answer

    def settle(self) -> None:
        retrieve = self._operations["retrieve_future"]
        deadline = time.monotonic() + DEADLINE
        for request_id in self._open:
            body = b'{"request_id":"%b"}' % request_id.encode()
            headers = {"Content-Type": "application/json"}
            case = Case("retrieve_future", "POST", retrieve.path, body, headers)
            while self.send(case).status == 408:
                assert time.monotonic() < deadline, f"{request_id} did not end"
        self._open.clear()

    def close(self) -> None:
        self.settle()
        body = b'{"reason":{"type":"success"}}'
        path = self._operations["finish_session"].path_format.format(session_id=self.session_id)
        headers = {"Content-Type": "application/json"}
        answer = self.send(Case("finish_session", "POST", path, body, headers))
        assert answer.status == 204, answer
        self._connection.close()
        self._watch.check()

    def check_good(self, case: Case) -> None:
        """Check that a good forward_backward, the first of a new run, is computed."""
        run_id = self._gate.run_id(self.session_id, _FRESH_RUN)
        body = case.body.replace(RUN.encode(), run_id.encode())
        length = len(run_id) - len(RUN)
        assert body[1] == len(RUN), "the message begins with the run's id"
        body = body[:1] + bytes([len(RUN) + length]) + body[2:]
        answer = self._exchange(replace(case, body=body))
        assert answer.status == 200, answer
        result = self._gate.retrieve(orjson.loads(answer.body)["request_id"])
        assert result.headers["content-type"] == "application/x-protobuf", result.text

    def _note(self, answer: Answer) -> None:
        prefix = b'{"request_id":"%b:' % self.run_id.encode()
        if not answer.body.startswith(prefix):
            return
        number = answer.body[len(prefix) :].partition(b'"')[0].decode()
        request_id = f"{self.run_id}:{number}"
        if number == str(self.seq_id):
            self.seq_id += 1
        if request_id not in self._open:
            self._open.append(request_id)

    def _is_taken(self) -> bool:
        run = self._gate.gateway.runs.get(self.run_id)
        return run is not None and run.dispatcher.passed(self.seq_id)

    def _learn(self, answer: Answer) -> None:
        fields = orjson.loads(answer.body)
        self._watch.know(fields.get("jwt") or fields.get("key"))

    def _exchange(self, case: Case) -> Answer:
        headers = {"X-API-Key": KEY, **case.headers}
        body = self._with_ids(case.body)
        target = self._with_ids(case.target.encode()).decode()
        chunks = iter([body[i : i + 4096] for i in range(0, len(body), 4096)])
        with suppress(BrokenPipeError, ConnectionResetError):  # the answer may have come already
            self._connection.request(
                case.method,
                target,
                body=chunks if case.chunked else body,
                headers={k: v.encode() for k, v in headers.items()},
                encode_chunked=case.chunked,
            )
        try:
            response = self._connection.getresponse()
            content = response.read()
        except TimeoutError as error:
            self._connection.close()
            raise AssertionError(f"no answer within {DEADLINE} s") from error
        except (http.client.HTTPException, ConnectionError) as error:
            self._connection.close()
            raise AssertionError(f"no answer: {error!r}") from error
        if response.will_close:
            self._connection.close()
        return Answer(response.status, response.getheader("content-type") or "", content)

    def _with_ids(self, data: bytes) -> bytes:
        assert len(SESSION) == len(self.session_id)
        assert RUN.startswith(SESSION)
        return data.replace(SESSION.encode(), self.session_id.encode())


def check_answer(
    operation: PathOperation, *, status: int, media: str, body: bytes, astray: bool
) -> None:
    """Raise `AssertionError` for an answer that the route does not declare. The router may answer a
    request that went `astray`, after it asks for a key."""
    where = f"{operation.method} {operation.path} answered {status}"
    assert status < 500, f"{where}: {body[:500]!r}"
    expected = status == operation.status_code
    declared = operation.responses.get(status)
    others = (401, 404, 431) if astray else (404, 431)  # of router and connection
    if declared is None and status in others:
        declared = operation.responses.get(401, {"model": Refusal})
    assert expected or declared is not None, f"{where}, which is not declared"
    if status >= 400:
        assert len(body) <= LONGEST_REFUSAL, f"{where} with {len(body)} bytes"
    content = (declared or {}).get("content", {})
    model = (declared or {}).get("model") or (operation.response_model if expected else None)
    if media in content or media.partition(";")[0] in content:
        return
    if model is None:
        assert not body, f"{where} with a body: {body[:200]!r}"
        return
    assert media == "application/json", f"{where} as {media!r}"
    try:
        TypeAdapter(model).validate_json(body, strict=True)
    except ValidationError as error:
        raise AssertionError(f"{where} with {body[:400]!r}: {error}") from error
