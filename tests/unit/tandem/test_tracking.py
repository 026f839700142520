"""The client of the record, against an HTTP transport of the tests."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import numpy as np
import orjson
import pytest
import torch

import tandem
from tandem.errors import UnknownRun, UserError
from tandem.tracking.outbox import MetricRow
from tandem.tracking.run import TrackedRun
from tandem.tracking.values import as_number, encoded, snapshot
from tests.support.waiting import wait_until

RUN = "s-0123456789ab:train:0"


class Gateway:
    """Keeps requests. `answer` is its status and body, or an error of the transport."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict]] = []
        self.threads: set[threading.Thread] = set()
        self.answer: Callable[[dict], httpx.Response] = lambda body: httpx.Response(200, json={})

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.threads.add(threading.current_thread())
        body = orjson.loads(request.content)
        self.requests.append((request.method, request.url.raw_path.decode(), body))
        return self.answer(body)

    def rows(self) -> list[dict]:
        return [
            row for _, path, body in self.requests if "/metrics" in path for row in body["rows"]
        ]

    def batches(self) -> list[dict]:
        return [body for _, path, body in self.requests if path.endswith("/rollouts")]


def refuse(status: int, type_: str = "invalid_request") -> Callable[[dict], httpx.Response]:
    body = {"error": "no", "type": type_, "category": "user"}
    return lambda _: httpx.Response(status, json=body)


def unreachable(_: dict) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


@pytest.fixture
def gateway():
    return Gateway()


@pytest.fixture
def start(gateway):
    runs = []

    def make(**changes) -> TrackedRun:
        def connect() -> httpx.Client:
            return httpx.Client(
                base_url="http://gateway/api/tandem/v1/", transport=httpx.MockTransport(gateway)
            )

        runs.append(TrackedRun(RUN, url="http://gateway", connect=connect, **changes))
        return runs[-1]

    yield make
    for run in runs:
        run.finish(timeout=0)


@pytest.fixture
def warnings(caplog):
    def found() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name == "tandem.track"]

    with caplog.at_level(logging.WARNING, logger="tandem.track"):
        yield found


class Kept:
    """An exporter that keeps its rows."""

    name = "kept"

    def __init__(self) -> None:
        self.rows: list[MetricRow] = []
        self.closed = False

    def export_row(self, row: MetricRow) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


# --- Values ----------------------------------------------------------------------------------


def test_scalars_of_numpy_and_torch_are_numbers_and_strings_and_lists_are_none():
    scalars = (1, True, 1.0, np.float32(1), np.int64(1), np.ones(()), np.ones(1), torch.ones(1))
    assert [as_number(value) for value in scalars] == [1.0] * 8
    others = (
        "1",
        b"1",
        [1.0],
        {"a": 1},
        None,
        np.ones(2),
        torch.ones(2),
        1j,
        10**400,
        np.str_("1"),
    )
    assert [as_number(value) for value in others] == [None] * 10


def test_a_rollout_is_copied_when_it_is_given_and_written_as_plain_json():
    tokens = [1, 2]
    rollout = {
        "tokens": tokens,
        "logprobs": np.array([-0.5, -np.inf], np.float32),
        "advantages": torch.tensor([1.0, 2.0]),
        "reward": math.nan,
        "judge": {"score": np.float64(1.5), 3: None, "huge": 2**70, "odd": object},
        "answer": "half a pair \ud83d",
    }
    copy, size = snapshot(rollout)
    tokens.append(3)
    assert size > 100
    told = orjson.loads(encoded(copy))
    assert told["tokens"] == [1, 2] and told["advantages"] == [1.0, 2.0]
    assert told["logprobs"] == [-0.5, "-Infinity"] and told["reward"] == "NaN"
    assert told["judge"] == {"score": 1.5, "3": None, "huge": str(2**70), "odd": str(object)}
    assert told["answer"] == "half a pair ?"


def test_a_rollout_that_contains_itself_becomes_text():
    rollout: dict = {}
    rollout["self"] = rollout
    copy, _ = snapshot(rollout)
    assert orjson.loads(encoded(copy))


# --- Sending ---------------------------------------------------------------------------------


