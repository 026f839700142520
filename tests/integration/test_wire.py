"""What only plain HTTP can get wrong: order, repetition, bodies, sessions and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import httpx
import numpy as np
import pytest
import tinker
from tinker import TrainingClient

from tests.support.plain_http import PROTOBUF, PlainClient, message, optim_step
from tests.support.sdk import SOON, refusal_of
from tests.support.stacks import TIED, TestStack, session_of

TOKENS = [11, 22, 33, 44, 55]


@dataclass(frozen=True)
class PlainRun:
    client: PlainClient
    session_id: str
    model_id: str
    numbers: Iterator[int]

    def forward(self) -> np.ndarray:
        """Logprobs now; also the proof that the run works."""
        answer = self.client.forward_backward(
            message(self.model_id, next(self.numbers), TOKENS, forward_only=True)
        )
        assert answer.status_code == 200, answer.text
        return self.client.retrieve(answer.json()["request_id"]).logprobs


@pytest.fixture(scope="module")
def plain(stack: TestStack, runs: dict[str, TrainingClient]) -> PlainRun:
    """A run of the SDK's session, whose operations are sent without the SDK."""
    client = PlainClient(stack.stack.endpoint)
    session_id = session_of(runs[TIED])
    model_id = client.create_model(session_id, f"{TIED}:full", number=1000)
    assert model_id == f"{session_id}:train:1000"
    return PlainRun(client, session_id, model_id, count(1))


def test_operations_that_arrive_out_of_order_run_in_order(plain: PlainRun) -> None:
    before = plain.forward()
    client, model_id = plain.client, plain.model_id
    backward, step, forward = (next(plain.numbers) for _ in range(3))
    last = client.forward_backward(message(model_id, forward, TOKENS, forward_only=True))
    second = client.post("optim_step", optim_step(model_id, step))
    first = client.forward_backward(message(model_id, backward, TOKENS))
    client.retrieve(first.json()["request_id"])
    client.retrieve(second)
    after = client.retrieve(last.json()["request_id"]).logprobs
    assert after.sum() > before.sum() + 0.01, "the forward came last and saw the step"


def test_a_repeated_seq_id_returns_the_first_answer_and_is_not_applied_again(
    plain: PlainRun,
) -> None:
    client, model_id = plain.client, plain.model_id
    backward, step = next(plain.numbers), next(plain.numbers)
    first = client.forward_backward(message(model_id, backward, TOKENS)).json()["request_id"]
    one = client.retrieve(first)
    stepped = client.post("optim_step", optim_step(model_id, step))
    answer = client.retrieve(stepped)
    then = plain.forward()

    again = client.forward_backward(message(model_id, backward, [1, 2, 3])).json()["request_id"]
    assert again == first
    assert client.retrieve(again) == one
    repeated = client.post("optim_step", optim_step(model_id, step, rate=1.0))
    assert repeated == stepped
    assert client.retrieve(repeated) == answer
    np.testing.assert_array_equal(plain.forward(), then)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"\xff\xff\xff\xff", {}),
        (b'{"model_id": "x"}', {}),
        (b"", {}),
        (b"not zstd", {"Content-Encoding": "zstd"}),
        (b"{}", {"Content-Type": "application/json"}),
    ],
)
def test_a_payload_that_is_not_protobuf_is_refused(
    plain: PlainRun, body: bytes, headers: dict[str, str]
) -> None:
    refused = refusal_of(plain.client.forward_backward(body, **headers))
    assert refused.category == "user"
    assert refused.type in ("malformed_payload", "invalid_request", "sdk_too_old")
    assert plain.forward().size


def test_a_payload_cut_off_in_its_datums_is_refused_and_takes_its_place(plain: PlainRun) -> None:
    """The gateway reads no datum: this one reaches the trainer, which then says what is wrong."""
    broken = message(plain.model_id, next(plain.numbers), TOKENS)
    broken.data[0].model_input[0].encoded_text.tokens = b"\x01\x02\x03"
    answer = plain.client.forward_backward(broken)
    refused = (
        plain.client.failure(answer.json()["request_id"])
        if answer.is_success
        else refusal_of(answer)
    )
    assert (refused.type, refused.category) == ("malformed_payload", "user")
    assert plain.forward().size


def test_an_empty_batch_is_refused(plain: PlainRun) -> None:
    empty = message(plain.model_id, next(plain.numbers), TOKENS)
    del empty.data[:]
    answer = plain.client.forward_backward(empty)
    assert plain.client.failure(answer.json()["request_id"]).type == "empty_batch"
    assert plain.forward().size


