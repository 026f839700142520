"""AdminClient, and RestClient's deprecated twins: audit log and billing."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest
import tinker
from tinker import SamplingClient, TrainingClient
from tinker.lib.public_interfaces.rest_client import RestClient

from tests.conformance.conform.calls import Call, rest_client, settled
from tests.conformance.conform.claims import proves_both
from tests.support.audit_log import days_of_tests
from tests.support.sdk import sample, supervised
from tests.support.stacks import TIED
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

CLIENTS = {"AdminClient": lambda: tinker.AdminClient(), "RestClient": rest_client}


@pytest.fixture(params=list(CLIENTS))
def asked(request: pytest.FixtureRequest, stack) -> RestClient | tinker.AdminClient:
    return CLIENTS[request.param]()


def window() -> tuple[datetime, datetime]:
    """This hour and the next, which may begin during the test."""
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return start - timedelta(hours=1), start + timedelta(hours=2)


@proves_both(
    "AdminClient.get_billing_usage",
    "RestClient.get_billing_usage",
    that="counts trained, prefilled and sampled tokens exactly, by session and project",
)
def test_usage_counts_the_tokens(
    call: Call,
    asked: RestClient | tinker.AdminClient,
    runs: dict[str, TrainingClient],
    base_sampler: SamplingClient,
    session_id: str,
) -> None:
    def counted() -> dict[str, int]:
        usage = call(asked, "get_billing_usage", *window())
        assert usage.sessions[session_id].user_metadata == {"purpose": "conformance"}
        totals = dict.fromkeys(("training", "sampling_prefill", "sampling_sample"), 0)
        for event in usage.data:
            if event.session_id == session_id and event.event_info.type in totals:
                assert (event.base_model, event.project_id) == (TIED, "conformance")
                assert event.bucket_end - event.bucket_start == timedelta(hours=1)
                totals[event.event_info.type] += event.event_info.token_count
        return totals

    prompt = [9, 8, 7, 6, 5]
    sample(base_sampler, prompt)  # a row for each kind
    settled(runs["lora"].forward([supervised([1, 2, 3])], "cross_entropy"))
    before = wait_until(
        lambda: (found := counted())["sampling_sample"] and found["training"] and found,
        what="there is usage",
    )
    settled(runs["lora"].forward_backward([supervised(list(range(3, 24)))], "cross_entropy"))
    settled(runs["lora"].optim_step(tinker.AdamParams()))
    sample(base_sampler, prompt, count=3, tokens=7)

    def grown() -> dict[str, int]:
        now = counted()
        return {kind: now[kind] - before[kind] for kind in now}

    wait_until(lambda: grown()["sampling_sample"] >= 21, what="the samples are counted")
    wait_until(lambda: grown()["training"] >= 20, what="the training is counted")
    found = grown()
    assert found["training"] == 20, "the tokens of the model's input"
    assert found["sampling_sample"] == 3 * 7
    # A prompt of several samples counts once or, as cache hits, with each.
    assert found["sampling_prefill"] in (len(prompt), 3 * len(prompt))


@proves_both(
    "AdminClient.get_current_checkpoint_storage_usage",
    "RestClient.get_current_checkpoint_storage_usage",
    that="adds up the checkpoints of a project, and grows by a new one's size",
)
def test_storage_is_that_of_the_checkpoints(
    call: Call, asked: RestClient | tinker.AdminClient, runs: dict[str, TrainingClient], request
) -> None:
    def stored(project: str | None) -> tuple[int, int]:
        usage = call(asked, "get_current_checkpoint_storage_usage", project)
        assert project is None or {item.project_id for item in usage.data} <= {project}
        for item in usage.data:
            assert item.size_gigabytes == pytest.approx(item.size_bytes / 1e9, rel=0.08)
        return (
            sum(item.checkpoint_count for item in usage.data),
            sum(item.size_bytes for item in usage.data),
        )

    before, all_before = stored("conformance"), stored(None)
    name = f"stored-{request.node.callspec.id}".replace("-", "_")
    path = settled(runs["lora"].save_state(name)).path
    rest = rest_client()
    (size,) = [
        each.size_bytes
        for each in settled(rest.list_checkpoints(runs["lora"].model_id)).checkpoints
        if each.tinker_path == path
    ]
    after, all_after = stored("conformance"), stored(None)
    assert after == (before[0] + 1, before[1] + size)
    assert all_after == (all_before[0] + 1, all_before[1] + size)
    assert stored("nobodys") == (0, 0)


@proves_both(
    "AdminClient.get_audit_log",
    "RestClient.get_audit_log",
    that="names action, checkpoint and owner; filters by checkpoint and day",
)
def test_the_audit_log_has_what_was_done(
    call: Call, asked: RestClient | tinker.AdminClient, runs: dict[str, TrainingClient], request
) -> None:
    rest = rest_client()
    name = f"audited-{request.node.callspec.id}".replace("-", "_")
    path = settled(runs["lora"].save_state(name)).path
    settled(rest.publish_checkpoint_from_tinker_path(path))
    settled(rest.delete_checkpoint_from_tinker_path(path))

    def about(*days: date, **filters: object) -> list[str]:
        entries = [
            entry
            for day in days or days_of_tests()
            for entry in call(asked, "get_audit_log", day=day, **filters).entries
        ]
        return [
            f"{entry.event} by {entry.event_details}"
            for entry in sorted(entries, key=lambda entry: entry.timestamp)
            if path in str(entry.event_details) or entry.tinker_path == path
        ]

    def complete() -> bool:
        return any("delete" in event for event in about())

    wait_until(complete, what="the deletion is in the log")
    for filters in ({}, {"event_type": "checkpoints"}):
        events = about(**filters)
        assert any("publish" in event for event in events), events
        assert "delete" in events[-1], events
        owner = settled(rest.get_training_run(runs["lora"].model_id)).model_owner
        assert all(owner in event for event in events), events
    assert not about(days_of_tests()[0] - timedelta(days=1))
    assert not about(event_type="teams")
