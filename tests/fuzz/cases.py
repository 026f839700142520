from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from urllib.parse import quote, urlencode

import zstandard

from gateway.api.routing import PathOperation
from tandem.wire.v1 import tinker_pb2
from tests.fuzz import json_bodies, protobuf
from tests.fuzz.seeds import RUN, SAMPLER, SEQ, SESSION, json_seeds, protobuf_seeds

_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"

_PATH_PARTS: Mapping[str, Sequence[str]] = {
    "run_id": (RUN, f"{SESSION}:train:9", "s-ffffffffffff:train:0"),
    "sampler_id": (SAMPLER, f"{SESSION}:sample:99"),
    "session_id": (SESSION, "s-ffffffffffff"),
    "kind": ("weights", "sampler_weights", "external_weights", "others"),
    "name": ("kept", "export", "other"),
    "file": ("model.safetensors", "rank-0-0.safetensors", "checkpoint.json"),
    "key_id": ("k-000000000000",),
    "model": ("tiny", RUN, "tinker://" + RUN + "/sampler_weights/policy"),
}
_ODD_PARTS = (
    "..", ".", "%", "../../../../etc/passwd", "\x00", "a\r\nb: c", "²", "\u202e\U0001f600é́",
    "x" * 5000, "a/b", "a;b?c#d", "s-0123456789ab:train:99999999999999999999", "-1", " ",
)  # fmt: skip
_QUERIES = (
    "limit", "offset", "access_scope", "project_id", "session_id", "path", "place", "expires",
    "signature", "starting_on", "ending_before", "event_type", "day", "unheard_of",
)  # fmt: skip
_QUERY_VALUES = (
    "", "0", "1", "-1", "20", "1e3", "²", "9" * 30, "99999999999", "NaN", "owned", "accessible",
    "2026-07-13T00:00:00Z", "2026-07-13", "0000-00-00", "9999-12-31T23:00:00+00:00",
    "0001-01-01T00:00:00+14:00", f"tinker://{RUN}/weights/kept", "tinker://../../x", "\x00",
    "\udc80", "x" * 3000, "é\u202e",
)  # fmt: skip
_ENDLESS = frozenset({"live_run", "live_runs", "live_playground", "live_trial"})
_HARMFUL = frozenset({"finish_session", "stop_run", "stop_run_form"})
"""Routes that would end the objects of other requests."""


@dataclass(frozen=True)
class Case:
    """A request with placeholders for ids (see `seeds`)."""

    operation: str
    method: str
    target: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    chunked: bool = False

    def saved(self) -> str:
        return json.dumps({**asdict(self), "body": base64.b64encode(self.body).decode()}, indent=1)

    @classmethod
    def load(cls, text: str) -> Case:
        fields = json.loads(text)
        return cls(**{**fields, "body": base64.b64decode(fields["body"])})


def has_body(operation: PathOperation) -> bool:
    return operation.body_field is not None or "requestBody" in (operation.openapi_extra or {})


