"""SDKs that are too old."""

from __future__ import annotations

import pytest

from gateway.api.tinker.service import check_sdk_version
from tandem.errors import SdkTooOld


def test_releases_before_protobuf_are_refused_and_later_ones_are_not():
    for version in ("0.1.0", "0.16.1", "0.24.9"):
        with pytest.raises(SdkTooOld, match=r"pip install --upgrade \"tinker>=0\.27\""):
            check_sdk_version(version)
    assert "older than" in (check_sdk_version("0.25.0") or "")
    for version in ("0.27.2", "0.38.0", "1.0.0", "0.38.0.dev3", "test", ""):
        assert check_sdk_version(version) is None


def test_an_old_client_gets_one_clear_400_wherever_it_begins(gate):
    with gate.http() as client:
        for path, body in (
            ("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.16.1"}),
            ("client/config", {"sdk_version": "0.16.1"}),
            ("forward", {"forward_input": {}, "model_id": "s-1:train:0", "seq_id": 1}),
            ("forward_backward", {"forward_backward_input": {}, "model_id": "s-1:train:0"}),
        ):
            answer = client.post(f"/api/v1/{path}", json=body)
            assert answer.status_code == 400, path
            assert answer.json()["type"] == "sdk_too_old"
            assert 'pip install --upgrade "tinker>=0.27"' in answer.json()["error"]


def test_an_untested_release_is_warned_and_served(gate):
    with gate.http() as client:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.25.0"}
        answer = client.post("/api/v1/create_session", json=body).json()
        assert "tinker>=0.27" in answer["warning_message"]
        assert answer["session_id"]
        body["sdk_version"] = "0.38.0"
        assert client.post("/api/v1/create_session", json=body).json()["warning_message"] is None


def test_telemetry_is_counted_and_dropped(gate):
    batch = {"events": [{"event": "SESSION_START"}] * 3, "platform": "x", "sdk_version": "0.38.0"}
    with gate.http() as client:

        def counted() -> float:
            line = next(
                line
                for line in client.get("/metrics").text.splitlines()
                if line.startswith("tandem_gateway_telemetry_events_total ")
            )
            return float(line.split()[1])

        before = counted()
        answer = client.post("/api/v1/telemetry", json=batch)
        assert answer.json() == {"status": "accepted"}
        assert counted() == before + 3