def test_rows_travel_in_batches_from_one_thread_that_is_not_the_loops(start, gateway):
    run = start()
    for step in range(2500):
        run.log(step, {"reward": step / 2})
    run.log(2500, {"a": math.nan, "b": math.inf, "c": np.float32(-np.inf)})
    run.rollouts(7, [{"prompt": "1+1=", "answer": "2", "reward": 1.0}])
    assert run.flush()
    *rows, last = gateway.rows()
    assert [(row["step"], row["values"]) for row in rows] == [
        (step, {"reward": step / 2}) for step in range(2500)
    ]
    assert last["values"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert len(gateway.requests) <= 10
    (batch,) = gateway.batches()
    assert batch["step"] == 7 and batch["rollouts"][0]["answer"] == "2"
    assert {thread.name for thread in gateway.threads} == {"tandem-track"}


def test_a_bad_value_costs_one_warning_with_its_name_and_keeps_the_others(start, gateway, warnings):
    run = start()
    for step in range(3):
        run.log(step, {"reward": 1.0, "note": "text"})
    run.log(1.5, {"reward": 2.0})
    run.log(-1, {"reward": 2.0})
    run.log(4, "reward")
    run.rollouts("last", [{}])
    run.rollouts(4, None)
    run.rollouts(4, ["text", {"answer": "kept"}])
    assert run.flush()
    assert [row["values"] for row in gateway.rows()] == [{"reward": 1.0}] * 3
    assert [each["answer"] for each in gateway.batches()[0]["rollouts"]] == ["kept"]
    told = warnings()
    assert sum("'note'" in each for each in told) == 1
    assert sum("1.5" in each for each in told) == 1 and len(told) == 5
    assert "run.rollouts takes a step and a list of dicts" in told


TROUBLES = {
    **{f"status {status}": refuse(status) for status in (408, 429, 500, 507)},
    **{f"body {text}": httpx.Response(200, text=text) for text in ("[1]", "null", "<html>")},
    "no connection": httpx.ConnectError("connection refused"),
    "an odd address": httpx.InvalidURL("no port"),
    "an unexpected error": RuntimeError("odd"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_costs_one_warning_and_the_rows_are_sent_again(start, gateway, warnings, trouble):
    def answer(body: dict) -> httpx.Response:
        found = TROUBLES[trouble]
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, httpx.Response) else found(body)

    gateway.answer = answer
    run = start()
    run.rollouts(1, [{"answer": "2"}])
    run.log(1, {"reward": 1.0})
    assert not run.flush(timeout=0.2)
    wait_until(warnings)
    gateway.answer = lambda body: httpx.Response(200, json={})
    run.log(2, {"reward": 2.0})
    assert run.flush() and run.dropped == 0 and len(warnings()) == 1
    assert [row["step"] for row in gateway.rows()] == [1, 2]
    assert len(gateway.batches()) > 1
    assert len({batch["batch"] for batch in gateway.batches()}) == 1


def test_a_final_refusal_is_told_once_and_not_repeated(start, gateway, warnings):
    gateway.answer = refuse(404, "unknown_run")
    run = start()
    for step in range(3):
        run.log(step, {"reward": 1.0})
        assert run.flush()
    assert len(gateway.requests) == 3 and run.dropped == 3
    assert len(warnings()) == 1


def test_a_wrong_row_is_refused_alone(start, gateway):
    def answer(body: dict) -> httpx.Response:
        wrong = any("bad" in row["values"] for row in body["rows"])
        return refuse(400)(body) if wrong else httpx.Response(200, json={})

    gateway.answer = answer
    run = start()
    for name in ("good", "bad", "best"):
        run.log(1, {name: 1.0})
    assert run.flush() and run.dropped == 1
    accepted = [body["rows"] for _, _, body in gateway.requests if len(body["rows"]) == 1]
    assert [[*rows[0]["values"]] for rows in accepted] == [["good"], ["bad"], ["best"]]


def test_a_full_buffer_drops_its_oldest_rows_with_one_warning(start, gateway, warnings):
    gateway.answer = unreachable
    run = start(buffer_bytes=4000)
    for step in range(50):
        run.log(step, {"reward": 1.0})
    gateway.answer = lambda body: httpx.Response(200, json={})
    assert run.flush()
    assert run.dropped == 40
    assert {row["step"] for row in gateway.rows()} == {*range(40, 50)}
    assert sum("full" in each for each in warnings()) == 1


def test_rows_that_the_gateway_dropped_are_counted(start, gateway, warnings):
    gateway.answer = lambda body: httpx.Response(200, json={"dropped": 2, "why": "full"})
    run = start()
    run.log(1, {"reward": 1.0})
    assert run.flush() and run.dropped == 2
    assert "dropped 2 rows" in warnings()[0] and "full" in warnings()[0]


def test_large_rollouts_travel_in_several_batches(start, gateway):
    run = start()
    run.rollouts(1, [{"answer": "x" * 300_000, "number": number} for number in range(8)])
    assert run.flush()
    assert len(gateway.batches()) == 3
    assert [r["number"] for b in gateway.batches() for r in b["rollouts"]] == [*range(8)]


def test_a_sampling_rate_keeps_the_same_rollouts_each_time(start, gateway):
    run = start()
    for _ in range(2):
        run.rollouts(3, [{"number": number} for number in range(1000)], sample=0.25)
    run.rollouts(4, [{"number": number} for number in range(1000)], sample=0)
    assert run.flush()
    first, second = ([r["number"] for r in batch["rollouts"]] for batch in gateway.batches())
    assert first == second and 200 < len(first) < 300


def test_stored_rows_are_not_sent_again_when_the_answers_fields_are_wrong(start, gateway, warnings):
    gateway.answer = lambda body: httpx.Response(200, json={"server_rows": [{}]})
    run = start(exporters=[Kept()])
    for step in range(2):
        run.log(step, {"reward": 1.0})
        assert run.flush()
    assert [row["step"] for row in gateway.rows()] == [0, 1] and len(warnings()) == 1


def test_a_configuration_that_cannot_be_written_is_refused(start, gateway):
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    run = start()
    with pytest.raises(UserError, match="no text"):
        run.set_identity({"config": {"a": Odd(), "b": math.nan}})
    run.log(1, {"reward": 1.0})
    assert run.flush() and len(gateway.rows()) == 1


# --- The end ---------------------------------------------------------------------------------


def test_the_end_sends_the_last_rows_and_later_ones_cost_a_warning(start, gateway, warnings):
    with start() as run:
        run.log(1, {"reward": 1.0})
    assert len(gateway.rows()) == 1
    run.log(2, {"reward": 2.0})
    run.finish()
    assert len(gateway.rows()) == 1 and "finished" in warnings()[0]


def test_the_end_does_not_wait_longer_than_its_deadline_for_a_dead_gateway(
    start, gateway, warnings
):
    gateway.answer = unreachable
    run = start()
    run.log(1, {"reward": 1.0})
    run.finish(timeout=0.3)
    assert run.dropped == 1 and "1 rows" in warnings()[-1]


# --- Exporters -------------------------------------------------------------------------------


def test_an_exporter_gets_the_users_rows_and_each_of_the_servers_rows_once(start, gateway):
    server = [{"step": step, "at": 1.0, "values": {"tandem/loss": "NaN"}} for step in range(1, 4)]
    after = []

    def answer(body: dict) -> httpx.Response:
        path = gateway.requests[-1][1]
        known = int(path.partition("server_after=")[2] or 0)
        after.append(known)
        new = server[known:][:2]
        cursor = str(known + len(new))
        return httpx.Response(200, json={"server_rows": new, "server_cursor": cursor})

    gateway.answer = answer
    kept = Kept()
    with start(exporters=[kept]) as run:
        run.log(1, {"reward": math.nan})
        assert run.flush()
    assert after == [0, 2] and kept.closed
    assert [row.step for row in kept.rows if row.source == "tandem"] == [1, 2, 3]
    (mine,) = (row for row in kept.rows if row.source == "user")
    assert mine.step == 1 and math.isnan(mine.values["reward"])


def test_an_exporter_gets_rows_also_while_the_gateway_is_dead(start, gateway):
    gateway.answer = unreachable
    kept = Kept()
    run = start(exporters=[kept])
    run.log(1, {"reward": 1.0})
    wait_until(lambda: len(kept.rows) == 1)


def test_a_failing_exporter_ends_alone(start, gateway, warnings):
    class Failing(Kept):
        def export_row(self, row: MetricRow) -> None:
            raise RuntimeError("disk quota")

    kept = Kept()
    run = start(exporters=[Failing(), kept])
    for step in range(2):
        run.log(step, {"reward": 1.0})
        assert run.flush()
    run.finish()
    assert len(kept.rows) == 2 and len(gateway.rows()) == 2
    assert len(warnings()) == 1 and "disk quota" in warnings()[0]


def test_an_exporter_that_fails_or_hangs_at_the_end_costs_a_warning(
    start, gateway, warnings, monkeypatch
):
    monkeypatch.setattr("tandem.tracking.run._CLOSE_SECONDS", 1.0)
    released = threading.Event()

    class Failing(Kept):
        name = "failing"

        def close(self) -> None:
            raise RuntimeError("disk quota")

    class Hanging(Kept):
        name = "hanging"

        def close(self) -> None:
            released.wait()

    kept = Kept()
    run = start(exporters=[Failing(), kept, Hanging()])
    run.log(1, {"reward": 1.0})
    assert run.flush()
    run.finish(timeout=0.1)
    released.set()
    assert kept.closed and len(warnings()) == 2
    assert "disk quota" in warnings()[0] and "hanging is not closed" in warnings()[1]


def test_a_slow_exporter_loses_rows_and_is_not_closed_while_it_takes_one(
    start, gateway, warnings, monkeypatch
):
    monkeypatch.setattr("tandem.tracking.run._CLOSE_SECONDS", 0.1)
    monkeypatch.setattr("tandem.tracking.exporters._MOST_BYTES", 900)  # two rows
    released, entered = threading.Event(), threading.Event()

    class Hanging(Kept):
        def export_row(self, row: MetricRow) -> None:
            entered.set()
            released.wait()
            assert not self.closed
            super().export_row(row)

    hanging = Hanging()
    run = start(exporters=[hanging])
    run.log(1, {"reward": 1.0})
    entered.wait(10)
    for step in range(2, 9):
        run.log(step, {"reward": 1.0})
    assert run.flush() and warnings() == ["kept loses rows: it is too slow"]
    run.finish(timeout=0.1)
    assert not hanging.closed and "kept is not closed" in warnings()[-1]
    released.set()
    wait_until(lambda: hanging.closed)
    assert [row.step for row in hanging.rows] == [1, 2, 3]


def test_an_exporter_gets_each_of_many_rows_that_are_logged_at_once(start, gateway, warnings):
    released = threading.Event()

    class Waiting(Kept):
        def export_row(self, row: MetricRow) -> None:
            released.wait()
            super().export_row(row)

    waiting = Waiting()
    with start(exporters=[waiting]) as run:
        for step in range(30_000):
            run.log(step, {"reward": 1.0})
        released.set()
    assert len(waiting.rows) == 30_000 and warnings() == []


# --- tandem.track ----------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch, gateway):
    """`tandem.track` talks to `gateway`. Returns the addresses and headers that it used."""
    used = []

    def client(base_url: str, *, headers: dict[str, str], timeout: float) -> httpx.Client:
        used.append((base_url, headers))
        return httpx.Client(base_url=base_url, transport=httpx.MockTransport(gateway))

    monkeypatch.setattr("tandem.tracking.run.http_client", client)
    return used


def test_track_names_the_run_at_the_address_of_its_client(served, gateway):
    holder = SimpleNamespace(_base_url="http://gateway:1", _api_key="tml-1")
    policy = SimpleNamespace(model_id=RUN, holder=holder)
    config = {"total_steps": np.int64(10)}
    with tandem.track(policy, name="addition", tags=["a", "b"], config=config) as run:
        assert run.url == f"http://gateway:1/runs/{RUN}"
    assert served == [("http://gateway:1/api/tandem/v1/", {"X-API-Key": "tml-1"})]
    fields = {"name": "addition", "tags": ["a", "b"], "config": {"total_steps": 10}}
    assert gateway.requests == [("PATCH", f"/api/tandem/v1/runs/{RUN}", fields)]


def test_track_takes_a_runs_id_with_the_environments_address_and_key(served, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://gateway:2/")
    monkeypatch.setenv("TINKER_API_KEY", "tml-2")
    tandem.track(RUN).finish()
    assert served == [("http://gateway:2/api/tandem/v1/", {"X-API-Key": "tml-2"})]
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(UserError, match="TINKER_API_KEY"):
        tandem.track(RUN)
    with pytest.raises(UserError, match="id of a run"):
        tandem.track(None)


def test_track_raises_the_gateways_refusal(served, gateway):
    gateway.answer = refuse(404, "unknown_run")
    with pytest.raises(UnknownRun, match="no"):
        tandem.track(RUN, name="addition", url="http://gateway", api_key="tml-1")


def test_track_goes_on_without_an_answer_and_names_the_run_later(
    served, gateway, warnings, monkeypatch
):
    monkeypatch.setattr("tandem.tracking.run._IDENTITY_SECONDS", 0.1)
    gateway.answer = unreachable
    run = tandem.track(RUN, name="addition", url="http://gateway", api_key="tml-1")
    gateway.answer = lambda body: httpx.Response(200, json={})
    gateway.requests.clear()
    assert run.flush() and len(warnings()) == 1
    assert gateway.requests[0][2] == {"name": "addition"}
    run.finish()