def test_an_oversized_payload_is_refused_before_it_is_read(plain: PlainRun) -> None:
    refused = refusal_of(plain.client.forward_backward(b"\0" * (2**20 + 1)))
    assert (refused.type, refused.status) == ("payload_too_large", 413)
    assert plain.forward().size


def test_an_oversized_payload_in_small_clothes_is_refused(plain: PlainRun) -> None:
    """A few kilobytes of zstd that would become far more than the limit."""
    import zstandard

    small = zstandard.compress(b"\0" * (64 * 2**20))
    assert len(small) < 2**20
    refused = refusal_of(plain.client.forward_backward(small, **{"Content-Encoding": "zstd"}))
    assert refused.type == "payload_too_large"
    assert plain.forward().size


def test_a_compressed_payload_is_taken(plain: PlainRun) -> None:
    import zstandard

    whole = message(plain.model_id, next(plain.numbers), TOKENS, forward_only=True)
    answer = plain.client.forward_backward(
        zstandard.compress(whole.SerializeToString()), **{"Content-Encoding": "zstd"}
    )
    found = plain.client.retrieve(answer.json()["request_id"]).logprobs
    np.testing.assert_allclose(found, plain.forward())


def test_a_wrong_session_is_refused(plain: PlainRun) -> None:
    body = {
        "session_id": "s-000000000000",
        "model_seq_id": 0,
        "base_model": f"{TIED}:full",
        "optimizer_config": {"type": "adamw"},
    }
    refused = refusal_of(plain.client.http.post("create_model", json=body))
    assert (refused.type, refused.status) == ("unknown_session", 404)
    assert refusal_of(plain.client.heartbeat("s-000000000000")).type == "unknown_session"


def test_a_missing_session_is_refused_with_the_name_of_the_field(plain: PlainRun) -> None:
    refused = refusal_of(
        plain.client.http.post("create_model", json={"model_seq_id": 0, "base_model": TIED})
    )
    assert refused.type in ("invalid_request", "malformed_payload")
    assert "session_id" in refused.message


def test_a_body_that_is_not_json_is_refused(plain: PlainRun) -> None:
    answer = plain.client.http.post(
        "optim_step", content=b"{", headers={"Content-Type": "application/json"}
    )
    assert refusal_of(answer).type in ("invalid_request", "malformed_payload")
    assert plain.forward().size


def test_a_run_of_a_foreign_session_is_refused(plain: PlainRun) -> None:
    """A session cannot be made to own what another one made."""
    other = plain.client.create_session()
    body = {
        "session_id": other,
        "sampling_session_seq_id": 0,
        "model_path": f"tinker://{other}:train:0/sampler_weights/x",
    }
    refused = refusal_of(plain.client.http.post("create_sampling_session", json=body))
    assert refused.type == "unknown_weights"
    answer = plain.client.forward_backward(message(f"{other}:train:0", 1, TOKENS))
    assert refusal_of(answer).type == "unknown_run"
    assert plain.forward().size


def test_a_finished_session_is_refused_with_410(plain: PlainRun) -> None:
    session_id = plain.client.create_session()
    plain.client.finish(session_id)
    refused = refusal_of(plain.client.heartbeat(session_id))
    assert (refused.type, refused.status) == ("session_finished", 410)


def test_an_unknown_request_id_is_refused(plain: PlainRun) -> None:
    for request_id in ("nonsense", f"{plain.model_id}:999999"):
        refused = refusal_of(plain.client.poll(request_id))
        assert refused.type == "unknown_request"
        assert refused.status != 400, "which the SDK would repeat"


def test_a_wrong_key_is_refused(stack: TestStack, plain: PlainRun) -> None:
    with (
        stack.service(api_key="tml-wrong") as service,
        pytest.raises(tinker.AuthenticationError) as caught,
    ):
        service.create_lora_training_client(f"{TIED}:full").result(timeout=SOON)
    assert refusal_of(caught.value.response).type == "unauthenticated"
    url = stack.stack.endpoint.url
    for path in ("/api/v1/forward_backward", "/api/v1/create_session", "/api/tandem/v1/status"):
        method = "GET" if path.endswith("status") else "POST"
        answer = httpx.request(method, f"{url}{path}", headers=PROTOBUF)
        assert refusal_of(answer).status == 401, "no key at all"
    assert plain.forward().size
