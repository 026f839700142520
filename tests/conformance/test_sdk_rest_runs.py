"""RestClient: runs, sessions, samplers, projects, traces, identity."""

from __future__ import annotations

import json
import urllib.request
import uuid
from datetime import UTC, datetime, timedelta

import pytest
import tinker
from tinker import SamplingClient, ServiceClient, TrainingClient, types
from tinker.lib.public_interfaces.rest_client import RestClient

from tests.conformance.conform.calls import Call, settled
from tests.conformance.conform.claims import proves, proves_both
from tests.conformance.conform.surface import NEWEST
from tests.support.sdk import sample, sequences, supervised
from tests.support.stacks import TIED, TestStack


def is_recent(time: datetime) -> bool:
    return datetime.now(UTC) - timedelta(minutes=30) < time <= datetime.now(UTC)


@pytest.mark.core
@proves_both(
    "RestClient.get_training_run",
    "RestClient.get_training_run_by_tinker_path",
    that="has base model, rank, metadata, time of the last request and checkpoints",
)
def test_a_run_is_described(
    call: Call, rest: RestClient, runs: dict[str, TrainingClient], checkpoints: dict[str, str]
) -> None:
    run = runs["lora"]
    newest = settled(run.save_state("newest", overwrite=True)).path
    for found in (
        call(rest, "get_training_run", run.model_id),
        call(rest, "get_training_run_by_tinker_path", newest),
    ):
        assert found.training_run_id == run.model_id
        assert (found.base_model, found.is_lora, found.lora_rank) == (TIED, True, 4)
        assert found.user_metadata == {"kind": "lora"}
        assert not found.corrupted
        assert is_recent(found.last_request_time)
        assert found.last_checkpoint.tinker_path == newest
        assert found.last_sampler_checkpoint.checkpoint_type == "sampler"
    full = call(rest, "get_training_run", runs["full"].model_id)
    assert (full.is_lora, full.lora_rank, full.user_metadata) == (False, None, {"kind": "full"})


@pytest.mark.core
@proves_both(
    "RestClient.list_training_runs",
    that="lists all runs of the caller in pages that add up, and those of one project alone",
)
def test_runs_are_listed_in_pages(
    call: Call, rest: RestClient, runs: dict[str, TrainingClient]
) -> None:
    everything = call(rest, "list_training_runs", limit=1000)
    ids = [run.training_run_id for run in everything.training_runs]
    assert {run.model_id for run in runs.values()} <= set(ids)
    assert everything.cursor.total_count == len(ids) == len(set(ids))
    pages = [
        run.training_run_id
        for offset in range(len(ids))
        for run in call(rest, "list_training_runs", limit=1, offset=offset).training_runs
    ]
    assert pages == ids
    project = call(rest, "list_training_runs", limit=1000, project_id="conformance")
    assert {r.model_id for r in runs.values()} <= {
        run.training_run_id for run in project.training_runs
    }
    assert not call(rest, "list_training_runs", project_id="another").training_runs


@pytest.mark.core
@proves_both("RestClient.get_session", that="has the session's runs, samplers, name and metadata")
@proves_both("RestClient.list_sessions", that="names the caller's sessions in pages")
def test_sessions_are_listed_and_described(
    call: Call,
    rest: RestClient,
    session_id: str,
    runs: dict[str, TrainingClient],
    base_sampler: SamplingClient,
) -> None:
    session = call(rest, "get_session", session_id)
    assert {run.model_id for run in runs.values()} <= set(session.training_run_ids)
    assert base_sampler._sampling_session_id in session.sampler_ids
    if tinker.__version__ == NEWEST:  # older releases leave them out
        assert session.user_metadata == {"purpose": "conformance"}
        assert session.display_name == "Shared session"
    listed = call(rest, "list_sessions", limit=1000).sessions
    assert session_id in listed
    first, second = (call(rest, "list_sessions", limit=1, offset=n).sessions for n in (0, 1))
    assert [*first, *second] == listed[:2]


