"""Checkpoints through the SDK."""

from __future__ import annotations

import datetime as dt

import pytest
import tinker
from tinker import types

from tests.support.gateway.checkpoints import error_of, expire, listed, place, step
from tests.support.sdk import load_state
from tests.support.waiting import wait_until

HOUR = 3600


def test_a_saved_state_is_listed_with_what_was_said_of_it(training, rest):
    before = dt.datetime.now(dt.UTC)
    path = (
        training.save_state("first", ttl_seconds=2 * HOUR, user_metadata={"score": "0.5"})
        .result()
        .path
    )
    found = listed(rest, training.model_id)[path]
    assert found.checkpoint_id == "weights/first"
    assert found.checkpoint_type == "training"
    assert found.size_bytes == 15
    assert found.user_metadata == {"score": "0.5"}
    assert found.public is False
    assert before <= found.time <= dt.datetime.now(dt.UTC)
    assert found.expires_at - found.time == dt.timedelta(hours=2)


@pytest.mark.parametrize("ttl", [0, 1, HOUR - 1, 315_576_001, -5])
def test_a_time_to_live_out_of_its_range_is_refused_with_the_range(training, rest, ttl):
    for future in (
        training.save_state("bad", ttl_seconds=ttl),
        training.save_weights_for_sampler("bad", ttl_seconds=ttl),
        training.save_weights_external("bad", ttl_seconds=ttl),
    ):
        message = error_of(future)
        assert f"ttl_seconds is {ttl}" in message
        assert "3600" in message
        assert "ten years" in message
    assert listed(rest, training.model_id) == {}
    path = training.save_state("good").result().path  # the refused saves took numbers
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds"):
        rest.set_checkpoint_ttl_from_tinker_path(path, ttl).result()


def test_only_an_overwriting_save_replaces_a_state(gate, training, rest):
    path = training.save_state("state", user_metadata={"n": "1"}).result().path
    step(training)
    assert "name_taken" in error_of(training.save_state("state"))
    assert listed(rest, training.model_id)[path].user_metadata == {"n": "1"}
    assert training.save_state("state", overwrite=True).result().path == path
    assert listed(rest, training.model_id)[path].user_metadata is None
    wait_until(lambda: len(place(gate, training.model_id)) == 1)
    (folder,) = place(gate, training.model_id)
    assert (folder / "rank-0-0.safetensors").read_bytes() == b"state of step 1"


def test_weights_for_sampling_and_for_download_are_never_replaced(training):
    training.save_weights_for_sampler("served").result()
    training.save_weights_external("exported").result()
    assert "name_taken" in error_of(training.save_weights_for_sampler("served"))
    assert "name_taken" in error_of(training.save_weights_external("exported"))


def test_the_same_name_may_be_of_each_kind(training, rest):
    training.save_state("one").result()
    training.save_weights_for_sampler("one").result()
    training.save_weights_external("one").result()
    kinds = {c.checkpoint_type: c for c in listed(rest, training.model_id).values()}
    assert set(kinds) == {"training", "sampler", "external"}
    assert kinds["external"].checkpoint_id == "external_weights/one"
    assert kinds["sampler"].size_bytes == kinds["external"].size_bytes > 0


def test_lists_of_the_user_are_newest_first_and_paged(service, training, rest):
    other = service.create_lora_training_client("tiny:full").result()
    total = rest.list_user_checkpoints(limit=1).result().cursor.total_count
    mine = [
        run.save_state(f"n{i}").result().path for i, run in enumerate([training, other, training])
    ]
    page = rest.list_user_checkpoints(limit=2).result()
    assert [c.tinker_path for c in page.checkpoints] == [mine[2], mine[1]]
    assert (page.cursor.limit, page.cursor.offset) == (2, 0)
    assert page.cursor.total_count == total + 3
    rest_of = rest.list_user_checkpoints(limit=2, offset=2).result()
    assert rest_of.checkpoints[0].tinker_path == mine[0]
    beyond = rest.list_user_checkpoints(limit=2, offset=10**6).result()
    assert beyond.checkpoints == []
    assert beyond.cursor.total_count == total + 3


def test_what_is_not_there_is_not_found(training, rest):
    path = f"tinker://{training.model_id}/weights/none"
    for ask in (
        rest.publish_checkpoint_from_tinker_path,
        rest.unpublish_checkpoint_from_tinker_path,
        rest.delete_checkpoint_from_tinker_path,
        rest.get_weights_info_by_tinker_path,
        lambda p: rest.set_checkpoint_ttl_from_tinker_path(p, None),
        lambda p: rest.copy_weights(p, "archive"),
    ):
        with pytest.raises(tinker.NotFoundError):
            ask(path).result()
    with pytest.raises(tinker.NotFoundError):
        rest.list_checkpoints("s-none:train:0").result()


