"""What was used, added up by hour and told by the billing calls, through the SDK."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import tinker
from tinker import types

from tests.support.gateway.running import KEY, datum

HOUR = timedelta(hours=1)


@pytest.fixture
def admin(gate):
    return tinker.AdminClient(base_url=gate.url, api_key=KEY)


def window() -> tuple[datetime, datetime]:
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - HOUR
    return start, start + 3 * HOUR


def test_billing_counts_exactly_what_was_trained_and_sampled(gate, admin):
    with tinker.ServiceClient(
        base_url=gate.url, api_key=KEY, project_id="paid", user_metadata={"who": "me"}
    ) as service:
        session_id = service.holder.get_session_id()
        training = service.create_lora_training_client("tiny:full").result()
        training.forward([datum([1, 2, 3])], "cross_entropy").result()
        training.forward_backward([datum([1, 2]), datum([3, 4, 5])], "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()
        training.save_state("kept").result()
        sampler = training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=3)
        sampler.sample(types.ModelInput.from_ints([1, 2, 3, 4]), 2, params).result()

        usage = admin.get_billing_usage(*window()).result()
        mine = [event for event in usage.data if event.session_id == session_id]
        told = {
            (e.event_info.type, getattr(e.event_info, "cached", None)): getattr(
                e.event_info, "token_count", None
            )
            for e in mine
        }
        assert told == {
            ("training", None): 3 + 5,
            ("sampling_prefill", False): 3,
            ("sampling_prefill", True): 1,
            ("sampling_sample", None): 8,
            ("checkpoint", None): None,
        }
        (saved,) = [e.event_info for e in mine if e.event_info.type == "checkpoint"]
        assert saved.count == 1, "an ephemeral publish leaves no checkpoint"
        for event in mine:
            assert (event.base_model, event.project_id) == ("tiny", "paid")
            assert event.bucket_end - event.bucket_start == HOUR
            assert event.user_id == "tml:organization_user:local"
            assert event.estimated_cost_usd is None
        assert usage.sessions[session_id].user_metadata == {"who": "me"}
        with gate.http() as client:
            start, end = (time.isoformat().replace("+00:00", "Z") for time in window())
            query = {"starting_on": start, "ending_before": end, "session_id": session_id}
            answer = client.get("/api/v1/billing/usage/events", params=query).json()
        seconds = {e["event_info"]["type"]: e["accelerator_seconds"] for e in answer["data"]}
        assert seconds["training"] == pytest.approx(0.5 + 0.5 + 0.25)
        assert seconds["sampling_sample"] > 0

        rest = tinker.RestClient(base_url=gate.url, api_key=KEY)
        rest.assign_session_project(session_id, "moved").result()
        usage = rest.get_billing_usage(*window()).result()
        projects = {e.project_id for e in usage.data if e.session_id == session_id}
        assert projects == {"moved"}


def test_a_window_that_makes_no_sense_is_refused(admin):
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    for start, end, why in (
        (now.replace(minute=30), now + HOUR, "on the hour"),
        (now, now, "before"),
        (now + HOUR, now, "before"),
        (now - timedelta(days=15), now, "14 days"),
        (now + 2 * HOUR, now + 3 * HOUR, "future"),
    ):
        with pytest.raises(tinker.BadRequestError, match=why):
            admin.get_billing_usage(start, end).result()
    assert admin.get_billing_usage(now - timedelta(days=14), now).result().data is not None


def test_storage_is_that_of_the_checkpoints_that_there_are(gate, admin):
    with tinker.ServiceClient(base_url=gate.url, api_key=KEY, project_id="stored") as service:
        training = service.create_lora_training_client("tiny:full").result()
        assert admin.get_current_checkpoint_storage_usage("stored").result().data == []
        path = training.save_state("one").result().path
        training.save_state("two").result()
        (item,) = admin.get_current_checkpoint_storage_usage("stored").result().data
        assert (item.project_id, item.org_user_urn) == ("stored", "tml:organization_user:local")
        assert (item.checkpoint_count, item.size_bytes) == (2, 42)
        assert item.size_gigabytes == pytest.approx(42e-9)
        assert item.estimated_monthly_cost_usd is None
        everything = admin.get_current_checkpoint_storage_usage().result()
        assert sum(i.checkpoint_count for i in everything.data) >= 2
        tinker.RestClient(base_url=gate.url, api_key=KEY).delete_checkpoint_from_tinker_path(
            path
        ).result()
        (item,) = admin.get_current_checkpoint_storage_usage("stored").result().data
        assert (item.checkpoint_count, item.size_bytes) == (1, 21)
