"""A real engine loads a trainer's bfloat16 deltas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tandem.v1 import common_pb2
from tests.support.local_trainer import make, publish, train
from tests.support.sampler_worker import PROMPT, SamplerClient, sampler_process
from tests.support.worker_process import RUN


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one rank, for a trainer in bfloat16."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prompt_logprobs(client: SamplerClient, version: common_pb2.WeightVersion) -> np.ndarray:
    answer = client.sample(PROMPT * 4, version=version, prompt_logprobs=True)
    assert answer.version == version.name and answer.prompt_logprobs is not None
    return answer.prompt_logprobs[1:]


def flip_a_bit(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def kept_number(old: Path, new: Path) -> int:
    """The position of the last number that two files share."""
    one, other = (np.fromfile(file, np.uint16) for file in (old, new))
    return 2 * int(np.flatnonzero(one == other)[-1])


@pytest.mark.usefixtures("group")
def test_a_delta_is_served_as_the_whole_version_and_refused_where_a_bit_is_wrong(
    model: Path, tmp_path: Path
):
    """Each load compares the engine's sums with those of the patched numbers."""
    trainer = make(model, None, dtype="bfloat16")
    of = f"{RUN}/v1"
    first = publish(trainer, tmp_path / "v1").version
    train(trainer, 2, lr=1e-4)
    whole = publish(trainer, tmp_path / "whole").version
    reply = publish(trainer, tmp_path / "v2", delta_of=of)
    assert reply.delta_of == of and reply.written_bytes < reply.bytes
    copies = [publish(trainer, tmp_path / name, delta_of=of).version for name in ("v3", "v4")]
    with sampler_process(model, dtype="bfloat16") as client:
        for version in (first, reply.version, whole):
            loaded = client.load(version)
            assert not loaded.HasField("failure"), loaded.failure
        expected = prompt_logprobs(client, whole)
        assert np.array_equal(prompt_logprobs(client, reply.version), expected)
        assert not np.array_equal(prompt_logprobs(client, first), expected)

        flip_a_bit(Path(copies[0].path) / "model.safetensors.patch", 100)
        refused = client.load(copies[0]).failure
        assert refused.type == "load_failed" and "model.safetensors.patch is damaged" in (
            refused.message
        )
        files = [tmp_path / name / "model.safetensors" for name in ("v1", "whole")]
        flip_a_bit(files[0], kept_number(*files))
        refused = client.load(copies[1]).failure
        assert refused.type == "load_failed" and f"changes of {of}" in refused.message
        assert np.array_equal(prompt_logprobs(client, whole), expected), "nothing else is affected"