def test_a_deleted_checkpoint_is_gone_at_once_and_its_files_soon(gate, training, rest):
    path = training.save_state("old").result().path
    rest.delete_checkpoint(training.model_id, "weights/old").result()
    assert listed(rest, training.model_id) == {}
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result()
    wait_until(lambda: place(gate, training.model_id) == [])
    assert training.save_state("old").result().path == path, "the name is free again"


def test_an_expired_checkpoint_is_gone_at_once_and_its_files_soon(gate, training, rest):
    path = training.save_state("old", ttl_seconds=HOUR).result().path
    named = training.save_weights_for_sampler("old", ttl_seconds=HOUR).result().path
    kept = training.save_state("kept").result().path
    expire(gate, path)
    expire(gate, named)
    assert set(listed(rest, training.model_id)) == {kept}
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(path).result()
    wait_until(lambda: len(place(gate, training.model_id)) == 1)


def test_what_a_sampler_serves_stays_until_its_session_ends(gate, service, training, rest):
    path = training.save_weights_for_sampler("served").result().path
    training.save_weights_for_sampler("newer").result()  # the run pins only its newest version
    with gate.service() as other:
        client = other.create_sampling_client(model_path=path).result()
        rest.delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            service.create_sampling_client(model_path=path).result()
        gate.run(gate.gateway.collect(training.model_id))
        assert len(place(gate, training.model_id, "weights")) == 2
        prompt = types.ModelInput.from_ints([1, 2, 3])
        answer = client.sample(prompt, 1, types.SamplingParams(max_tokens=3)).result()
        assert answer.sequences[0].tokens == [3, 2, 1]
    wait_until(lambda: len(place(gate, training.model_id, "weights")) == 1)


def states_in_use(gate) -> list[str]:
    """Pinned saved states, without versions that the sampler serves."""
    pinned = gate.gateway.checkpoints.pins.folders()
    return [folder for folder in pinned if folder.startswith("checkpoints/")]


def test_what_a_trainer_loads_stays_until_it_has_loaded(gate, service, rest):
    unrestored = {"tandem.recovery": "off"}  # a replay could load it again
    training = service.create_lora_training_client("tiny:full", user_metadata=unrestored).result()
    step(training)
    path = training.save_state("loading").result().path
    step(training)
    _, trainer = gate.worker("trainer")
    gate.run(trainer.gate.clear)
    loading = load_state(training, path)
    wait_until(lambda: states_in_use(gate))
    rest.delete_checkpoint_from_tinker_path(path).result()
    gate.run(gate.gateway.collect(training.model_id))
    assert len(place(gate, training.model_id)) == 1
    gate.run(trainer.gate.set)
    loading.result()
    assert trainer.step == 1
    wait_until(lambda: not states_in_use(gate))


def test_a_load_that_never_ends_holds_its_files_no_longer_than_its_run(gate, rest):
    with gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        path = training.save_state("loading").result().path
        _, trainer = gate.worker("trainer")
        gate.run(trainer.gate.clear)
        load_state(training, path)
        wait_until(lambda: states_in_use(gate))
        rest.delete_checkpoint_from_tinker_path(path).result()
    wait_until(lambda: place(gate, training.model_id) == [])
    wait_until(lambda: not states_in_use(gate))


def test_states_are_loaded_in_place_and_into_new_runs_of_other_sessions(gate, training):
    step(training, 2)
    path = training.save_state("two").result().path
    step(training)
    _, trainer = gate.worker("trainer")
    load_state(training, path).result()
    assert (trainer.step, trainer.requests[-1].optimizer) == (2, False)
    load_state(training, path, optimizer=True).result()
    assert trainer.requests[-1].optimizer is True
    with gate.service() as other:
        plain = other.create_training_client_from_state(path).result()
        _, second = gate.worker("trainer")
        assert (second.step, second.requests[-1].optimizer) == (2, False)
        assert not plain.get_info().is_lora
        other.create_training_client_from_state_with_optimizer(path).result()
        _, third = gate.worker("trainer")
        assert (third.step, third.requests[-1].optimizer) == (2, True)


def test_a_trainer_does_not_load_what_is_for_sampling_or_download(service, training):
    served = training.save_weights_for_sampler("served").result().path
    exported = training.save_weights_external("exported").result().path
    for path in (served, exported):
        assert "save_state" in error_of(load_state(training, path))
        with pytest.raises(tinker.NotFoundError, match="save_state"):
            service.create_training_client_from_state(path).result()
    with pytest.raises(tinker.NotFoundError, match="save_weights_for_sampler"):
        service.create_sampling_client(model_path=exported).result()
