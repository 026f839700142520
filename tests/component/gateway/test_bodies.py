"""Bodies that are small on the wire and large in memory."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard
from google.protobuf.message import DecodeError
from pydantic import ValidationError

from gateway.api import request_body
from gateway.api.request_body import SMALL_BODY, BodyTooLarge
from gateway.api.tinker import sampling, training
from gateway.api.tinker.batch_routing import routing_of
from gateway.api.tinker.service import TelemetryBatch
from gateway.app import path_operations
from tandem.wire.v1 import tinker_pb2
from tests.support.gateway.running import forward_backward_bytes
from tests.support.waiting import PATIENCE, wait_until

ZSTD = {"Content-Encoding": "zstd"}


def compressed(body: bytes, *, states_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=states_size).compress(body)


def noting_threads(function, seen: set[int]):
    """Wraps a function to record its threads."""

    def noted(*arguments, **options):
        seen.add(threading.get_ident())
        return function(*arguments, **options)

    return noted


@pytest.mark.parametrize("states_size", [True, False])
def test_no_route_for_json_decompresses_more_than_a_small_body(gate, monkeypatch, states_size):
    written = []

    def decompress(raw, most, original=request_body._decompress):
        body = original(raw, most)
        written.append(len(body))
        return body

    monkeypatch.setattr(request_body, "_decompress", decompress)
    bomb = compressed(b'{"more":"' + b"x" * 2 * SMALL_BODY + b'"}', states_size=states_size)
    assert len(bomb) < 1000
    paths = [
        (one.method, one.path.format_map(dict.fromkeys(one.param_convertors, "x")))
        for one in path_operations(gate.server.config.app)
        if one.name != "forward_backward" and (one.body_field or one.name == "asample")
    ]
    assert len(paths) > 20
    with gate.http() as client:
        for method, path in paths:
            answer = client.request(method, path, content=bomb, headers=ZSTD)
            assert answer.status_code == 413, (path, answer.text)
            assert "when decompressed" in answer.text
    assert max(written) <= (4096 if states_size else SMALL_BODY + 1)
    wait_until(lambda: gate.gateway.limits.bodies.total == 0)


def test_large_bodies_are_decompressed_and_parsed_away_from_the_event_loop(gate, monkeypatch):
    seen: dict[str, set[int]] = {}
    for module, name in (
        (request_body, "_decompress"),
        (request_body, "parse_json"),
        (sampling, "parse"),
        (sampling, "_sample_request"),
        (training, "routing_of"),
    ):
        noted = noting_threads(getattr(module, name), seen.setdefault(name, set()))
        monkeypatch.setattr(module, name, noted)
    text = b"x" * 300_000
    tokens = b"[" + b",".join([b"151643"] * 60_000) + b"]"
    prompt = b'{"base_model":"none","sampling_params":{},"prompt":{"chunks":[{"tokens":%s}]}}'
    with gate.http() as client:
        telemetry = b'{"events":["%s"]}' % text
        assert client.post("/api/v1/telemetry", content=telemetry).status_code == 200
        zipped = compressed(telemetry)
        assert client.post("/api/v1/telemetry", content=zipped, headers=ZSTD).status_code == 200
        answer = client.post("/api/v1/asample", content=prompt % tokens)
        assert answer.json()["type"] == "unknown_model"
        batch = forward_backward_bytes("s-none:train:0", 1) + b"\x7a\x00" * SMALL_BODY
        answer = client.post("/api/v1/forward_backward", content=compressed(batch), headers=ZSTD)
        assert answer.json()["type"] == "unknown_run", "which its first bytes name"
    assert all(seen.values()), seen
    assert gate.run(threading.get_ident) not in set.union(*seen.values())


def test_the_gateway_answers_others_while_bombs_are_parsed_one_at_a_time(gate, monkeypatch):
    may_go_on, at_work = threading.Event(), []

    def parse_json(body, original=request_body.parse_json, **options):
        at_work.append(len(at_work))
        assert may_go_on.wait(2 * PATIENCE), "nobody else was answered meanwhile"
        return original(body, **options)

    monkeypatch.setattr(request_body, "parse_json", parse_json)
    bomb = compressed(b'{"events":[' + b",".join([b'""'] * 60_000) + b"]}")
    assert len(bomb) < 2000
    headers = ZSTD | {"X-API-Key": gate.settings.api_key}

    def send(_number: int) -> int:
        with gate.http() as client:
            return client.post("/api/v1/telemetry", content=bomb, headers=headers).status_code

    with ThreadPoolExecutor(4) as clients, gate.http() as other:
        answers = clients.map(send, range(4))
        try:
            wait_until(lambda: at_work)
            wait_until(lambda: gate.gateway.limits.bodies.total > 3 * 60_000)
            for _ in range(20):
                assert other.get("/api/v1/healthz").status_code == 200
            assert len(at_work) == 1
        finally:
            may_go_on.set()
        assert list(answers) == [200] * 4


def test_a_frame_that_is_longer_than_its_header_says_is_refused(gate):
    frame = bytearray(compressed(b'{"events":[]}' + b" " * 100))
    frame[5] -= 1  # the size (one byte) after magic number and descriptor
    with gate.http() as client:
        answer = client.post("/api/v1/telemetry", content=bytes(frame), headers=ZSTD)
    assert (answer.status_code, answer.json()["type"]) == (400, "malformed_payload")


@pytest.mark.parametrize(("states_size", "status"), [(False, 200), (True, 400)])
def test_no_frame_of_several_is_dropped(gate, states_size, status):
    """A first frame that states its size promises the whole body."""
    frames = [compressed(part, states_size=states_size) for part in (b'{"events":', b"[]}")]
    with gate.http() as client:
        answer = client.post("/api/v1/telemetry", content=b"".join(frames), headers=ZSTD)
        assert answer.status_code == status
        damaged = compressed(b'{"events":[]}', states_size=states_size) + b"no frame"
        answer = client.post("/api/v1/telemetry", content=damaged, headers=ZSTD)
        assert (answer.status_code, answer.json()["type"]) == (400, "malformed_payload")


def test_a_compressed_body_takes_no_more_memory_than_it_has_once_it_is_read(gate, monkeypatch):
    seen = []

    def parse_json(body, original=request_body.parse_json, **options):
        seen.append(gate.gateway.limits.bodies.total)
        return original(body, **options)

    monkeypatch.setattr(request_body, "parse_json", parse_json)
    content = b'{"events":["%s"]}' % random.Random(0).randbytes(5000).hex().encode()
    frame = compressed(content, states_size=False)
    wait_until(lambda: gate.gateway.limits.bodies.total == 0)  # earlier tests' bodies are gone
    with gate.http() as client:
        client.post("/api/v1/telemetry", content=frame, headers=ZSTD)
    assert seen == [len(frame) + len(content)]


def test_a_wrong_field_is_reported_without_the_request_around_it():
    with pytest.raises(ValidationError) as refused:
        TelemetryBatch.model_validate_json(b'{"events":3}')
    assert "input" not in request_body._errors(refused.value)[0]
    assert request_body.first_fault(refused.value) == "events: Input should be a valid array"


# --- The routing fields of a large batch ---------------------------------------------------------


def batch(datums: int, *, size: int = 0) -> tinker_pb2.ForwardBackwardRequest:
    message = tinker_pb2.ForwardBackwardRequest(
        model_id="s:train:0", seq_id=2**31 - 1, loss_fn="ppo", forward_only=True
    )
    message.loss_fn_config["clip"] = 0.2
    message.loss_fn_config_v2["loss_id"].text = "s:loss:1"
    for _ in range(datums):
        message.data.add().model_input.add().encoded_text.tokens = bytes(size)
    return message


@pytest.mark.parametrize(("datums", "size"), [(0, 0), (500, 10), (500, 4096)])
def test_the_routing_of_a_batch_is_what_protobuf_would_read(datums, size):
    body = batch(datums, size=size).SerializeToString()
    read, found = tinker_pb2.ForwardBackwardRouting.FromString(body), routing_of(body)
    read.DiscardUnknownFields()
    found.DiscardUnknownFields()  # settings of the loss
    assert found == read


@pytest.mark.parametrize("cut", [1, 2, 100, 600])
def test_a_large_batch_that_is_cut_is_refused(cut):
    with pytest.raises(DecodeError):
        routing_of(batch(400, size=4096).SerializeToString()[:-cut])


@pytest.mark.parametrize("field", [b"\x10\x01", b"\x7a\x00", b"\x1a\x00", b"\x3a\x00"])
def test_a_batch_of_very_many_fields_is_refused_before_all_are_read(field):
    with pytest.raises(BodyTooLarge, match="32768 datums"):
        routing_of(batch(1).SerializeToString() + field * SMALL_BODY)


# --- An operator's view -------------------------------------------------------------------------


def test_the_metrics_have_how_late_the_event_loop_calls(gate):
    def measured() -> bool:
        with gate.http() as client:
            text = client.get("/metrics").text
        name = "tandem_gateway_event_loop_lag_seconds_count"
        return any(float(x.split()[1]) > 0 for x in text.splitlines() if x.startswith(name))

    wait_until(measured)