class Cases:
    """The same seed and number give the same request. `losses` names the losses of a
    forward_backward."""

    def __init__(
        self, operations: Sequence[PathOperation], *, seed: int, losses: list[str]
    ) -> None:
        self._seed = seed
        self._protobuf = protobuf_seeds(losses)
        self._json: dict[str, list[object]] = defaultdict(list)
        for name, body in json_seeds():
            self._json[name].append(body)
        self._batch = next(o for o in operations if o.name == "forward_backward")
        self._others = [o for o in operations if o is not self._batch and o.name not in _ENDLESS]
        bodies = [o for o in self._others if has_body(o)]
        missing = {o.name for o in bodies} - self._json.keys()
        assert not missing, f"routes without a seed in seeds.py: {sorted(missing)}"
        self._weighted = [*self._others, *bodies, *bodies]

    def make(self, number: int, *, seq_id: int) -> Case:
        """`seq_id` is the run's next one."""
        rng = Random(f"{self._seed}:{number}")
        if rng.random() < 0.4:
            return self._encoded(rng, self._forward_backward(rng, seq_id))
        operation = rng.choice(self._weighted)
        return self._encoded(rng, self._other(rng, operation, seq_id))

    def good(self) -> Case:
        message = tinker_pb2.ForwardBackwardRequest()
        message.CopyFrom(self._protobuf[0])
        message.seq_id = 1
        return Case(
            operation=self._batch.name,
            method="POST",
            target=self._batch.path,
            body=message.SerializeToString(),
            headers={"Content-Type": _PROTOBUF},
        )

    def _forward_backward(self, rng: Random, seq_id: int) -> Case:
        seed, other = (tinker_pb2.ForwardBackwardRequest() for _ in range(2))
        seed.CopyFrom(rng.choice(self._protobuf))
        other.CopyFrom(rng.choice(self._protobuf))
        seed.seq_id = other.seq_id = seq_id
        return Case(
            operation=self._batch.name,
            method="POST",
            target=self._batch.path,
            body=protobuf.mutate(rng, seed, other),
            headers={"Content-Type": _PROTOBUF},
        )

    def _other(self, rng: Random, operation: PathOperation, seq_id: int) -> Case:
        name = operation.name
        parts = {part: self._part(rng, name, part) for part in operation.param_convertors}
        target = operation.path_format.format(**parts)
        if operation.dependant.query_params or rng.random() < 0.1:
            target += self._query(rng)
        body = b""
        if has_body(operation):
            body = json_bodies.mutate(rng, rng.choice(self._json[name]))
            body = body.replace(str(SEQ).encode(), str(seq_id).encode())
        return Case(
            operation=name,
            method=operation.method,
            target=target,
            body=body,
            headers={"Content-Type": _JSON},
        )

    def _part(self, rng: Random, route: str, part: str) -> str:
        if route in _HARMFUL:
            return quote(rng.choice(("s-ffffffffffff", *_ODD_PARTS)), safe="")
        if route == "remove_model":  # the others need this model
            return quote(rng.choice(("other", *_ODD_PARTS)), safe="/")
        known = _PATH_PARTS.get(part, ("other",))
        return quote(rng.choice(known if rng.random() < 0.6 else _ODD_PARTS), safe="")

    def _query(self, rng: Random) -> str:
        chosen = [
            (rng.choice(_QUERIES), rng.choice(_QUERY_VALUES)) for _ in range(rng.choice((1, 2, 4)))
        ]
        return "?" + urlencode(chosen, errors="surrogateescape")

    def _encoded(self, rng: Random, case: Case) -> Case:
        """Compress some requests, or send headers that contradict the body."""
        fields = {**asdict(case), "headers": dict(case.headers)}
        if rng.random() < 0.03:
            fields["chunked"] = True
        if rng.random() < 0.85:
            return Case(**fields)
        headers, body = fields["headers"], case.body
        match rng.randrange(8):
            case 0 | 1:
                headers["Content-Encoding"] = "zstd"
                fields["body"] = zstandard.compress(body)
            case 2:
                headers["Content-Encoding"] = "zstd"
                packed = zstandard.compress(body)
                fields["body"] = packed[: rng.randrange(len(packed))]
            case 3:  # a few KB that expand to very many
                headers["Content-Encoding"] = "zstd"
                fields["body"] = zstandard.compress(body + bytes(rng.choice((2**20, 2**26))))
            case 4:
                headers["Content-Encoding"] = rng.choice(
                    ("zstd", "gzip", "br", "deflate", "", "zstd, zstd", "ZSTD", "x" * 2000)
                )
            case 5:
                headers["Content-Type"] = rng.choice(
                    ("application/json", "text/plain", "", "application/x-protobuf; a=b", "é" * 9)
                )
            case 6:
                headers["X-API-Key"] = rng.choice(
                    ("", "tml-wrong", "eyJhbGciOiJub25lIn0.e30.", "é")
                )
            case _:
                headers[rng.choice(("Range", "X-Idempotency-Key", "Expect", "Authorization"))] = (
                    rng.choice(("bytes=0-0", "bytes=9-1", "x" * 3000, "100-continue", "Bearer é"))
                )
        return Case(**fields)
