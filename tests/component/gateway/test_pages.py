"""The pages of runs: what they show, to whom, and what their streams carry."""

from __future__ import annotations

import html
import json
import re
import time
from contextlib import ExitStack
from urllib.parse import quote

import httpx
import pytest

from gateway.api.pages import live, run_views
from gateway.api.pages import runs as runs_page
from gateway.owners.auth.identity import Caller
from gateway.runs.record.progress import MetricsRow
from tests.support.gateway.access_world import GROUPS
from tests.support.gateway.browsers import (
    browser,
    events,
    log,
    new_key,
    new_run,
    sign_in,
    signed_in,
    token_in,
)
from tests.support.gateway.running import running_gateway
from tests.support.waiting import wait_until

HOSTILE = "<script>alert(1)</script> \U0001f680 \u202egnp.exe\x07"


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    """With room for all runs of this module."""
    with running_gateway(
        tmp_path_factory.mktemp("pages"), groups=GROUPS, host_memory_bytes=2**50
    ) as gate:
        yield gate


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(live, "PERIOD", 0.02)


def names_in(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text[:300]
    found = re.findall(r'class="name" href="/runs/[^"]+"><bdi>(.*?)</bdi>', answer.text)
    return [html.unescape(name) for name in found]


def test_the_list_has_each_run_by_its_name_with_state_curve_and_progress(gate):
    run = new_run(gate, "first-try", tags="gsm8k", config='{"total_steps": 4}')
    for step in range(3):
        log(gate, run, step=step, reward=step / 4)
    with signed_in(gate) as client:
        page = client.get("/?name=first-try")
    assert names_in(page) == ["first-try"]
    for piece in ("idle", "gsm8k", 'class="spark"', "0.5", "of 4", "75.0 percent"):
        assert piece in page.text, piece


def test_filters_and_orders_work_without_a_script(gate):
    for name, tag in (("sorted-b", "x"), ("sorted-a", "y"), ("sorted-c", "x")):
        new_run(gate, name, tags=tag)
    with signed_in(gate) as client:
        assert names_in(client.get("/?name=SORTED")) == ["sorted-c", "sorted-a", "sorted-b"]
        ordered = client.get("/?name=sorted&sort=name")
        assert names_in(ordered) == ["sorted-a", "sorted-b", "sorted-c"]
        assert names_in(client.get("/?name=sorted&tag=x&sort=oldest")) == ["sorted-b", "sorted-c"]
        assert len(names_in(client.get("/?name=sorted&state=active"))) == 3
        assert names_in(client.get("/?name=sorted&state=ended")) == []
        assert "No run fits" in client.get("/?name=nothing-like-it").text
        for order in ("newest", "owner", "updated", "step"):
            assert len(names_in(client.get(f"/?name=sorted&sort={order}"))) == 3
        assert client.get("/?sort=colour").status_code == 400


def test_the_next_page_of_a_long_list_is_a_link(gate, monkeypatch):
    monkeypatch.setattr(runs_page, "_SIZE", 2)
    made = [new_run(gate, f"paged-{number}") for number in range(5)]
    seen, at = [], "/?name=paged"
    with signed_in(gate) as client:
        while at:
            page = client.get(at)
            seen += names_in(page)
            more = re.search(r'class="more"><td colspan="8"><a href="([^"]+)"', page.text)
            at = html.unescape(more[1]) if more else ""
    assert seen == [f"paged-{number}" for number in reversed(range(len(made)))]


def test_a_run_shows_its_groups_of_curves_and_where_the_time_went(gate):
    run = new_run(gate, "whole", config='{"lr": 0.5, "nested": {"seed": 7}}')
    shares = {f"tandem__seconds__{share}": 0.25 for share in ("compute", "samples", "client")}
    for step in range(3):
        log(gate, run, step=step, reward=step, loss_of_mine=float("nan") if step == 1 else 2.0)
        log(gate, run, "tandem", step=step, tandem__kl_mean=0.1, **shares)
    with signed_in(gate) as client:
        text = client.get(f"/runs/{run}").text
    groups = re.findall(r'<section class="plots" aria-label="([^"]+)"', text)
    assert groups == ["Reward", "Measured by Tandem", "Logged by the run"]
    assert re.findall(r'data-name="([^"]+)"', text) == ["reward", "tandem/kl_mean", "loss_of_mine"]
    assert text.count('<svg class="chart"') == 4
    assert "KL, mean" in text
    assert "waiting for samples" in text
    assert "nested.seed" in text


def test_at_most_24_curves_of_a_group_are_drawn_without_a_script(gate):
    runs = [new_run(gate, name) for name in ("wide", "wider")]
    for run in runs:
        log(gate, run, **{f"metric{number:02}": 1.0 for number in range(30)})
    with signed_in(gate) as client:
        for path in (f"/runs/{runs[0]}", f"/compare?run={runs[0]}&run={runs[1]}"):
            text = client.get(path).text
            assert (text.count('data-name="metric'), text.count('<svg class="chart"')) == (30, 24)
            assert "<summary>6 more</summary>" in text
            more = re.search(r'<noscript><p><a href="([^"]+all=1)"', text)[1]
            everything = client.get(f"{path.partition('?')[0]}{html.unescape(more)}").text
            assert everything.count('<svg class="chart"') == 30


def test_a_long_record_does_not_delay_the_page(gate, monkeypatch):
    run = new_run(gate, "slow-to-read")
    log(gate, run, reward=1.0)
    monkeypatch.setattr(run_views, "PATIENCE", 0.0)
    with signed_in(gate) as client:
        page = client.get(f"/runs/{run}")
        assert page.status_code == 200
        assert "Reading the curve" in page.text
        found = client.get(f"/runs/{run}/curves?name=reward").json()
    assert found["reward"]["value"] == [1.0]


def test_a_checkpoint_has_its_path_and_files_to_download(gate):
    run = new_run(gate, "saved")
    with gate.http() as client:
        body = {"model_id": run, "seq_id": 1, "path": "final"}
        gate.retrieve(client.post("/api/v1/save_weights", json=body).json()["request_id"])
    with signed_in(gate) as client:
        assert f"tinker://{run}/weights/final" in client.get(f"/runs/{run}").text
        page = client.get(f"/runs/{run}/files/weights/final")
        addresses = re.findall(r'href="(/api/v1/downloads/[^"]+)" download', page.text)
        assert addresses
        assert client.get(html.unescape(addresses[0])).status_code == 200


def test_a_resumed_run_and_its_parent_link_each_other(gate):
    parent, child = new_run(gate, "parent"), new_run(gate, "child")
    gate.run(gate.gateway.run_records.change(child, {"parent_run": parent, "parent_step": 1}))
    for step in range(2):
        log(gate, parent, step=step, reward=0.5)
    with signed_in(gate) as client:
        assert names_of_relatives(client, child) == {"parent"}
        assert names_of_relatives(client, parent) == {"child"}
        compared = client.get("/compare", params={"run": [child, parent]}).text
    lines = re.findall(r'class="c(\d) line"', compared)
    assert sorted(lines) == ["1", "2"]  # the parent's curve is a part of the child's


def names_of_relatives(client: httpx.Client, run: str) -> set[str]:
    text = client.get(f"/runs/{run}").text
    return {*re.findall(r"<bdi>(.*?)</bdi>", text[text.index("Lineage") :])}


def test_compared_runs_share_charts_and_their_settings_are_told_apart(gate):
    runs = [new_run(gate, f"lr-{lr}", config=json.dumps({"lr": lr, "seed": 1})) for lr in (1, 2)]
    for run in runs:
        log(gate, run, step=0, reward=0.5)
        log(gate, run, step=1, reward=0.7)
    with signed_in(gate) as client:
        text = client.get("/compare", params={"run": runs}).text
        assert client.get("/compare", params={"run": runs[:1]}).status_code == 400
        assert client.get("/compare", params={"run": [*runs[:1], "s-1:train:0"]}).status_code == 404
    (chart,) = re.findall(r'<svg class="chart".*?</svg>', text, re.S)
    assert "c1 line" in chart
    assert "c2 line" in chart
    different, same = text.split("1 equal")
    assert '<th scope="row">lr</th>' in different
    assert '<th scope="row">seed</th>' in same


def test_hostile_names_stay_text_on_every_page(gate):
    metadata = {"tags": HOSTILE, "config": json.dumps({HOSTILE: HOSTILE})}
    runs = [new_run(gate, HOSTILE, **metadata) for _ in range(2)]
    for run in runs:
        rows = [
            MetricsRow(step, {HOSTILE: 1.0, f"reward {HOSTILE}": 2.0}, 1.0) for step in range(2)
        ]
        gate.run(gate.gateway.record.append_metrics(run, rows, "user"))
    with signed_in(gate) as client:
        pages = [
            client.get("/"),
            client.get(f"/runs/{runs[0]}"),
            client.get("/compare", params={"run": runs}),
            client.get("/", params={"name": HOSTILE}),
            client.get(f"/runs/{quote(HOSTILE)}"),
            client.get("/", params={"sort": HOSTILE}),
        ]
    assert [page.status_code for page in pages] == [200, 200, 200, 200, 404, 400]
    for page in pages:
        assert "<script>" not in page.text
        assert "\u202e" not in page.text
        assert "\x07" not in page.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; \U0001f680" in pages[1].text


def test_an_owner_sees_nothing_of_another_one(gate, quick):
    _, ann = new_key(gate, owner="ann")
    _, ben = new_key(gate, owner="ben")
    run = new_run(gate, "secret-of-ann", key=ann)
    log(gate, run, reward=0.123456)
    own = new_run(gate, "bens", key=ben)
    with signed_in(gate, ben) as client:
        listed = client.get("/")
        assert "secret-of-ann" not in listed.text
        assert run.partition(":")[0] not in listed.text
        for path in (f"/runs/{run}", f"/runs/{run}/live", f"/compare?run={run}&run={own}"):
            assert client.get(path).status_code == 404
        with client.stream("GET", f"/live/runs?run={run}&run={own}&total=1") as answer:
            _, first = next(events(answer))
        assert {*first["parts"]} == {f"run-{own}", "newer"}
        assert "Show" not in first["parts"]["newer"]
    with signed_in(gate) as client:
        assert "secret-of-ann" in client.get("/").text


# --- Streams ----------------------------------------------------------------------------------


def test_a_stream_carries_only_new_points_and_changed_parts(gate, quick):
    run = new_run(gate, "watched", config='{"total_steps": 10}')
    log(gate, run, step=0, reward=0.1)
    with signed_in(gate) as client:
        cursor = re.search(r'data-cursor="([^"]+)"', client.get(f"/runs/{run}").text)[1]
        with client.stream("GET", f"/runs/{run}/live?after={cursor}") as answer:
            found = events(answer)
            kind, first = next(found)
            assert (kind, first["points"]) == ("changes", {})
            assert {*first["parts"]} == {"run_head", "run_shares", "run_saved", "run_events"}
            log(gate, run, step=1, reward=0.2, other=float("inf"))
            _, second = next(found)
    assert second["points"] == {"reward": [[1, 0.2, 1.0]], "other": [[1, "Infinity", 1.0]]}
    assert {*second["parts"]} == {"run_head"}
    assert "step 1" in re.sub(r"<.*?>", "", second["parts"]["run_head"])


def test_the_list_learns_of_changed_rows_and_new_runs(gate, quick):
    run = new_run(gate, "in-the-list")
    with signed_in(gate) as client:
        total = re.search(r'data-live-runs="(\d+)"', client.get("/").text)[1]
        with client.stream("GET", f"/live/runs?run={run}&total={total}") as answer:
            found = events(answer)
            next(found)
            log(gate, run, step=3, reward=0.875)
            _, changed = next(found)
            assert {*changed["parts"]} == {f"run-{run}"}
            assert "0.875" in changed["parts"][f"run-{run}"]
            new_run(gate, "newer")
            _, more = next(found)
            while "newer" not in more["parts"]:
                _, more = next(found)
    assert "Show 1 new run" in more["parts"]["newer"]


@pytest.mark.parametrize("end", ["sign-out", "revocation"])
def test_a_stream_ends_with_its_session(gate, quick, end):
    key_id, secret = new_key(gate)
    run = new_run(gate, "mine", key=secret)
    with browser(gate) as client, browser(gate) as other:
        sign_in(client, secret)
        other.cookies.update(client.cookies)
        with client.stream("GET", f"/runs/{run}/live") as answer:
            found = events(answer)
            next(found)
            if end == "sign-out":
                other.post("/sign-out", data={"form_token": token_in(other.get("/"))})
            else:
                gate.run(gate.gateway.keys.revoke(key_id))
            assert [kind for kind, _ in found][-1] == "signed-out"


def test_a_stream_ends_with_its_token(gate, quick, monkeypatch):
    key_id, secret = new_key(gate)
    run = new_run(gate, "by-token", key=secret)
    token = gate.gateway.identity.issue(Caller(owner="ann", key_id=key_id, role="member"))
    with gate.http(token) as client, client.stream("GET", f"/runs/{run}/live") as answer:
        found = events(answer)
        next(found)
        ends = time.time() + gate.gateway.identity.token_ttl
        monkeypatch.setattr(gate.gateway.identity, "clock", lambda: ends)
        assert [kind for kind, _ in found][-1] == "signed-out"


def test_an_owner_has_at_most_16_streams(gate, quick):
    _, secret = new_key(gate, owner="eve")
    _, other = new_key(gate, owner="fay")
    with gate.http(secret) as client, gate.http(other) as neighbour:
        with ExitStack() as streams:
            for _ in range(16):
                opened = streams.enter_context(client.stream("GET", "/live/runs"))
                assert opened.status_code == 200
            refused = client.get("/live/runs")
            assert (refused.status_code, refused.json()["type"]) == (429, "overloaded")
            assert "16 live pages of this owner" in refused.text
            with neighbour.stream("GET", "/live/runs") as opened:
                assert opened.status_code == 200

        def opens() -> bool:
            with client.stream("GET", "/live/runs") as opened:
                return opened.status_code == 200

        wait_until(opens)


def test_a_cursor_behind_the_record_begins_at_its_end(gate, quick):
    run = new_run(gate, "far")
    log(gate, run, step=0, reward=0.1)
    with signed_in(gate) as client:
        cursor = re.search(r'data-cursor="([^"]+)"', client.get(f"/runs/{run}").text)[1]
        far = f"{cursor.rpartition('-')[0]}-{10**18 - 1}"
        with client.stream("GET", f"/runs/{run}/live?after={far}") as answer:
            found = events(answer)
            next(found)
            log(gate, run, step=1, reward=0.2)
            _, second = next(found)
    assert second["points"] == {"reward": [[1, 0.2, 1.0]]}


def test_a_restarted_gateway_continues_a_page_at_its_cursor(tmp_path, quick):
    with running_gateway(tmp_path) as gate:
        run = new_run(gate, "goes-on")
        log(gate, run, step=0, reward=0.1)
        with signed_in(gate) as client:
            cookies = dict(client.cookies)
            port = client.base_url.port
            cursor = re.search(r'data-cursor="([^"]+)"', client.get(f"/runs/{run}").text)[1]
            with client.stream("GET", f"/runs/{run}/live?after={cursor}") as answer:
                found = events(answer)
                next(found)
                gate.gateway.futures.release_waiters()  # as a stopping gateway does
                assert [kind for kind, _ in found] == []
    with running_gateway(tmp_path) as gate, browser(gate) as client:
        log(gate, run, step=1, reward=0.2)
        for name, value in cookies.items():
            client.cookies.set(name.replace(str(port), str(client.base_url.port)), value)
        with client.stream("GET", f"/runs/{run}/live?after={cursor}") as answer:
            _, first = next(events(answer))
    assert first["points"] == {"reward": [[1, 0.2, 1.0]]}


# --- Stopping and logs ------------------------------------------------------------------------


def test_a_run_is_stopped_from_its_page_by_a_member_and_not_by_a_reader(gate):
    _, member = new_key(gate, owner="dee")
    _, reader = new_key(gate, role="reader", owner="dee")
    run = new_run(gate, "to-stop", key=member)
    with signed_in(gate, reader) as client:
        assert "Stop the run" not in client.get(f"/runs/{run}").text
        form = {"form_token": token_in(client.get("/"))}
        assert client.post(f"/runs/{run}/stop", data=form).status_code == 403
    with signed_in(gate, member) as client:
        page = client.get(f"/runs/{run}")
        assert "Stop the run" in page.text
        assert client.post(f"/runs/{run}/stop", data={"discard": "yes"}).status_code == 400
        stopped = client.post(
            f"/runs/{run}/stop", data={"form_token": token_in(page), "discard": "yes"}
        )
        assert stopped.headers["location"] == f"/runs/{run}"
        assert "dee has stopped the run" in client.get(f"/runs/{run}").text


def test_the_logs_of_a_run_are_shown_as_text(gate):
    run = new_run(gate, "logged")
    folder = gate.settings.data_dir / "logs"
    folder.mkdir(exist_ok=True)
    line = {
        "event": "<b>bad</b>",
        "why": "too hot",
        "level": "error",
        "run_id": run,
        "timestamp": "2026-11-27T08:00:00Z",
    }
    (folder / "gateway.log").write_text(f"{json.dumps(line)}\nno JSON <i>\n")
    with signed_in(gate) as client:
        page = client.get(f"/runs/{run}/logs?level=error")
    lines = re.findall(r'<td class="mono">(.*?)</td>', page.text)
    shown = f'<b>bad</b> {run} why="too hot"'
    assert [html.unescape(line) for line in lines] == ["no JSON <i>", shown]
    assert "<b>bad" not in page.text
