"""The wire protocol in plain HTTP, for mistakes that the SDK cannot make."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
import numpy as np

from tandem.stack import Endpoint
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.sdk import Refusal, refusal_of
from tests.support.trainer_worker import datum

PROTOBUF = {"Content-Type": "application/x-protobuf"}


@dataclass(frozen=True)
class Answer:
    """A result of retrieve_future: protobuf bytes or a JSON object."""

    body: bytes
    json: dict

    @property
    def logprobs(self) -> np.ndarray:
        record = wire.ForwardBackwardOutput.FromString(self.body).loss_fn_outputs[0]
        return np.frombuffer(record.fields["logprobs"].data, "<f4")


class PlainClient:
    """One session without the SDK. It sends a heartbeat only on demand."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.http = httpx.Client(
            base_url=f"{endpoint.url}/api/v1/", headers={"X-API-Key": endpoint.api_key}, timeout=60
        )

    def create_session(self) -> str:
        answer = self.http.post("create_session", json={"tags": [], "sdk_version": "0.38.0"})
        answer.raise_for_status()
        return answer.json()["session_id"]

    def heartbeat(self, session_id: str) -> httpx.Response:
        return self.http.post("session_heartbeat", json={"session_id": session_id})

    def finish(self, session_id: str) -> None:
        body = {"reason": {"type": "success"}, "detail": ""}
        self.http.post(f"sessions/{session_id}/finish", json=body).raise_for_status()

    def create_model(self, session_id: str, base_model: str, *, number: int = 0) -> str:
        answer = self.http.post(
            "create_model",
            json={
                "session_id": session_id,
                "model_seq_id": number,
                "base_model": base_model,
                "optimizer_config": {"type": "adamw"},
            },
        )
        answer.raise_for_status()
        return self.retrieve(answer.json()["request_id"]).json["model_id"]

    def post(self, path: str, body: dict) -> str:
        answer = self.http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()["request_id"]

    def forward_backward(
        self, message: wire.ForwardBackwardRequest | bytes, **headers: str
    ) -> httpx.Response:
        payload = message if isinstance(message, bytes) else message.SerializeToString()
        return self.http.post("forward_backward", content=payload, headers={**PROTOBUF, **headers})

    def retrieve(self, request_id: str) -> Answer:
        """Fails if the operation failed."""
        answer = self.poll(request_id)
        if answer.headers["content-type"].startswith("application/x-protobuf"):
            return Answer(body=answer.content, json={})
        assert "error" not in answer.json(), answer.json()
        return Answer(body=b"", json=answer.json())

    def failure(self, request_id: str) -> Refusal:
        answer = self.poll(request_id)
        if answer.is_error:
            return refusal_of(answer)
        type_, _, message = answer.json()["error"].partition(": ")
        return Refusal(type=type_, message=message, category=answer.json()["category"], status=200)

    def poll(self, request_id: str) -> httpx.Response:
        """Poll until there is an outcome, a few times at most."""
        for _ in range(6):
            answer = self.http.post(
                "retrieve_future", json={"request_id": request_id, "allow_metadata_only": False}
            )
            if answer.status_code != 408:
                return answer
        raise AssertionError(f"{request_id} has no outcome: {answer.text}")


def message(
    model_id: str,
    seq_id: int,
    tokens: list[int],
    *,
    forward_only: bool = False,
    loss: str = "cross_entropy",
) -> wire.ForwardBackwardRequest:
    """Return a forward_backward of one datum: predict tokens[1:] from tokens[:-1]."""
    one = datum(tokens[:-1], targets=tokens[1:], weights=np.ones(len(tokens) - 1))
    return wire.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only, data=[one]
    )
