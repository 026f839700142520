"""LoRA runs that share one base model in one trainer, each as if alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from tandem.protocol.worker import Layout, LoraSpec, TrainingSpec
from tandem.settings.workers import TrainerSettings
from tandem.v1 import common_pb2, trainer_pb2
from tandem.weights.layout import BaseModelFiles
from tests.support.fake_device import FakeDevice
from tests.support.local_trainer import (
    data_of,
    forward_backward,
    gradients,
    load,
    logprobs,
    make,
    make_rank,
    publish,
    save,
    weights,
)
from tests.support.small_memory import SmallMemory
from trainer_service.backends import World
from trainer_service.compute.control_group import ControlGroup
from trainer_service.compute.offload import Offload
from trainer_service.compute.trainer import RankTrainer
from trainer_service.service.hosted_runs import HostedRuns
from trainer_service.service.operations import Operations

A = TrainingSpec(lora=LoraSpec(rank=4, seed=5))
B = TrainingSpec(lora=LoraSpec(rank=2, seed=6, alpha=8, mlp=False), optimizer="dimuon")
C = TrainingSpec(lora=LoraSpec(rank=7, seed=7, attention=False, unembedding=False))
D = TrainingSpec(lora=LoraSpec(rank=3, seed=8, mlp=False))
SPECS = {"a": A, "b": B, "c": C, "d": D}

Turn = Callable[[], Operations]


def host(model: Path, *run_ids: str, **settings: object) -> HostedRuns:
    first, *others = run_ids
    runs = HostedRuns(trainer_of(model, first, **settings).trainer, run_id=first)
    for run_id in others:
        reply = add(runs, run_id)
        assert not reply.HasField("failure"), reply.failure
    return runs


def add(
    runs: HostedRuns, run_id: str, training: TrainingSpec | None = None
) -> trainer_pb2.AddRunReply:
    training = training or SPECS[run_id]
    return runs.add_run(
        trainer_pb2.AddRunRequest(run_id=run_id, training=training.model_dump_json())
    )


def trainer_of(model: Path, run_id: str, **settings: object) -> Operations:
    spec = SPECS[run_id]
    return make(model, spec.lora, optimizer=spec.optimizer, **settings)


def step(operations: Operations, *, clip: float = 0.0) -> float:
    """Return the norm of the gradients."""
    return optim_step(operations, clip=clip).metrics["grad_norm"]


def optim_step(operations: Operations, *, clip: float) -> trainer_pb2.OptimStepReply:
    settings: dict[str, object] = {
        "adamw": trainer_pb2.AdamWParams(
            learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=clip
        )
    }
    if operations.trainer.backend.training.optimizer == "dimuon":
        settings = {
            "dimuon": trainer_pb2.DiMuonParams(learning_rate=1e-2, beta1=0.9, grad_clip_norm=clip)
        }
    reply = operations.optim_step(trainer_pb2.OptimStepRequest(**settings))
    assert not reply.HasField("failure"), reply.failure
    return reply


def experiment(turn: Turn, *, seed: int) -> Iterator[object]:
    """Operations of a run, one at each `next`. Yields their answers."""
    for number in range(seed, seed + 3):
        yield forward_backward(turn(), data_of(number)).SerializeToString(deterministic=True)
        yield forward_backward(turn(), data_of(number + 50)).SerializeToString(deterministic=True)
        stepped = optim_step(turn(), clip=0.5)
        yield dict(stepped.metrics), dict(stepped.batch_metrics)
        yield logprobs(turn(), data_of(number + 9)).tobytes()


def assert_same_weights(one: Operations, other: Operations) -> None:
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("parallel", [0, 2])
def test_runs_that_take_turns_compute_what_each_computes_alone(models, architecture, parallel):
    model = models[architecture]
    names = ("b", "d") if architecture == "qwen3_moe" else ("a", "b", "c")
    shared = host(model, *names, parallel=parallel)
    alone = {name: trainer_of(model, name, parallel=parallel) for name in names}
    for name in names:
        assert_same_weights(shared.operations_of(name), alone[name])

    together = {
        name: experiment(lambda name=name: shared.take_turn(name), seed=seed)
        for seed, name in enumerate(names)
    }
    apart = {
        name: experiment(lambda name=name: alone[name], seed=seed)
        for seed, name in enumerate(names)
    }
    for answers in zip(*together.values(), strict=True):
        for name, answer in zip(names, answers, strict=True):
            assert answer == next(apart[name]), name
    for name in names:
        assert_same_weights(shared.operations_of(name), alone[name])


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_runs_share_a_model_that_computes_in_bfloat16(model):
    shared, alone = (
        host(model, "a", "c", dtype="bfloat16"),
        trainer_of(model, "a", dtype="bfloat16"),
    )
    for one, other in zip(
        experiment(lambda: shared.take_turn("a"), seed=1),
        experiment(lambda: alone, seed=1),
        strict=True,
    ):
        assert one == other
        forward_backward(shared.take_turn("c"), data_of(3))
    assert_same_weights(shared.operations_of("a"), alone)


def test_a_run_may_come_and_go_while_others_train(model):
    shared, alone = host(model, "a"), trainer_of(model, "a")
    mine, own = experiment(lambda: shared.take_turn("a"), seed=1), experiment(lambda: alone, seed=1)

    def go_on(times: int) -> None:
        for _ in range(times):
            assert next(mine) == next(own)

    go_on(1)  # gradients are held
    add(shared, "b")
    forward_backward(shared.take_turn("b"), data_of(3))
    go_on(2)
    step(shared.take_turn("b"))
    go_on(3)
    shared.remove_run("b")
    go_on(2)
    add(shared, "b")
    assert_same_weights(
        shared.operations_of("b"), trainer_of(model, "b")
    )  # nothing is left of the first
    go_on(4)
    assert_same_weights(shared.operations_of("a"), alone)


def test_the_first_run_may_go_before_the_others(model):
    shared, alone = host(model, "a", "b"), trainer_of(model, "b")
    mine, own = experiment(lambda: shared.take_turn("b"), seed=1), experiment(lambda: alone, seed=1)
    assert next(mine) == next(own)
    forward_backward(shared.take_turn("a"), data_of(3))
    shared.remove_run("a")
    shared.remove_run("a")
    assert list(mine) == list(own)
    assert list(shared.describe_run("b").run_ids) == ["b"]


@pytest.mark.parametrize("gone", [False, True])
def test_all_runs_sleep_at_once_also_one_that_is_removed_meanwhile(model, gone):
    shared, alone = host(model, "a", "b"), trainer_of(model, "a")
    backends = [shared.operations_of(name).trainer.backend for name in ("a", "b")]
    shared.switching._offload = Offload(lambda: backends, memory=FakeDevice())
    mine, own = experiment(lambda: shared.take_turn("a"), seed=1), experiment(lambda: alone, seed=1)
    assert next(mine) == next(own)
    forward_backward(shared.take_turn("b"), data_of(3))
    norm = torch.stack(
        [g.norm() for g in gradients(shared.operations_of("b").trainer).values()]
    ).norm()

    reply = shared.switching.sleep(common_pb2.SleepRequest())
    assert reply.device_bytes == 0 and not reply.HasField("failure")
    assert shared.describe_run("a").asleep and shared.describe_run("b").asleep
    if gone:
        shared.remove_run("b")
    reply = shared.switching.wake()
    assert reply.host_bytes == 0 and not reply.HasField("failure")
    assert next(mine) == next(own)
    if not gone:
        assert step(shared.take_turn("b")) == pytest.approx(norm.item())
    assert list(mine) == list(own)


# --- Files ------------------------------------------------------------------------------------


def test_a_run_publishes_its_own_adapter_alone(models, tmp_path):
    for architecture in ("qwen3", "llama"):
        shared = host(models[architecture], "a", "c")
        alone = {name: trainer_of(models[architecture], name) for name in ("a", "c")}
        for name, own in alone.items():
            for operations in (shared.take_turn(name), own):
                forward_backward(operations, data_of(2))
                step(operations)
        for name, own in alone.items():
            folder = tmp_path / f"{architecture}-{name}"
            publish(shared.take_turn(name), folder / "shared")
            publish(own, folder / "own")
            assert contents(folder / "shared") == contents(folder / "own")


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the manifest, which has the version's name."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != "manifest.json"}


def test_a_checkpoint_of_a_run_is_that_of_its_own_trainer(model, tmp_path):
    shared, alone = host(model, "a", "b"), trainer_of(model, "a")
    for operations in (shared.take_turn("a"), alone):
        forward_backward(operations, data_of(2))
        step(operations)
    other = weights(shared.operations_of("b"))
    save(shared.take_turn("a"), tmp_path / "c")
    forward_backward(shared.take_turn("b"), data_of(1))
    held = gradients(shared.operations_of("b").trainer)
    forward_backward(shared.take_turn("a"), data_of(3))
    step(shared.take_turn("a"))
    assert load(shared.take_turn("a"), tmp_path / "c").step == 1
    assert_same_weights(shared.operations_of("a"), alone)
    assert all(torch.equal(weights(shared.operations_of("b"))[name], other[name]) for name in other)
    assert all(
        torch.equal(gradients(shared.operations_of("b").trainer)[name], held[name]) for name in held
    )
    assert load(trainer_of(model, "a"), tmp_path / "c").step == 1
    refused = load(shared.take_turn("b"), tmp_path / "c")
    assert refused.failure.type == "checkpoint_mismatch"


def test_a_run_is_restored_from_its_snapshot_among_others(model, tmp_path):
    lost, shared = trainer_of(model, "b"), host(model, "a", "b")
    forward_backward(lost, data_of(1))
    step(lost)
    header = common_pb2.OperationHeader(run_id="b", seq_id=2)
    lost.take_snapshot(trainer_pb2.TakeSnapshotRequest(path=str(tmp_path / "s"), header=header))
    assert lost.snapshots.result(str(tmp_path / "s")).result(timeout=60).step == 1

    forward_backward(shared.take_turn("a"), data_of(4))
    held = gradients(shared.operations_of("a").trainer)
    restored = shared.take_turn("b").restore(
        trainer_pb2.RestoreRequest(path=str(tmp_path / "s"), seq_id=2, run_id="b")
    )
    assert restored.step == 1
    for operations in (lost, shared.take_turn("b")):
        forward_backward(operations, data_of(5))
        step(operations)
    assert_same_weights(shared.operations_of("b"), lost)
    assert all(
        torch.equal(gradients(shared.operations_of("a").trainer)[name], held[name]) for name in held
    )


def test_two_runs_may_write_snapshots_at_the_same_time(model, tmp_path):
    shared = host(model, "a", "b")
    for name in ("a", "b"):
        operations = shared.take_turn(name)
        forward_backward(operations, data_of(1))
        step(operations)
        operations.take_snapshot(trainer_pb2.TakeSnapshotRequest(path=str(tmp_path / name)))
    for name in ("a", "b"):
        reply = shared.operations_of(name).snapshots.result(str(tmp_path / name)).result(timeout=60)
        assert reply.step == 1 and not reply.HasField("failure")
        own = trainer_of(model, name)
        own.restore(trainer_pb2.RestoreRequest(path=str(tmp_path / name)))
        assert_same_weights(own, shared.operations_of(name))


# --- Errors -----------------------------------------------------------------------------------


def test_a_refused_batch_of_one_run_leaves_the_gradients_of_another(model):
    shared, alone = host(model, "a", "b"), trainer_of(model, "a")
    for operations in (shared.take_turn("a"), alone):
        forward_backward(operations, data_of(1))
    bad = trainer_pb2.ForwardBackwardRequest(payload=b"no message")
    assert shared.take_turn("b").forward_backward(bad).HasField("failure")
    refused = shared.take_turn("b").optim_step(trainer_pb2.OptimStepRequest())
    assert refused.HasField("failure")
    assert step(shared.take_turn("a")) == step(alone)
    assert_same_weights(shared.operations_of("a"), alone)


def test_memory_that_runs_out_for_one_run_leaves_gradients_and_plan_of_another(model):
    few = SmallMemory(
        model_path=model,
        settings=TrainerSettings(device="cpu"),
        world=World(rank=0, size=1, device="cpu"),
        training=A,
        most=40,
        where="backward",
    )
    rank = RankTrainer(
        backend=few,
        control=ControlGroup(rank=0, size=1, group=None),
        micro_batch_tokens=0,
        base=BaseModelFiles.of_run(model, few.training),
    )
    shared = HostedRuns(rank, run_id="a")
    add(shared, "c")
    forward_backward(shared.take_turn("c"), data_of(1, count=2))
    held = gradients(shared.operations_of("c").trainer)
    plans = {name: shared.operations_of(name).trainer.micro_batch_tokens for name in ("a", "c")}
    forward_backward(shared.take_turn("a"), data_of(2))
    assert few.failed
    assert shared.describe_run("a").micro_batch_tokens < plans["a"]
    assert shared.describe_run("c").micro_batch_tokens == plans["c"]
    assert all(
        torch.equal(gradients(shared.operations_of("c").trainer)[name], held[name]) for name in held
    )
    plan = shared.describe_run("a").micro_batch_tokens
    alone = trainer_of(model, "a", micro_batch_tokens=plan)
    forward_backward(alone, data_of(2))
    assert step(shared.take_turn("a")) == step(alone)
    assert_same_weights(shared.operations_of("a"), alone)


def test_a_run_that_cannot_share_the_model_is_refused_and_the_others_go_on(model):
    shared, alone = host(model, "a"), trainer_of(model, "a")
    for training, failure in [
        (TrainingSpec(lora=LoraSpec(rank=400)), "unsuitable_lora"),
        (
            TrainingSpec(lora=LoraSpec(rank=1, attention=False, mlp=False, unembedding=False)),
            "unsuitable_lora",
        ),
        (TrainingSpec(), "invalid_request"),
        (TrainingSpec(lora=LoraSpec(), layout=Layout(replicas=2)), "invalid_request"),
    ]:
        assert add(shared, "x", training).failure.type == failure
    assert add(shared, "a", B).failure.type == "invalid_request"
    assert list(shared.describe_run("a").run_ids) == ["a"]
    assert list(experiment(lambda: shared.take_turn("a"), seed=1)) == list(
        experiment(lambda: alone, seed=1)
    )


def test_a_model_whose_parameters_are_all_trained_has_one_run(model):
    whole = HostedRuns(make_rank(model), run_id="whole")
    assert add(whole, "a").failure.type == "invalid_request"
    assert list(whole.describe_run("whole").run_ids) == ["whole"]


def test_a_run_is_added_once(model):
    shared = host(model, "a", "b")
    forward_backward(shared.take_turn("b"), data_of(1))
    step(shared.take_turn("b"))
    again = add(shared, "b")
    assert not again.HasField("failure") and again.about.step == 1
    assert list(again.about.run_ids) == ["a", "b"]


# --- Memory -----------------------------------------------------------------------------------


def all_tensors() -> list[torch.Tensor]:
    """Only tensors with memory, which those of compiled blocks lack."""
    gc.collect()
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return [each for each in found if not isinstance(each, FakeTensor | FunctionalTensor)]


def held_bytes() -> int:
    """Each storage counts once."""
    found = all_tensors()
    found += [each.grad for each in found if each.is_leaf and each.grad is not None]
    storages = [each.untyped_storage() for each in found]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_a_further_run_needs_memory_for_its_adapter_alone_and_gives_it_back(model):
    _of_earlier_tests = all_tensors()  # keeps them until the end
    shared = host(model, "a")
    before = held_bytes()
    add(shared, "b")
    trained = shared.describe_run("b").trainable_parameters
    assert held_bytes() - before == 4 * trained
    forward_backward(shared.take_turn("b"), data_of(1))
    assert held_bytes() - before == 8 * trained  # gradients
    step(shared.take_turn("b"))  # moments, momentum, and a few counters
    assert held_bytes() - before <= 12 * trained + 1000
    shared.remove_run("b")
    assert held_bytes() == before