@proves(
    "RestClient.search_sessions",
    that="finds sessions by id, words of their name, metadata, project and status, in pages",
)
def test_sessions_are_searched(rest: RestClient, stack: TestStack) -> None:
    mark = uuid.uuid4().hex[:8]
    ids, services = [], []
    for number, word in enumerate(("first", "second", "third")):
        service = ServiceClient(
            project_id=f"project-{mark}",
            display_name=f"Nightly {mark}, the {word}",
            user_metadata={"mark": mark, "number": str(number)},
        )
        ids.append(service.holder.get_session_id())
        services.append(service)
        if number:
            settled(service.close("errored", detail="broke"))

    def found(**filters: object) -> list[str]:
        request = types.SessionSearchRequest(**filters)
        return [session.session_id for session in settled(rest.search_sessions(request)).sessions]

    newest_first = ids[::-1]
    assert found(session_id=ids[1]) == [ids[1]]
    assert found(display_name=f"NIGHTLY {mark}") == newest_first
    assert found(display_name=f"THIRD {mark}") == [ids[2]]
    assert found(user_metadata={"mark": mark}) == newest_first
    assert found(user_metadata={"mark": mark, "number": "1"}) == [ids[1]]
    assert found(project_ids=[f"project-{mark}"]) == newest_first
    by = {"user_metadata": {"mark": mark}}
    assert found(**by, statuses=[types.ActiveSessionStatusQuery()]) == [ids[0]]
    errored = types.ClientFinishedSessionStatusQuery(reasons=["errored"])
    success = types.ClientFinishedSessionStatusQuery(reasons=["success"])
    assert found(**by, statuses=[errored]) == [ids[2], ids[1]]
    assert found(**by, statuses=[success]) == []
    settled(services[0].close("success"))
    assert found(**by, statuses=[success]) == [ids[0]]

    paged, cursor = [], None
    for _ in range(3):
        request = types.SessionSearchRequest(**by, limit=1, cursor=cursor)
        page = settled(rest.search_sessions(request))
        paged += [session.session_id for session in page.sessions]
        cursor = page.next_cursor
    assert paged == newest_first
    assert page.sessions[0].user_metadata == {"mark": mark, "number": "0"}
    assert page.sessions[0].project_id == f"project-{mark}"
    assert is_recent(page.sessions[0].created_at)


@proves_both(
    "RestClient.assign_session_project", that="moves the session with its runs into the project"
)
def test_a_session_is_moved_into_a_project(
    call: Call,
    rest: RestClient,
    session_id: str,
    runs: dict[str, TrainingClient],
) -> None:
    project = f"moved-{call.variant}"
    call(rest, "assign_session_project", session_id, project)
    listed = settled(rest.list_training_runs(limit=1000, project_id=project)).training_runs
    assert {run.model_id for run in runs.values()} <= {run.training_run_id for run in listed}
    call(rest, "assign_session_project", session_id, "conformance")
    assert not settled(rest.list_training_runs(project_id=project)).training_runs


@proves_both(
    "RestClient.export_session_trace",
    that="the address, which needs no key, gives a trace with the session's operations in order",
)
def test_a_trace_holds_the_sessions_operations(
    call: Call, rest: RestClient, session_id: str, runs: dict[str, TrainingClient]
) -> None:
    settled(runs["lora"].forward_backward([supervised(sequences(1, seed=80)[0])], "cross_entropy"))
    settled(runs["lora"].optim_step(types.AdamParams()))
    url = call(rest, "export_session_trace", session_id)
    with urllib.request.urlopen(url, timeout=30) as answer:
        trace = json.loads(answer.read())
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    names = [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
    for operation in ("save_weights", "forward_backward", "optim_step"):
        assert any(operation in name for name in names), names
    assert all(event["dur"] >= 0 for event in events)


@proves("RestClient.whoami", that="names the owner of the key, and the organization it acts in")
def test_whoami_names_the_owner(rest: RestClient, runs: dict[str, TrainingClient]) -> None:
    who = settled(rest.whoami())
    owner = settled(rest.get_training_run(runs["lora"].model_id)).model_owner
    assert owner
    assert owner in who.user_urn
    assert who.org_urn.startswith("tml:organization:")


@pytest.mark.core
@proves_both("RestClient.get_sampler", that="names the sampler's base model and its weights")
def test_a_sampler_is_described(
    call: Call,
    rest: RestClient,
    service: ServiceClient,
    base_sampler: SamplingClient,
    checkpoints: dict[str, str],
) -> None:
    base = call(rest, "get_sampler", base_sampler._sampling_session_id)
    assert (base.sampler_id, base.base_model) == (base_sampler._sampling_session_id, TIED)
    assert base.model_path is None
    path = checkpoints["sampler_weights"]
    named = settled(service.create_sampling_client(model_path=path))
    assert sample(named, [3, 4, 5])
    found = call(rest, "get_sampler", named._sampling_session_id)
    assert (found.base_model, found.model_path) == (TIED, path)
