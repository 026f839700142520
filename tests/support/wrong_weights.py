"""Gives a real engine wrong weights, one kind after the other: `python wrong_weights.py FOLDER`.

It prints a `Refusal` of each as JSON. Its process has the engine's environment."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np

from sampler_service.engine import EngineState, SleepLevel
from sampler_service.lifecycle import EngineLifecycle
from sampler_service.vllm.start import start_engine
from sampler_service.weights.adapters import AdapterCache
from sampler_service.weights.loader import LoadableVersion, Loader
from sampler_service.weights.read_ahead import ReadAhead, in_thread
from tandem.errors import LoadFailed
from tandem.settings.workers import SamplerSettings
from tandem.v1 import common_pb2
from tandem.weights import open_version
from tests.support.adapter_files import ATTENTION, write_adapter_files, write_merged
from tests.support.sampler_worker import (
    LENGTH,
    plain_logprobs,
    publish,
    publish_adapter,
    rewrite_manifest,
)
from tests.support.tiny_model import write_tiny_model
from trainer_service.backends.base import Export
from trainer_service.checkpoints.handoff import keep_copy

if TYPE_CHECKING:
    import torch

    from sampler_service.vllm.worker_extension import WeightsExtension

TOKENS = [5, 9, 30, 41, 7, 20, 33, 4]
EMBEDDING = "embed_tokens"


@dataclass(frozen=True)
class Refusal:
    """`error` is the type and sentence of a refusal, or what a load reports after a repair.

    `serves` is the version afterwards, or "nothing". `right`: the engine computes its logprobs."""

    error: str
    serves: str
    right: bool


class WrongWeights:
    """An engine with `old` weights, `new` ones to spoil, and the models that they came from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base, self.old_model, self.new_model = (
            write_tiny_model(folder / name, seed=seed, head_dim=32, max_length=LENGTH)
            for seed, name in enumerate(("base", "old", "new"))
        )
        self.numbers = iter(range(1, 100))
        settings = SamplerSettings(device="cpu", kv_cache_bytes=2**24, max_lora_rank=4)
        self.engine = start_engine(self.base, settings, lambda: None, sleeps=True)
        self.loader = Loader(self.engine, base=self.base, tolerance=1e-4)
        self.adapters = AdapterCache(self.engine, base=self.base, tolerance=1e-4)
        self.lifecycle = EngineLifecycle(
            self.engine,
            self.loader,
            ReadAhead(
                self.loader.verify,
                timeout=60,
                clock=lambda: 0.0,
                on_done=lambda: None,
                start=in_thread,
            ),
            self.adapters,
            base=LoadableVersion("base/tiny", self.base),
            on_state=lambda state: None,
        )
        self.old = self.published(self.old_model)

    def published(self, model: Path) -> common_pb2.WeightVersion:
        return publish(model, self.folder, number=next(self.numbers))

    def shard(self, version: common_pb2.WeightVersion) -> Path:
        return sorted(Path(version.path).glob("*.safetensors"))[0]

    def try_out(self, fault: Callable[[WrongWeights], LoadableVersion]) -> Refusal:
        """Load what a fault leaves. The old version serves before."""
        if self.lifecycle.loaded.name != self.old.name:
            self.lifecycle.load(loadable(self.old))
        with patch_engine(fault, self):
            version = fault(self)
            try:
                if version.adapter:
                    error = self.add_adapter(version)
                elif self.lifecycle.state is EngineState.ASLEEP:
                    error = shown(self.lifecycle.wake(version).failure)
                else:
                    error = f"{self.lifecycle.load(version).handoff_failure} (repaired)"
            except LoadFailed as failure:
                error = shown(failure)
        serves = self.lifecycle.loaded.name
        model = self.old_model if serves == self.old.name else self.new_model
        if self.lifecycle.state is EngineState.FAILED:
            return Refusal(error, "nothing", right=True)
        computed, expected = self.engine.score(TOKENS), plain_logprobs(model, TOKENS)
        right = bool(np.allclose(computed, expected, atol=1e-4))
        return Refusal(error, "old" if serves == self.old.name else "new", right)

    def add_adapter(self, version: LoadableVersion) -> str:
        verified = self.adapters.verify(version, lambda: None)
        outcome = self.adapters.load_adapter(verified)
        while outcome is None:
            for result in self.engine.step().results:
                if (taken := self.adapters.take_canary(result)) is not None:
                    outcome = taken[1]
        assert not isinstance(outcome, LoadFailed) or version not in self.adapters
        return shown(outcome)


