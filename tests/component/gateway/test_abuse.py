"""A client with a key cannot overload the gateway."""

from __future__ import annotations

import asyncio
import json

import pytest
import zstandard
from pydantic import ValidationError
from sqlalchemy import select

from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.api.request_body import MOST_TOKENS, MOST_VALUES, parse, parse_json
from gateway.api.tinker.sampling import Sample
from gateway.api.tinker.service import TelemetryBatch
from gateway.metrics import Metrics
from gateway.owners.sessions.registry import NewSession
from gateway.storage.futures.completion_feed import _MOST_TARGETS, CompletionFeed, Target
from gateway.storage.futures.table import FutureTable
from gateway.storage.tables import metadata, operations
from tandem.errors import LimitExceeded, PayloadTooLarge
from tests.support.files import tree
from tests.support.gateway.requests import optim_step
from tests.support.gateway.running import KEY, make_model, running_gateway


def many(piece: str, count: int) -> str:
    return "[" + ",".join([piece] * count) + "]"


# --- Small bodies with large contents ---------------------------------------------------------


@pytest.mark.parametrize("piece", ["{}", "[]"])
def test_lists_and_objects_are_counted_before_any_is_made(piece):
    chunks = many(piece, 200_000).encode()
    with pytest.raises(PayloadTooLarge, match="lists and objects"):
        parse(Sample, b'{"sampling_params":{},"prompt":{"chunks":%s}}' % chunks, most_values=2**22)
    with pytest.raises(PayloadTooLarge, match="lists and objects"):
        parse_json(b'{"model":"m","messages":%s}' % chunks, most_values=MOST_TOKENS)
    with pytest.raises(PayloadTooLarge, match="values"):
        parse(TelemetryBatch, b'{"events":%s}' % chunks)


@pytest.mark.parametrize("text", [",", "{", '"', '",', "\\", '\\",', "é,"])
def test_commas_and_brackets_in_texts_are_no_values(text):
    body = {"rows": text * 200_000, "other": [text] * 1000}
    assert parse_json(json.dumps(body).encode()) == body
    with pytest.raises(PayloadTooLarge):
        parse_json(json.dumps(body | {"values": [0] * 70_000}).encode())
    with pytest.raises(PayloadTooLarge):
        parse_json(json.dumps(body | {"values": [text] * 200_000}).encode())


def test_a_few_bytes_that_stand_for_very_many_objects_are_refused_as_too_large(gate):
    body = '{"sampling_params":{},"prompt":{"chunks":' + many("{}", 2**20) + "}}"
    small = zstandard.compress(body.encode())
    assert len(small) < 2000
    with gate.http() as client:
        for path in ("/api/v1/asample", "/v1/completions", "/api/v1/telemetry"):
            answer = client.post(path, content=small, headers={"Content-Encoding": "zstd"})
            assert answer.status_code == 413, (path, answer.text)


def test_a_prompt_of_a_million_tokens_is_taken():
    tokens = many("151643", 2**20).encode()
    body = b'{"sampling_params":{},"prompt":{"chunks":[{"tokens":%s}]}}' % tokens
    sample = parse(Sample, body, most_values=MOST_TOKENS)
    assert len(sample.prompt.chunks[0].tokens) == 2**20
    assert MOST_VALUES < 2**20, "which an ordinary request may not have"


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (Sample, '{"sampling_params":{},"prompt":{"chunks":[{"tokens":%s}]}}'),
        (Sample, '{"sampling_params":{},"prompt":{"chunks":%s}}'),
        (Sample, '{"prompt":{"chunks":[]},"sampling_params":{"stop":[%s]}}'),
        (CompletionRequest, '{"model":"m","prompt":[%s]}'),
        (CompletionRequest, '{"model":"m","prompt":"p","stop":[%s]}'),
        (ChatCompletionRequest, '{"model":"m","messages":%s}'),
    ],
)
def test_of_many_wrong_values_few_are_reported(model, body):
    with pytest.raises(ValidationError) as refused:
        model.model_validate_json(body % many('"x"', 1000))
    assert refused.value.error_count() < 10


# --- Valid JSON with unexpected contents -------------------------------------------------------


def saved_run(gate, client) -> tuple[str, str]:
    session_id = gate.session_id()
    run_id = gate.run_id(session_id)
    saving = {"model_id": run_id, "seq_id": 1, "path": "kept"}
    gate.retrieve(client.post("/api/v1/save_weights", json=saving).json()["request_id"])
    return session_id, f"tinker://{run_id}/weights/kept"


