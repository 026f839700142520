from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tandem.backends import BackendDescription
from tandem.backends.registry import descriptions, known_backends
from tandem.errors import UnsupportedByBackend, WorkerStartFailed
from tandem.protocol.worker import TrainingSpec
from tandem.settings.workers import TrainerSettings
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights.layout import BaseModelFiles
from tandem.weights.store import make_folder
from tests.support.local_trainer import (
    batch_of,
    compute,
    data_of,
    gradients,
    logprobs,
    make,
    make_rank,
    publish,
    spec_of,
)
from tests.support.other_packages import register
from tests.support.tiny_model import ARCHITECTURES
from tests.support.trainer_worker import request
from tests.support.unreliable_disk import Fault, UnreliableDisk
from trainer_service.backends import Capability, TrainerBackend, World, backend_named
from trainer_service.backends.fsdp2 import Fsdp2Backend
from trainer_service.backends.loop import Done, ShareResult
from trainer_service.batches.micro_batches import MicroBatch, RankPlan
from trainer_service.batches.validation import Batch
from trainer_service.compute.control_group import ControlGroup
from trainer_service.compute.trainer import RankTrainer
from trainer_service.service.operations import Operations


def test_the_built_in_backend_is_found_by_its_name():
    assert backend_named("fsdp2").__name__ == "Fsdp2Backend"


def test_the_built_in_backend_can_do_what_its_description_says():
    about = descriptions()["fsdp2"]
    assert isinstance(about, BackendDescription)
    able = {each.name.lower() for each in Fsdp2Backend.capabilities}
    assert able == set(about.capabilities)


def test_a_backend_of_an_installed_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    class Backend:
        pass

    module = ModuleType("of_this_test")
    module.Backend = Backend
    monkeypatch.setitem(sys.modules, "of_this_test", module)
    register(tmp_path, "of-this-test", own="of_this_test:Backend")
    monkeypatch.syspath_prepend(tmp_path)
    assert backend_named("own") is Backend


def test_a_name_that_two_packages_register_is_refused_with_both(tmp_path, monkeypatch):
    register(tmp_path, "one-backend", shared="one:Backend")
    register(tmp_path, "other-backend", shared="other:Backend")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerStartFailed, match="'shared' is registered by ") as raised:
        backend_named("shared")
    assert "one-backend" in str(raised.value) and "other-backend" in str(raised.value)


def test_a_package_cannot_take_the_name_of_a_built_in_backend(tmp_path, monkeypatch):
    register(tmp_path, "other-backend", fsdp2="other:Backend")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerStartFailed, match="registered by tandem and by other-backend"):
        backend_named("fsdp2")


def test_a_package_that_is_found_twice_is_one(tmp_path, monkeypatch):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        register(tmp_path / folder, "same-backend", own="same:Backend")
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert known_backends()["own"] == ""


@pytest.mark.parametrize("name", ["fsdp3", "base", "loop"])
def test_an_unknown_backend_is_refused_with_those_known(name):
    with pytest.raises(
        WorkerStartFailed, match=f"unknown trainer backend '{name}'; known: .*fsdp2"
    ):
        backend_named(name)


CALLS: dict[Callable[[TrainerBackend], object], Capability] = {
    lambda backend: backend.live_state(): Capability.SLEEP,
    lambda backend: backend.export_adapter(): Capability.ADAPTERS,
    lambda backend: backend.adapter_targets(): Capability.ADAPTERS,
    lambda backend: backend.share(TrainingSpec()): Capability.ADAPTERS,
}


@pytest.mark.parametrize(("call", "what"), CALLS.items())
def test_what_a_backend_cannot_do_says_so(monkeypatch, call, what):
    monkeypatch.setattr(TrainerBackend, "__abstractmethods__", frozenset())
    backend = object.__new__(TrainerBackend)
    assert what not in backend.capabilities
    with pytest.raises(UnsupportedByBackend, match=f"TrainerBackend cannot {what}"):
        call(backend)


# --- The loop ---------------------------------------------------------------------------------


class InOneCall(Fsdp2Backend):
    """Computes all micro-batches of a share at once."""

    capabilities = frozenset()
    shares: list[RankPlan]

    def forward_backward(self, batch: Batch, share: RankPlan, *, done: Done) -> ShareResult:
        self.shares = [share]
        whole = (tuple(datum for part in share for datum in part),)
        return super().forward_backward(batch, whole, done=done)


def make_own(path: Path, backend: type[TrainerBackend], *, plan: int = 0) -> RankTrainer:
    """The only rank of a trainer with this backend."""
    return RankTrainer(
        backend=backend(
            model_path=path,
            settings=TrainerSettings(device="cpu"),
            world=World(rank=0, size=1, device="cpu"),
        ),
        control=ControlGroup(rank=0, size=1, group=None),
        micro_batch_tokens=plan,
        base=BaseModelFiles.of_run(path, TrainingSpec()),
    )


def test_a_backend_may_compute_a_share_in_a_way_of_its_own(model):
    own, usual = make_own(model, InOneCall, plan=20), make_rank(model)
    message = request(data_of(count=9))
    found, expected = compute(own, message), compute(usual, message)
    assert len(own.backend.shares[0]) > 1
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    for name, gradient in gradients(usual).items():
        torch.testing.assert_close(gradients(own)[name], gradient, rtol=1e-4, atol=1e-5)


