"""A real engine loads full weight versions in place."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from tests.support.sampler_worker import (
    PROMPT,
    SamplerClient,
    assert_computed_by,
    publish,
    rewrite_manifest,
)
from tests.support.worker_process import CALL_SECONDS


def test_a_published_version_is_served_exactly_and_the_base_again_after_it(
    sampler: SamplerClient, model: Path, changed: Path, directory: Path
):
    version = publish(changed, directory, number=1)
    reply = sampler.load(version)
    assert not reply.HasField("failure"), reply.failure
    assert reply.canary_difference < 1e-4
    sampler.assert_serves(version, changed)
    sampler.assert_serves(sampler.base, model)


def test_a_published_version_is_served_exactly_without_tied_embeddings(
    untied: SamplerClient, untied_changed: Path, directory: Path
):
    version = publish(untied_changed, directory, number=2)
    untied.assert_serves(version, untied_changed)
    untied.assert_serves(untied.base, directory / "untied")


def test_requests_for_two_versions_at_once_are_each_answered_from_their_own(
    sampler: SamplerClient, model: Path, changed: Path, directory: Path
):
    version = publish(changed, directory, number=3)
    versions = [sampler.base, version] * 4
    answers = sampler.sample_all(
        [sampler.request(PROMPT, version=v, n=2, max_tokens=10, stop=[]) for v in versions]
    )
    for asked, answer in zip(versions, answers, strict=True):
        assert answer.version == asked.name
        assert_computed_by(model if asked is sampler.base else changed, PROMPT, answer)


def _remove_a_tensor(version) -> None:
    from safetensors.torch import load_file, save_file

    file = sorted(Path(version.path).glob("*.safetensors"))[0]
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, file)
    rewrite_manifest(version)


def _damage_a_file(version) -> None:
    file = sorted(Path(version.path).glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def _remove_a_file(version) -> None:
    sorted(Path(version.path).glob("*.safetensors"))[0].unlink()


def _change_the_canary(version) -> None:
    from tandem.weights import Canary

    rewrite_manifest(version, canary=Canary(tokens=[5, 6, 7], logprobs=[-1.0, -1.0]))


def _remove_the_manifest(version) -> None:
    (Path(version.path) / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_remove_a_tensor, "lacks"),
        (_damage_a_file, "checksum"),
        (_remove_a_file, "lacks"),
        (_change_the_canary, "differ"),
        (_remove_the_manifest, "not a published weight version"),
    ],
)
def test_a_bad_version_is_refused_and_the_old_one_goes_on_serving(
    sampler: SamplerClient, model: Path, changed: Path, directory: Path, spoil, reason: str
):
    sampler.assert_serves(sampler.base, model)
    version = publish(changed, directory, number=5)
    spoil(version)
    failure = sampler.refusal(sampler.request(PROMPT, version=version))
    assert failure.type == "load_failed"
    assert reason in failure.message
    assert sampler.load(version).failure.type == "load_failed"
    assert sampler.describe().version.name == "base/tiny"
    sampler.assert_serves(sampler.base, model)


def test_twenty_loads_leave_memory_flat(
    sampler: SamplerClient, model: Path, changed: Path, directory: Path
):
    versions = [publish(w, directory, number=10 + i) for i, w in enumerate([changed, model])]
    for version in versions * 2:
        sampler.load(version)
    before = sampler.resident_bytes
    for version in versions * 10:
        assert not sampler.load(version).HasField("failure")
    assert sampler.resident_bytes - before < 8 * 2**20
    sampler.assert_serves(versions[1], model)


def test_metrics_count_what_was_done(sampler: SamplerClient):
    sampler.sample(PROMPT, max_tokens=3, stop=[])
    url = (
        f"http://{sampler.report.address.rpartition(':')[0]}:{sampler.report.metrics_port}/metrics"
    )
    metrics = urllib.request.urlopen(url, timeout=CALL_SECONDS).read().decode()
    for name in ("requests_total", "tokens_total", "load_seconds_count", "state", "waiting"):
        assert f"tandem_sampler_{name}" in metrics