@pytest.mark.parametrize(
    "field",
    [
        f'"weights_access_token": "{KEY}"',
        f'"weights_access\\u005ftoken": "{KEY}"',
        f'"weights_access_token": "{KEY}", "weights_access_token": null',
    ],
)
def test_a_token_that_was_lent_is_not_kept_however_its_field_is_written(gate, field):
    with gate.http() as client:
        session_id, path = saved_run(gate, client)
        body = f'{{"session_id": "{session_id}", "model_seq_id": 1, "path": "{path}", "n": NaN, '
        answer = client.post("/api/v1/load_weights", content=f"{body}{field}}}")
        assert answer.status_code == 200, answer.text
        assert gate.retrieve(answer.json()["request_id"]).json()["type"] == "load_weights"
    gate.run(gate.gateway.database.flush())
    files = [path.read_bytes() for path in gate.settings.data_dir.glob("tandem.db*")]
    tables = [gate.run(gate.gateway.database.read(select(t))) for t in metadata.sorted_tables]
    assert path in str(tables)
    assert KEY not in str(tables)
    assert not any(KEY.encode() in file for file in files)


def test_metadata_of_any_json_is_kept_as_text(gate):
    odd = {"n": 10**30, "deep": [[{"a": "é"}]], "text": "é"}
    with gate.http() as client:
        made = client.post("/api/v1/create_session", content=json.dumps({"user_metadata": odd}))
        assert made.status_code == 200, made.text
        session = client.get(f"/api/v1/sessions/{made.json()['session_id']}").json()
    assert session["user_metadata"] == {
        "n": "1" + "0" * 30,
        "deep": '[[{"a":"é"}]]',
        "text": "é",
    }


@pytest.mark.parametrize("number", ["9999999999999999999", "²", "٣", "-1", "1_0"])
def test_a_request_that_cannot_be_is_unknown(gate, number):
    with gate.http() as client:
        session_id = gate.session_id()
        for kind in ("train", "sample"):
            asked = {"request_id": f"{session_id}:{kind}:0:{number}"}
            answer = client.post("/api/v1/retrieve_future", json=asked)
            assert (answer.status_code, answer.json()["type"]) == (404, "unknown_request")


def test_a_sentence_does_not_repeat_megabytes(gate):
    with gate.http() as client:
        answer = client.post("/api/v1/session_heartbeat", json={"session_id": "x" * 2**20})
        assert answer.status_code == 404
        assert len(answer.content) < 5000


# --- Names and notes ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [10**18, 10**30, -1])
def test_a_number_that_no_run_has_is_refused(gate, number):
    session_id = gate.session_id()
    new = {"session_id": session_id, "model_seq_id": number}
    with gate.http() as client:
        for path, more in (
            ("create_model", {"base_model": "tiny"}),
            ("load_weights", {"path": f"tinker://{session_id}:train:0/weights/a"}),
            ("copy_weights", {"source_path": f"tinker://{session_id}:train:0/weights/a"}),
        ):
            answer = client.post(f"/api/v1/{path}", json=new | more)
            assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request"), path


def test_metadata_that_lists_would_repeat_is_bounded(gate):
    noted = {"user_metadata": {"more": "x" * 2**14}}
    session_id = gate.session_id()
    run_id = gate.run_id(session_id)
    with gate.http() as client:
        refused = client.post("/api/v1/create_session", json=noted)
        assert refused.status_code == 400
        assert refused.json()["error"].startswith("user_metadata: ")
        new = {"session_id": session_id, "model_seq_id": 1, "base_model": "tiny"}
        assert client.post("/api/v1/create_model", json=new | noted).status_code == 400
        save = {"model_id": run_id, "seq_id": 1, "path": "a"}
        client.post("/api/v1/save_weights", json=save | noted)
        assert gate.retrieve(f"{run_id}:1").json()["type"] == "invalid_request"


def test_a_copy_goes_into_a_project_whose_name_the_database_can_hold(gate):
    with gate.http() as client:
        _, path = saved_run(gate, client)
        for length, status in ((201, 400), (2**20, 400), (200, 200)):
            copy = {"source_path": path, "destination_project_id": "p" * length}
            answer = client.post("/api/v1/copy_weights", json=copy)
            assert answer.status_code == status, answer.text
            assert len(answer.content) < 1000
            if status == 400:
                assert answer.json()["error"].startswith("destination_project_id: ")