class Recording(Fsdp2Backend):
    def logprobs(self, micro_batch: MicroBatch, *, gradients: bool) -> torch.Tensor:
        self.shapes = [*getattr(self, "shapes", []), micro_batch.tokens.shape]
        return super().logprobs(micro_batch, gradients=gradients)


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_rank_without_datums_computes_two_tokens_and_adds_nothing(model, forward_only):
    trainer = make_own(model, Recording)
    batch = batch_of(trainer, request(data_of(count=3), forward_only=forward_only))
    told: list[int] = []
    whole = trainer.backend.forward_backward(batch, ((0, 1, 2),), done=told.append)
    before = gradients(trainer)
    trainer.backend.shapes.clear()
    nothing = trainer.backend.forward_backward(batch, ((), ()), done=told.append)
    assert trainer.backend.shapes == [(1, 2), (1, 2)]
    assert told == [int(batch.lengths.sum())]
    assert (nothing.sums.tolist(), len(nothing.logprobs)) == ([0.0] * len(whole.sums), 0)
    assert gradients(trainer).keys() == before.keys()
    for name, gradient in gradients(trainer).items():
        assert torch.equal(gradient, before[name]), name


@pytest.mark.parametrize(("limit", "times"), [(1, 3), (2**30, 1)])
def test_ranks_add_up_gradients_once_for_a_call_where_memory_allows(
    model, second, monkeypatch, limit, times
):
    calls: list[int] = []
    reduce = dist.reduce_scatter_single

    def counted(*given: object, **named: object) -> object:
        calls.append(1)
        return reduce(*given, **named)

    monkeypatch.setattr(dist, "reduce_scatter_single", counted)
    backend = Fsdp2Backend(  # small enough for one group
        model_path=model,
        settings=TrainerSettings(device="cpu", unreduced_gradients_bytes=limit),
        world=World(rank=1, size=2, device="cpu"),
    )
    trainer = RankTrainer(
        backend=backend,
        control=ControlGroup(rank=0, size=1, group=None),
        micro_batch_tokens=0,
        base=BaseModelFiles.of_run(model, backend.training),
    )
    batch = batch_of(trainer, request(data_of(count=3)))
    for call in (1, 2):
        backend.forward_backward(batch, ((0,), (1, 2), ()), done=lambda tokens: None)
        assert len(calls) == call * times


# --- Exporting --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exported_tensors_are_those_that_were_said(models, group, architecture, adapters, dtype):
    lora = spec_of(architecture) if adapters else None
    backend = make_rank(models[architecture], lora, dtype=dtype).backend
    exports = backend.exports()
    units = {export.unit for export in exports}
    found = [(name, tuple(each.shape), each.dtype) for name, each in backend.export_weights(units)]
    assert found == [(export.name, export.shape, export.dtype) for export in exports]
    first = exports[0].unit
    some = [name for name, _ in backend.export_weights({first})]
    assert some == [export.name for export in exports if export.unit == first]


class OneByOne(Fsdp2Backend):
    """Checks that nobody holds more than the last tensor."""

    def export_weights(self, units: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        self.made: list[weakref.ref[torch.UntypedStorage]] = []
        for name, tensor in super().export_weights(units):
            copy = tensor.clone()
            assert all(storage() is None for storage in self.made[:-1]), name
            self.made.append(weakref.ref(copy.untyped_storage()))
            yield name, copy


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sharded_weights_are_published_and_can_be_used_afterwards(
    models, group, architecture, tmp_path
):
    operations = make(models[architecture], None, dtype="bfloat16")
    before = logprobs(operations, data_of(1))
    publish(operations, tmp_path / "v1")
    published = load_file(tmp_path / "v1" / "model.safetensors")
    expected = load_file(models[architecture] / "model.safetensors")
    assert published.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(published[name], tensor.bfloat16()), name
    assert np.array_equal(logprobs(operations, data_of(1)), before)


def test_publishing_takes_one_tensor_after_the_other(model, tmp_path):
    operations = Operations(make_own(model, OneByOne))
    publish(operations, tmp_path / "v1")
    backend = operations.trainer.backend
    assert len(backend.made) == len(backend.exports())


class Counting(Fsdp2Backend):
    ended = 0

    def export_weights(self, units: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().export_weights(units)
        self.ended += 1


def test_a_rank_whose_disk_is_full_goes_on_to_gather_for_the_others(model, tmp_path):
    operations = Operations(make_own(model, Counting))
    make_folder(folder := tmp_path / "data" / "run")
    hit = 0
    with UnreliableDisk(tmp_path / "data") as disk:
        for strike in disk.strikes(Fault.FULL):
            before = operations.trainer.backend.ended
            version = common_pb2.WeightVersion(name="run/v1", path=str(folder / "v1"))
            with strike:
                reply = operations.publish(trainer_pb2.PublishRequest(version=version))
            if "model.safetensors" in strike.hit:
                assert reply.failure.type == "storage_full"
                assert operations.trainer.backend.ended == before + 1, strike.hit
                hit += 1
    assert hit > 3
