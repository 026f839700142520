"""Exports of a session's events, through the SDK."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import pytest
import tinker
from tinker import types

from tests.support.files import tree
from tests.support.sdk import load_state, supervised


def fetched(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


def with_query(url: str, **changes: str) -> str:
    parts = urlsplit(url)
    query = {key: values[0] for key, values in parse_qs(parts.query).items()} | changes
    return urlunsplit(parts._replace(query=urlencode(query)))


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_trace_has_the_sessions_operations_samples_and_workers(gate, rest):
    began = time.time()
    with gate.service() as service:
        session_id = service.holder.get_session_id()
        training = service.create_lora_training_client("tiny:full").result()
        training.forward_backward([supervised([1, 2, 9])], "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([1, 2, 3])
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=3)).result()
        with pytest.raises(tinker.RequestFailedError):
            load_state(training, "tinker://s-0:train:0/weights/none").result()
    url = rest.export_session_trace(session_id).result()
    trace = fetched(url)
    names = {
        e["pid"]: e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and e["name"] == "process_name"
    }
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    for event in slices:
        assert began * 1e6 <= event["ts"] <= event["ts"] + event["dur"] <= time.time() * 1e6

    def of(process: str) -> list[dict]:
        found = [e for e in slices if names[e["pid"]] == process]
        return sorted(found, key=lambda e: (e["ts"], e["args"].get("request_id", "")))

    operations = of(training.model_id)
    assert [e["name"] for e in operations] == [
        "create_model",
        "forward_backward",
        "optim_step",
        "save_weights_for_sampler",
        "load_weights",
    ]
    assert [e["args"]["state"] for e in operations] == ["done"] * 4 + ["failed"]
    assert operations[-1]["args"]["error"] == "unknown_weights"
    bars = of(f"{training.model_id} time")
    assert {e["args"]["step"] for e in bars} == {1} and "place" in {e["name"] for e in bars}
    (sample,) = of(sampler._sampling_session_id)
    assert (sample["args"]["prompt_tokens"], sample["args"]["sampled_tokens"]) == (3, 3)
    assert sample["args"]["weight_version"].startswith(training.model_id)
    assert {e["args"]["kind"] for e in of("workers")} == {"trainer", "engine"}
    (session,) = of(f"session {session_id}")
    assert (session["args"]["state"], session["args"]["reason"]) == ("finished", "success")


def test_each_export_is_new_and_an_unknown_session_has_none(gate, rest):
    session_id = gate.session_id()
    first = rest.export_session_trace(session_id).result()
    gate.run_id(session_id)
    second = rest.export_session_trace(session_id).result()
    assert first != second
    made = [e["name"] for e in fetched(second)["traceEvents"]]
    assert "create_model" in made
    assert "create_model" not in [e["name"] for e in fetched(first)["traceEvents"]]
    with pytest.raises(tinker.NotFoundError):
        rest.export_session_trace("s-000000000000").result()


def test_a_long_trace_is_sent_in_parts_and_leaves_no_file(gate, rest, monkeypatch):
    monkeypatch.setattr("gateway.storage.database._ROWS_AT_ONCE", 5)
    with gate.service() as service:
        session_id = service.holder.get_session_id()
        training = service.create_lora_training_client("tiny:full").result()
        steps = [training.optim_step(types.AdamParams()) for _ in range(11)]
        for step in steps:
            step.result()
    files = tree(gate.settings.data_dir)
    url = rest.export_session_trace(session_id).result()
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.headers["Content-Length"] is None
        trace = json.loads(answer.read())
    done = [e["args"]["request_id"] for e in trace["traceEvents"] if e["name"] == "optim_step"]
    assert done == [f"{training.model_id}:{seq_id}" for seq_id in range(1, 12)]
    assert tree(gate.settings.data_dir) <= files
