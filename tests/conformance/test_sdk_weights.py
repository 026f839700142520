"""TrainingClient: weights for samplers and for other programs."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from peft import PeftModel
from tinker import ServiceClient, TrainingClient
from tinker.lib.public_interfaces.rest_client import RestClient

from tests.conformance.conform.calls import Call
from tests.conformance.conform.claims import proves, proves_both
from tests.support.plain_model import load, plain_logprobs
from tests.support.sdk import largest_difference, logprobs, prompt_logprobs, sequences, train
from tests.support.stacks import TIED
from tests.support.waiting import wait_until

TOLERANCE = 1e-4
PROBES = sequences(3, seed=100)
NUMBERS = itertools.count()


def moved(run: TrainingClient) -> list[np.ndarray]:
    """Trains until no logprob resembles an earlier one."""
    before = logprobs(run, PROBES)
    train(run, seed=200 + next(NUMBERS), steps=2)
    after = logprobs(run, PROBES)
    assert largest_difference(before, after) > 100 * TOLERANCE
    return after


@pytest.mark.core
@proves_both(
    "TrainingClient.save_weights_and_get_sampling_client",
    that="a snapshot has the trainer's logprobs and keeps them while training goes on",
)
def test_a_snapshot_stays(call: Call, any_run: TrainingClient) -> None:
    first = moved(any_run)
    snapshot = call(any_run, "save_weights_and_get_sampling_client")
    assert largest_difference(prompt_logprobs(snapshot, PROBES), first) < TOLERANCE
    second = moved(any_run)
    later = call(any_run, "save_weights_and_get_sampling_client")
    assert largest_difference(prompt_logprobs(later, PROBES), second) < TOLERANCE
    assert largest_difference(prompt_logprobs(snapshot, PROBES), first) < TOLERANCE


@proves_both(
    "TrainingClient.save_weights_and_get_sampling_client",
    that="an in-flight sampler follows the run's later in-flight saves",
)
def test_an_inflight_sampler_follows(call: Call, any_run: TrainingClient) -> None:
    first = moved(any_run)
    inflight = call(any_run, "save_weights_and_get_sampling_client", kind="inflight")
    assert largest_difference(prompt_logprobs(inflight, PROBES), first) < TOLERANCE
    moved(any_run)
    later = call(any_run, "save_weights_and_get_sampling_client", kind="inflight")
    # Other tokens than before, because an earlier session may use its prefix cache.
    fresh = sequences(3, seed=300 + next(NUMBERS))
    now = logprobs(any_run, fresh)
    assert largest_difference(prompt_logprobs(later, fresh), now) < TOLERANCE

    def followed() -> bool:
        return largest_difference(prompt_logprobs(inflight, fresh), now) < TOLERANCE

    wait_until(followed, what="the earlier in-flight sampler serves the newer weights")


@pytest.mark.core
@proves_both(
    "TrainingClient.save_weights_for_sampler",
    "TrainingClient.create_sampling_client",
    "ServiceClient.create_sampling_client",
    that="named weights have the trainer's logprobs at the save",
)
def test_named_weights_are_served_as_they_were_saved(
    call: Call, any_run: TrainingClient, service: ServiceClient
) -> None:
    saved = moved(any_run)
    name = f"named-{next(NUMBERS)}"
    path = call(any_run, "save_weights_for_sampler", name).path
    assert path == f"tinker://{any_run.model_id}/sampler_weights/{name}"
    moved(any_run)
    for sampler in (
        call(any_run, "create_sampling_client", path),
        call(service, "create_sampling_client", model_path=path),
    ):
        assert largest_difference(prompt_logprobs(sampler, PROBES), saved) < TOLERANCE
        assert sampler.get_base_model() == TIED


@proves_both(
    "TrainingClient.save_weights_external",
    that="full weights load in plain transformers, and a LoRA run's in peft, with the trainer's "
    "logprobs",
)
@proves_both(
    "RestClient.get_external_weights_urls",
    that="each address gives its file without a key, names its expiry, and is refused if altered",
)
def test_an_export_loads_in_other_programs(
    call: Call, any_run: TrainingClient, rest: RestClient, model_path: Path, tmp_path: Path
) -> None:
    trained = moved(any_run)
    name = f"export-{next(NUMBERS)}"
    path = call(any_run, "save_weights_external", name).path
    assert path == f"tinker://{any_run.model_id}/external_weights/{name}"
    signed = call(rest, "get_external_weights_urls", path)
    assert signed.expires > datetime.now(UTC)
    for file, url in signed.urls.items():
        target = tmp_path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        urllib.request.urlretrieve(url, target)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url[:-2] + ("AA" if url[-2:] != "AA" else "BB"))
    assert 400 <= refused.value.code < 500

    if "adapter_config.json" in signed.urls:
        assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
        model = PeftModel.from_pretrained(load(model_path), tmp_path).eval()
    else:
        model = load(tmp_path)
    assert largest_difference(plain_logprobs(model, PROBES), trained) < TOLERANCE


@proves(
    "RestClient.get_external_weights_urls",
    that="weights that are not an export are refused by the client",
)
def test_only_exports_have_addresses(rest: RestClient, runs: dict[str, TrainingClient]) -> None:
    with pytest.raises(ValueError, match="external"):
        rest.get_external_weights_urls(f"tinker://{runs['full'].model_id}/weights/start")