def test_a_page_of_checkpoints_is_bounded_and_says_so(gate):
    with gate.http() as client:
        page = client.get("/api/v1/checkpoints", params={"limit": 10_000}).json()
    assert page["cursor"]["limit"] == 1000, "from which the client goes on"


def test_a_search_asks_the_database_for_no_more_than_it_answers(gate):
    with gate.http() as client:
        for field, value in (
            ("project_ids", ["p"] * 40_000),
            ("user_metadata", {str(n): "x" for n in range(5000)}),
            ("statuses", [{"type": "active"}] * 5000),
        ):
            answer = client.post("/api/v1/sessions/search", json={field: value})
            assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request"), field


def test_a_long_reason_for_an_end_is_kept_in_part(gate):
    session_id = gate.session_id()
    ending = {"reason": {"type": "errored"}, "detail": "x" * 2**20}
    with gate.http() as client:
        answer = client.post(f"/api/v1/sessions/{session_id}/finish", json=ending)
        assert answer.status_code == 204
        found = client.post("/api/v1/sessions/search", json={"session_id": session_id}).json()
    assert found["sessions"][0]["status"]["detail"] == "x" * 4000


def test_what_an_operation_does_not_know_is_not_kept(gate):
    run_id = gate.run_id(gate.session_id())
    with gate.http() as client:
        optim_step(client, run_id, 1, more="x" * 2**19)
    assert gate.retrieve(f"{run_id}:1").json()["type"] == "optim_step"
    query = select(operations.c.request).where(operations.c.run_id == run_id)
    rows = gate.run(gate.gateway.database.read(query.order_by(operations.c.seq_id)))
    assert b"learning_rate" in rows[1]["request"]
    assert b"xx" not in rows[1]["request"]


def test_a_model_can_be_removed_by_its_path_and_have_any_length(gate, tmp_path):
    folder = make_model(tmp_path / "odd")
    for length in (2**70, -1, True, 0):
        config = {"architectures": ["A"], "max_position_embeddings": length}
        (folder / "config.json").write_text(json.dumps(config))
        with gate.http() as client:
            new = {"name": "odd", "path": str(folder)}
            made = client.post("/api/tandem/v1/models", json=new)
            assert (made.status_code, made.json()["max_length"]) == (200, None)
            assert client.delete(f"/api/tandem/v1/models/{folder}").status_code == 204
            assert client.delete(f"/api/tandem/v1/models/{folder}").status_code == 404


def test_models_that_are_not_there_are_not_remembered(gate):
    sample = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    with gate.http() as client:
        for number in range(3):
            answer = client.post("/api/v1/asample", json=sample | {"base_model": f"no-{number}"})
            assert answer.status_code == 404
        answer = client.post("/api/v1/asample", json=sample | {"base_model": "tiny"})
        assert answer.status_code == 200
    assert list(gate.gateway.implicit_sessions._by_owner["local"].numbers) == [("tiny", None)]


# --- Requests that come twice, or at once --------------------------------------------------------


def test_sessions_that_are_asked_for_at_once_keep_to_the_limit(tmp_path):
    with running_gateway(tmp_path, session_ttl=600, limit={"sessions": 3}) as gate:

        async def at_once() -> list[object]:
            new = (gate.gateway.sessions.create(NewSession(owner="ann")) for _ in range(10))
            return await asyncio.gather(*new, return_exceptions=True)

        made = gate.run(at_once())
    assert sum(isinstance(one, LimitExceeded) for one in made) == 7


def test_exports_that_nobody_fetches_leave_nothing(gate):
    session_id = gate.session_id()
    files = tree(gate.settings.data_dir)
    with gate.http() as client:
        for _ in range(12):
            answer = client.get(f"/api/v1/sessions/{session_id}/trace_export").json()
        assert tree(gate.settings.data_dir) <= files
        assert answer["status"] == "ready"
        assert client.get(answer["url"]).status_code == 200


# --- Queues ------------------------------------------------------------------------------------


async def test_clients_that_call_themselves_ever_new_names_hold_a_bounded_memory(tmp_path):
    futures = FutureTable(
        folder=tmp_path, result_ttl=60, bytes_in_memory=1, max_samples=1, metrics=Metrics()
    )
    completions = CompletionFeed(futures=futures, idle_ttl=3600)
    for client in range(_MOST_TARGETS + 10):
        target = Target("s:sample:0", client)
        assert await completions.poll(target, after=0, timeout=0, retrieved=())
    assert len(completions._queues) == _MOST_TARGETS
    assert Target("s:sample:0", _MOST_TARGETS + 9) in completions._queues
