"""A real engine loads weights from a trainer's memory, or the files if anything is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tandem.v1 import common_pb2, trainer_pb2
from tests.support.files import memory_files
from tests.support.local_trainer import make, publish, train
from tests.support.sampler_worker import PROMPT, Sampled, SamplerClient, same
from trainer_service.service.operations import Operations


@pytest.fixture(scope="module")
def trainer(model: Path) -> Operations:
    return make(model, None)


def trained(trainer: Operations, folder: Path) -> trainer_pb2.PublishReply:
    """A distinct version, in files and in memory."""
    train(trainer, 1)
    reply = publish(trainer, folder, handoff=True)
    assert reply.HasField("handoff")
    return reply


def mapped(client: SamplerClient) -> bool:
    """Whether the sampler or its engine maps a trainer's memory."""
    sampler = psutil.Process(client.process.pid)
    processes = (sampler, *sampler.children(recursive=True))
    maps = (Path(f"/proc/{each.pid}/maps").read_text() for each in processes)
    return any("tandem-weights" in each for each in maps)


def test_what_is_handed_over_is_served_as_the_files_are(
    either: SamplerClient, trainer: Operations, tmp_path: Path
):
    """There need be no files yet, and no mapping remains."""
    reply = trained(trainer, tmp_path / "v1")
    version, files = reply.version, (tmp_path / "v1").rename(tmp_path / "later")
    loaded = either.load(version, handoff=reply.handoff)
    assert not loaded.HasField("failure") and loaded.handed_off and not loaded.handoff_failure
    assert loaded.bytes == reply.handoff.bytes and loaded.canary_difference < 1e-4
    assert not mapped(either)
    trainer.publisher.release(version.name)
    assert memory_files() == 0
    files.rename(tmp_path / "v1")

    def drawn() -> Sampled:
        return either.sample(PROMPT, version=version, n=4, seed=7, prompt_logprobs=True)

    handed_over = drawn()
    either.sample(PROMPT, version=either.base)
    assert not either.load(version).handed_off
    assert same(drawn(), handed_over)


def test_whatever_is_wrong_with_it_is_noticed_and_the_files_are_read(
    either: SamplerClient, trainer: Operations, tmp_path: Path
):
    def why_not(name: str, spoil: Callable[[common_pb2.Handoff], None]) -> str:
        reply = trained(trainer, tmp_path / name)
        spoil(reply.handoff)
        loaded = either.load(reply.version, handoff=reply.handoff)
        assert not loaded.HasField("failure") and not loaded.handed_off
        assert either.describe().version.name == reply.version.name
        assert not mapped(either)
        return loaded.handoff_failure

    def alter(handoff: common_pb2.Handoff) -> None:
        copy = trainer.publisher._copies[handoff.name]
        copy._memory.bytes[handoff.tensors[3].offset + 1] ^= 1

    def exchange(handoff: common_pb2.Handoff) -> None:
        """Swaps two matrices of one shape in one block, which keeps the sums."""
        of = {tensor.name: tensor for tensor in handoff.tensors}
        up, gate = (of[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("up", "gate"))
        up.offset, gate.offset = gate.offset, up.offset

    assert "other numbers" in why_not("altered", alter)
    assert "the engine's logprobs differ" in why_not("exchanged", exchange)
    assert "trainer's memory" in why_not(
        "gone", lambda handoff: trainer.publisher.release(handoff.name)
    )
    assert "lacks" in why_not("fewer", lambda handoff: handoff.tensors.pop() and None)
    assert "in bfloat16" in why_not("type", lambda handoff: setattr(handoff, "dtype", "bfloat16"))
    assert "handed over, not" in why_not("other", lambda handoff: setattr(handoff, "name", "v0"))
    trainer.publisher.release()
    assert memory_files() == 0
    either.sample(PROMPT, version=either.base)
