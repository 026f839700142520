"""RestClient: lists of checkpoints, publishing, expiry, deletion, copies."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import pytest
import tinker
from tinker import ServiceClient, TrainingClient, types
from tinker.lib.public_interfaces.rest_client import RestClient

from tests.conformance.conform.calls import Call, refused_training, settled
from tests.conformance.conform.claims import proves, proves_both
from tests.conformance.conform.surface import NEWEST
from tests.support.files import tree
from tests.support.sdk import largest_difference, logprobs, prompt_logprobs, refusal, sequences
from tests.support.stacks import TIED, TestStack
from tests.support.waiting import wait_until

NUMBERS = itertools.count()


@pytest.fixture
def path(runs: dict[str, TrainingClient]) -> str:
    return settled(runs["lora"].save_state(f"own-{next(NUMBERS)}")).path


def listed(rest: RestClient, path: str) -> types.Checkpoint:
    run_id = path.split("/")[2]
    (found,) = [
        each
        for each in settled(rest.list_checkpoints(run_id)).checkpoints
        if each.tinker_path == path
    ]
    return found


@pytest.mark.core
@proves_both(
    "RestClient.list_checkpoints",
    that="has every checkpoint of the run with its kind, size, time, metadata and path",
)
def test_a_runs_checkpoints_are_listed(
    call: Call, rest: RestClient, runs: dict[str, TrainingClient], checkpoints: dict[str, str]
) -> None:
    answer = call(rest, "list_checkpoints", runs["lora"].model_id)
    found = {each.tinker_path: each for each in answer.checkpoints}
    kinds = {"weights": "training", "sampler_weights": "sampler"}
    for kind, path in checkpoints.items():
        each = found[path]
        assert (each.checkpoint_id, each.checkpoint_type) == (f"{kind}/shared", kinds[kind])
        assert each.size_bytes > 0
        assert not each.public
        assert each.expires_at is None
        assert each.time <= datetime.now(UTC)
    assert found[checkpoints["weights"]].user_metadata == {"step": "two"}
    others = call(rest, "list_checkpoints", runs["full"].model_id)
    assert not {each.tinker_path for each in others.checkpoints} & set(found)


@pytest.mark.core
@proves_both(
    "RestClient.list_user_checkpoints",
    that="has the checkpoints of all the caller's runs, newest first, in pages that add up",
)
def test_all_checkpoints_are_listed_newest_first(
    call: Call, rest: RestClient, runs: dict[str, TrainingClient], path: str
) -> None:
    everything = call(rest, "list_user_checkpoints", limit=1000).checkpoints
    paths = [each.tinker_path for each in everything]
    assert paths[0] == path
    times = [each.time for each in everything]
    assert times == sorted(times, reverse=True)
    assert {f"tinker://{run.model_id}/weights/start" for run in runs.values()} <= set(paths)
    pages = [
        each.tinker_path
        for offset in range(0, len(paths), 3)
        for each in call(rest, "list_user_checkpoints", limit=3, offset=offset).checkpoints
    ]
    assert pages == paths


@pytest.mark.core
@proves(
    "RestClient.get_weights_info_by_tinker_path",
    that="says what is needed to load the weights: base model, LoRA rank and layers, optimizer",
)
def test_weights_are_described(
    rest: RestClient, runs: dict[str, TrainingClient], checkpoints: dict[str, str]
) -> None:
    for path in checkpoints.values():
        info = settled(rest.get_weights_info_by_tinker_path(path))
        assert (info.base_model, info.is_lora, info.lora_rank) == (TIED, True, 4)
        assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, True)
    full = f"tinker://{runs['full'].model_id}/weights/start"
    info = settled(rest.get_weights_info_by_tinker_path(full))
    assert (info.is_lora, info.lora_rank) == (False, None)
    if tinker.__version__ == NEWEST:  # the oldest releases lack it
        assert info.optimizer_config.type == "adamw"


@pytest.mark.core
@proves_both(
    "RestClient.publish_checkpoint_from_tinker_path",
    "RestClient.unpublish_checkpoint_from_tinker_path",
    that="is seen in the lists; a repeat changes nothing",
)
def test_publishing_is_seen_in_the_lists(call: Call, rest: RestClient, path: str) -> None:
    assert not listed(rest, path).public
    for _ in range(2):
        call(rest, "publish_checkpoint_from_tinker_path", path)
        assert listed(rest, path).public
    for _ in range(2):
        call(rest, "unpublish_checkpoint_from_tinker_path", path)
        assert not listed(rest, path).public


@pytest.mark.core
@proves_both(
    "RestClient.set_checkpoint_ttl_from_tinker_path",
    that="sets and removes the time of expiry; less than an hour is refused",
)
def test_a_time_to_live_is_seen_as_expiry(call: Call, rest: RestClient, path: str) -> None:
    call(rest, "set_checkpoint_ttl_from_tinker_path", path, 7200)
    expected = datetime.now(UTC) + timedelta(seconds=7200)
    assert abs(listed(rest, path).expires_at - expected) < timedelta(minutes=1)
    refused = refusal(lambda: call(rest, "set_checkpoint_ttl_from_tinker_path", path, 60))
    assert refused.status == 400
    assert "3600" in refused.message
    call(rest, "set_checkpoint_ttl_from_tinker_path", path, None)
    assert listed(rest, path).expires_at is None


@pytest.mark.core
@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
@proves(
    "TrainingClient.save_state",
    "TrainingClient.save_weights_for_sampler",
    "TrainingClient.save_weights_external",
    that="a time to live is the checkpoint's expiry",
)
def test_a_checkpoint_is_saved_with_its_expiry(
    rest: RestClient, runs: dict[str, TrainingClient], kind: str
) -> None:
    method = {
        "weights": "save_state",
        "sampler_weights": "save_weights_for_sampler",
        "external_weights": "save_weights_external",
    }[kind]
    saved = settled(getattr(runs["lora"], method)("expiring", ttl_seconds=3600)).path
    expected = datetime.now(UTC) + timedelta(seconds=3600)
    assert abs(listed(rest, saved).expires_at - expected) < timedelta(minutes=1)


@pytest.mark.core
@proves_both(
    "RestClient.delete_checkpoint",
    "RestClient.delete_checkpoint_from_tinker_path",
    that="the checkpoint leaves all lists, can no longer be loaded, and its files are removed",
)
def test_what_is_deleted_is_gone(
    call: Call, rest: RestClient, stack: TestStack, service: ServiceClient, runs
) -> None:
    run = runs["lora"]
    names = [f"doomed-{next(NUMBERS)}" for _ in range(2)]
    paths = [settled(run.save_state(name)).path for name in names]

    def left_on_disk() -> set[str]:
        below = [path.name for path in tree(stack.data_dir / "checkpoints")]
        return {name for name in names if any(each.startswith(name) for each in below)}

    assert left_on_disk() == set(names)
    call(rest, "delete_checkpoint", run.model_id, f"weights/{names[0]}")
    call(rest, "delete_checkpoint_from_tinker_path", paths[1])
    of_run = {each.tinker_path for each in settled(rest.list_checkpoints(run.model_id)).checkpoints}
    of_user = settled(rest.list_user_checkpoints(limit=1000)).checkpoints
    assert not set(paths) & (of_run | {each.tinker_path for each in of_user})
    for path in paths:
        refused = refusal(lambda path=path: settled(rest.get_weights_info_by_tinker_path(path)))
        assert refused.type == "unknown_weights"
        refused = refusal(
            lambda path=path: settled(service.create_training_client_from_state(path))
        )
        assert refused.type == "unknown_weights"
    wait_until(lambda: not left_on_disk(), what="the files of deleted checkpoints are removed")


@pytest.mark.core
@proves_both(
    "RestClient.copy_weights",
    that="the copy samples exactly as its source, refuses training, outlives the source, and has "
    "the requested expiry",
)
def test_a_copy_outlives_its_source(
    call: Call,
    rest: RestClient,
    stack: TestStack,
    service: ServiceClient,
    runs: dict[str, TrainingClient],
) -> None:
    run = runs["lora"]
    source = settled(run.save_weights_for_sampler(f"source-{next(NUMBERS)}")).path
    probes = sequences(2, seed=90)
    expected = logprobs(run, probes)
    copy = call(rest, "copy_weights", source, "archive", ttl_seconds=3600)
    assert copy.split("/")[2] != run.model_id
    expiry = listed(rest, copy).expires_at - datetime.now(UTC)
    assert timedelta(minutes=58) < expiry <= timedelta(minutes=60)
    settled(rest.delete_checkpoint_from_tinker_path(source))
    sampler = settled(service.create_sampling_client(model_path=copy))
    assert largest_difference(prompt_logprobs(sampler, probes), expected) < 1e-4
    archived = settled(rest.list_training_runs(limit=1000, project_id="archive")).training_runs
    assert copy.split("/")[2] in {each.training_run_id for each in archived}
    assert "copy" in refused_training(stack, copy.split("/")[2]).message
    with pytest.raises(ValueError, match="destination_project_id"):
        call(rest, "copy_weights", source)