def shown(failure: object) -> str:
    return f"{failure.type}: {failure.message}" if isinstance(failure, LoadFailed) else "none"


def loadable(version: common_pb2.WeightVersion) -> LoadableVersion:
    return LoadableVersion(version.name, Path(version.path), adapter=version.adapter)


# --- Wrong files --------------------------------------------------------------------------


def stale_file(world: WrongWeights) -> LoadableVersion:
    version = world.published(world.new_model)
    shutil.copy(world.shard(world.old), world.shard(version))
    return loadable(version)


def swapped_shard(world: WrongWeights) -> LoadableVersion:
    """With a right checksum, so that only the trainer's sums tell."""
    version = world.published(world.new_model)
    shutil.copy(world.shard(world.old), world.shard(version))
    rewrite_manifest(version)
    return loadable(version)


def half_a_version(world: WrongWeights) -> LoadableVersion:
    version = world.published(world.new_model)
    world.shard(version).unlink()
    return loadable(version)


def another_version(world: WrongWeights) -> LoadableVersion:
    """As if a name were used twice."""
    version = world.published(world.new_model)
    return replace(loadable(version), path=Path(world.published(world.new_model).path))


def wrong_base(world: WrongWeights) -> LoadableVersion:
    model = write_tiny_model(world.folder / "other base", seed=9, head_dim=64, max_length=LENGTH)
    return loadable(world.published(model))


