"""Loaded by schemathesis: makes bodies that are not JSON."""

from __future__ import annotations

from random import Random

import schemathesis
from hypothesis import strategies as st

from tests.fuzz import protobuf
from tests.fuzz.seeds import protobuf_seeds

MEDIA = "application/x-protobuf"
_SEEDS = protobuf_seeds(["cross_entropy", "ppo"])


@schemathesis.serializer(MEDIA)
def as_it_is(_context, value):
    return value.encode() if isinstance(value, str) else value


def _body(number: int) -> bytes:
    rng = Random(number)
    return protobuf.mutate(rng, rng.choice(_SEEDS), rng.choice(_SEEDS))


schemathesis.openapi.media_type(MEDIA, st.integers(0, 2**32).map(_body))
