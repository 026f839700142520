from __future__ import annotations

from datetime import UTC, datetime

from gateway.workers.launchers.kubernetes.observed import Event, Pod
from gateway.workers.launchers.kubernetes.pods import _out_of_memory, told_by_events


def event(reason: str, second: int, message: str = "") -> Event:
    at = datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC)
    return Event(reason=reason, message=message, last_timestamp=at)


def test_a_claim_that_is_made_for_a_pod_alone_is_shared_with_nobody():
    claims = [{"name": "a", "resourceClaimName": "train-0"}, {"name": "b"}]
    pod = {"metadata": {"name": "p"}, "spec": {"resourceClaims": claims}}
    assert Pod.model_validate(pod).claims == ["train-0"]


def test_the_newest_warning_counts_in_whatever_order_they_are_listed():
    events = [event("FailedMount", 9, "late"), event("FailedMount", 2, "early")]
    assert told_by_events(events) == "FailedMount: late"


def test_a_warning_counts_no_more_when_the_pod_went_on_after_it():
    events = [event("Pulling", 5), event("FailedMount", 3, "early"), event("Scheduled", 1)]
    assert told_by_events(events) == ""


def test_what_is_told_in_the_same_second_was_before_the_pod_went_on():
    assert told_by_events([event("Pulled", 3), event("FailedMount", 3)]) == ""


def test_an_event_without_a_time_is_a_warning_all_the_same():
    assert told_by_events([Event(reason="FailedMount", message="x")]) == "FailedMount: x"


def test_a_limit_in_bytes_is_told_as_people_say_it():
    containers = [{"name": "worker", "resources": {"limits": {"memory": str(896 * 2**20)}}}]
    pod = Pod.model_validate({"metadata": {"name": "p"}, "spec": {"containers": containers}})
    assert "more than the 896Mi that its pod may have" in _out_of_memory(pod, "trainer", "worker")