def wrong_type(world: WrongWeights) -> LoadableVersion:
    """Numbers that were rounded to bfloat16 on their way."""

    def rounded(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.bfloat16().float()

    return rewritten(world, rounded)


def permuted_tensor(world: WrongWeights) -> LoadableVersion:
    """Sums do not depend on places, so only the canary tells."""

    def exchange(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("o_proj.weight"))
        tensors[name] = tensors[name].flip(0).contiguous()

    return rewritten(world, exchange)


def rewritten(
    world: WrongWeights, change: Callable[[dict[str, torch.Tensor]], None]
) -> LoadableVersion:
    from safetensors.torch import load_file, save_file

    version = world.published(world.new_model)
    for file in Path(version.path).glob("*.safetensors"):
        tensors = load_file(file)
        if any(name.endswith("o_proj.weight") for name in tensors):
            change(tensors)
        save_file(tensors, file)
    rewrite_manifest(version)
    return loadable(version)


# --- Wrong adapters -----------------------------------------------------------------------


def published_adapter(world: WrongWeights, seed: int, base: Path) -> common_pb2.WeightVersion:
    number = next(world.numbers)
    folder = world.folder / f"adapter {number}"
    write_adapter_files(folder, world.old_model, seed=seed, modules=ATTENTION, size=0.2)
    merged = write_merged(world.folder / f"merged {number}", base, folder)
    return publish_adapter(folder, world.folder, number=number, merged=merged)


def other_adapter(world: WrongWeights) -> LoadableVersion:
    version, other = (published_adapter(world, seed, world.old_model) for seed in (1, 2))
    shutil.copy(world.shard(other), world.shard(version))
    rewrite_manifest(version)
    return loadable(version)


def adapter_of_another_base(world: WrongWeights) -> LoadableVersion:
    return loadable(published_adapter(world, 1, world.new_model))


# --- Wrong loads --------------------------------------------------------------------------


def old_cache(world: WrongWeights) -> LoadableVersion:
    return loadable(world.published(world.new_model))


def wake_without_load(world: WrongWeights) -> LoadableVersion:
    world.lifecycle.sleep(SleepLevel.DROP_WEIGHTS, drained=0)
    return loadable(world.published(world.new_model))


def ignored_load(world: WrongWeights) -> LoadableVersion:
    return loadable(world.published(world.new_model))


def old_tied_head(world: WrongWeights) -> LoadableVersion:
    return loadable(world.published(world.new_model))


def interrupted_load(world: WrongWeights) -> LoadableVersion:
    return loadable(world.published(world.new_model))


def torn_handoff(world: WrongWeights) -> LoadableVersion:
    """The trainer's memory changes after it was offered."""
    from safetensors.torch import load_file

    version = world.published(world.new_model)
    tensors = {
        n: t for f in Path(version.path).glob("*.safetensors") for n, t in load_file(f).items()
    }
    exports = [Export(name, tuple(t.shape), t.dtype, name) for name, t in tensors.items()]
    backend = SimpleNamespace(exports=lambda: exports, plan=None, device="cpu", dtype="float32")
    copy = keep_copy(version.name, backend)  # type: ignore[arg-type]
    assert copy is not None
    for _ in copy.copying(iter(tensors.items())):
        pass
    handoff = copy.offer(open_version(Path(version.path)), on_deadline=lambda: None)
    copy._memory.bytes[9] ^= 1
    return replace(loadable(version), handoff=handoff)


def moved_parameters(world: WrongWeights) -> LoadableVersion:
    """The places of noted copies are not the model's any more."""

    def move(worker: WeightsExtension) -> None:
        for parameter in worker.model_runner.get_model().parameters():
            parameter.data = parameter.data.clone()

    world.engine._engine.collective_rpc(move)
    return loadable(world.published(world.new_model))


def exchanged_places(world: WrongWeights) -> LoadableVersion:
    """Copies go to wrong places of one block, for all versions from now on."""

    def exchange(worker: WeightsExtension) -> None:
        copies = worker._tandem_copied._copies
        assert copies is not None, "they were not noted"
        up, gate = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate"))
        copies[up], copies[gate] = copies[gate], copies[up]

    world.engine._engine.collective_rpc(exchange)
    return loadable(world.published(world.new_model))


@contextmanager
def patch_engine(
    fault: Callable[[WrongWeights], LoadableVersion], world: WrongWeights
) -> Iterator[None]:
    """Break the engine's next load, cache or reading, as a fault needs."""
    from sampler_service.vllm import worker_extension

    read, load = worker_extension.read_tensors, world.engine.load
    before = dict(read(world.old_model))
    broken = iter([True])  # the next load alone

    def mixed(directory: Path) -> Iterator[tuple[str, object]]:
        breaks = next(broken, False)
        for number, (name, tensor) in enumerate(read(directory)):
            if breaks and fault is interrupted_load and number == 9:
                raise OSError("the volume is gone")
            stale = breaks and fault is old_tied_head and EMBEDDING in name
            yield name, before[name] if stale else tensor

    def ignore(directory: Path) -> frozenset[str]:
        return frozenset() if next(broken, False) else load(directory)

    patches: dict[object, AbstractContextManager[object]] = {
        old_cache: patch.object(
            world.engine, "reset_prefix_cache", lambda: not next(broken, False)
        ),
        ignored_load: patch.object(world.engine, "load", ignore),
        wake_without_load: patch.object(world.engine, "load", ignore),
        old_tied_head: patch.object(worker_extension, "read_tensors", mixed),
        interrupted_load: patch.object(worker_extension, "read_tensors", mixed),
    }
    with patches.get(fault, nullcontext()):
        yield


FAULTS = (
    stale_file,
    swapped_shard,
    half_a_version,
    another_version,
    wrong_base,
    wrong_type,
    permuted_tensor,
    other_adapter,
    adapter_of_another_base,
    old_cache,
    wake_without_load,
    ignored_load,
    old_tied_head,
    interrupted_load,
    torn_handoff,
    moved_parameters,
    exchanged_places,  # the last one: it leaves nothing to serve
)


if __name__ == "__main__":
    world = WrongWeights(Path(sys.argv[1]))
    refusals = {fault.__name__: asdict(world.try_out(fault)) for fault in FAULTS}
    print("RESULTS", json.dumps(refusals))
