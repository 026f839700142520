"""The memory plan: what is needed is known before anything is loaded, and what fits is chosen."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import nn

from gateway.workers.launchers.kubernetes.model_size import read_size
from gateway.workers.launchers.kubernetes.resources import TrainerPod
from tandem.errors import WorkerStartFailed
from tandem.worker import LoraSpec, TrainingSpec
from tandem.worker_settings import TrainerSettings
from tests.support.allocations import allocations
from tests.support.local_trainer import WITHOUT_MLP, compute, data_of, gradients, make_rank
from tests.support.tiny_model import ARCHITECTURES
from tests.support.trainer_worker import datum, request
from trainer_service.backends import World
from trainer_service.backends.base import TrainerBackend
from trainer_service.backends.planning import (
    StandIn,
    _available,
    _micro_batch,
    _of_micro_batch,
    lasting,
    unreduced_gradients,
)
from trainer_service.batches.micro_batches import MicroBatch
from trainer_service.losses.base import LossResult
from trainer_service.models.heap import MAPPED_FROM, most_living, most_taken
from trainer_service.models.memory_plan import Available, Needs, choose
from trainer_service.models.rehearsal import trace_of
from trainer_service.optimizers import AdamWSettings
from trainer_service.optimizers.staged import StagedMoments, staging_bytes

GIB = 2**30


def activations(tokens: int, checkpointed: bool) -> int:
    return tokens * (1 if checkpointed else 8) * 2**20


def chosen(available: int, checkpointing: str = "auto", wanted: int = 2048) -> tuple[int, bool]:
    plan = choose(
        wanted=wanted,
        checkpointing=checkpointing,
        lasting=Needs({"weights": GIB}),
        activations=activations,
        available=Available(device=available),
    )
    return plan.micro_batch_tokens, plan.checkpointing


def test_blocks_are_checkpointed_only_where_the_wanted_micro_batch_does_not_fit_otherwise():
    assert chosen(17 * GIB) == (2048, False)
    assert chosen(17 * GIB - 1) == (2048, True)
    assert chosen(3 * GIB) == (2048, True)


def test_a_micro_batch_is_halved_until_it_fits():
    assert chosen(3 * GIB - 1) == (1024, True)
    assert chosen(GIB + 256 * 2**20) == (256, True)
    assert chosen(16 * GIB, "off") == (1024, False)
    assert chosen(17 * GIB, "on") == (2048, True)
    assert chosen(GIB + 100 * 2**20, wanted=100) == (100, True)


def test_large_micro_batches_are_halved_before_blocks_are_checkpointed():
    """Down to 4,096 tokens: checkpointed blocks compute a third more."""
    assert chosen(129 * GIB, wanted=16384) == (16384, False)
    assert chosen(129 * GIB - 1, wanted=16384) == (8192, False)
    assert chosen(33 * GIB, wanted=16384) == (4096, False)
    assert chosen(33 * GIB - 1, wanted=16384) == (16384, True)
    assert chosen(17 * GIB - 1, wanted=16384) == (8192, True)
    assert chosen(33 * GIB, "on", wanted=16384) == (16384, True)
    assert chosen(17 * GIB, "off", wanted=16384) == (2048, False)


def test_a_sequence_longer_than_a_micro_batch_is_checkpointed_where_it_does_not_fit_otherwise():
    plan = choose(
        wanted=4096,
        checkpointing="auto",
        lasting=Needs({"weights": GIB}),
        activations=activations,
        available=Available(device=49 * GIB),
    )
    assert [plan.checkpoints(tokens) for tokens in (1, 4096, 6144, 6145)] == [False] * 3 + [True]


def test_what_does_not_fit_is_refused_with_the_numbers_and_what_helps():
    with pytest.raises(WorkerStartFailed) as caught:
        choose(
            wanted=2048,
            checkpointing="auto",
            lasting=Needs({"weights": 3 * GIB, "gradients": 4 * GIB}),
            activations=activations,
            available=Available(device=7 * GIB),
            what_helps=["more ranks", "LoRA"],
        )
    assert str(caught.value) == (
        "the model does not fit into memory: with 256 tokens at a time and checkpointed blocks, "
        "each rank needs 7.25 GiB of its host (gradients 4, weights 3, activations 0.25), and may "
        "use 7 GiB. What helps: more ranks, LoRA"
    )


def test_a_host_that_is_too_small_for_what_a_gpu_puts_there_is_refused():
    with pytest.raises(WorkerStartFailed, match=r"needs 9 GiB of its host \(snapshot 9\), .* 8"):
        choose(
            wanted=2048,
            checkpointing="auto",
            lasting=Needs({"weights": GIB}, {"snapshot": 9 * GIB}),
            activations=activations,
            available=Available(device=80 * GIB, host=8 * GIB),
        )


# --- What lasts -----------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 10)
        self.blocks = nn.ModuleList(nn.Linear(10, 10, bias=False) for _ in range(3))


def needs(
    *,
    ranks: int = 1,
    device: str = "cpu",
    at_once: int = 1,
    unreduced: int = 1,
    **training: object,
) -> Needs:
    """Of 500 + 3 · 100 parameters; or of an adapter of 40."""
    model = Model()
    trainable = dict(model.named_parameters())
    if training.get("lora"):
        trainable = {"a": nn.Parameter(torch.empty(4, 10))}
    blocks = [block.weight for block in model.blocks]
    groups = [blocks[:2], blocks[2:], [model.embedding.weight]]
    stand_in = StandIn(
        backend=None,
        model=model,
        trainable=trainable,
        groups=groups if ranks > 1 or device == "cuda" else [],
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        outer=frozenset({"embedding.weight"}),
    )
    about = {
        "training": TrainingSpec(**training),
        "world": World(rank=0, size=ranks, device=device),
    }
    settings = TrainerSettings(unreduced_gradients_bytes=unreduced)
    return lasting(
        stand_in,
        at_once=at_once,
        unreduced=unreduced_gradients(model, settings=settings, **about),
        **about,
    )


def test_a_rank_alone_holds_all_states_and_a_snapshot_copies_them():
    assert needs() == Needs({"weights": 3200, "gradients": 3200, "moments": 6400, "snapshot": 9600})


def test_each_thread_adds_up_gradients_of_its_own():
    assert needs(at_once=2).device["gradients"] == 3 * 3200


def test_ranks_share_the_states_and_gather_the_root_and_two_groups():
    assert needs(ranks=4) == Needs(
        {
            "weights": 800,
            "gradients": 800,
            "gathered": 4 * (500 + 200 + 100),
            "moments": 1600,
            "snapshot": 2400,
        }
    )


def test_several_ranks_hold_the_gradients_of_the_whole_model_if_these_may_wait():
    assert needs(ranks=4, unreduced=3200).device["unreduced gradients"] == 3200
    for parts in (needs(ranks=4, unreduced=3199), needs(unreduced=3200)):
        assert "unreduced gradients" not in parts.device
    assert "unreduced gradients" not in needs(ranks=4, unreduced=3200, lora=LoraSpec()).device


def test_a_snapshot_of_a_gpu_is_on_its_host_and_moments_where_the_run_wants_them():
    parts = {"weights": 1600, "gradients": 1600, "gathered": 2 * (500 + 200 + 100)}
    assert needs(ranks=2, device="cuda") == Needs({**parts, "moments": 3200}, {"snapshot": 4800})
    assert needs(ranks=2, device="cuda", offload="moments") == Needs(
        parts, {"moments": 3200, "snapshot": 4800}
    )


def test_weights_on_the_host_have_gradients_in_pinned_memory_and_come_by_group():
    """Of the root, a GPU has its part in both types before any other group comes; of the largest of
    these, while three are gathered."""
    found = needs(ranks=2, device="cuda", offload="weights")
    assert found.device == {"gathered": 2 * (500 + 200 + 100) + 6 * 500 // 2 - 2 * 300}
    sizes = [math.ceil(size / 2) for size in (500, 100, 100, 100)]
    pinned = sum(2 ** math.ceil(math.log2(4 * size)) for size in sizes)
    states = {"weights": 1600, "gradients": pinned, "moments": 3200, "snapshot": 4800}
    assert found.host == states
    adapters = needs(ranks=2, device="cuda", offload="weights", lora=LoraSpec())
    assert adapters.host == {"frozen weights": 800, "snapshot": 12 * 40}
    assert adapters.device["weights"] == adapters.device["gradients"] == 4 * 40
    assert needs(offload="weights", device="cpu").host == {}


def test_states_in_bfloat16_take_half_and_dimuon_has_one_moment_of_a_matrix():
    assert needs(states="bfloat16").device["moments"] == 3200
    assert needs(optimizer="dimuon").device["moments"] == 4 * (2 * 500 + 300)


def test_adapters_lie_whole_on_every_rank_beside_frozen_weights():
    parts = needs(ranks=4, lora=LoraSpec())
    assert (parts.device["frozen weights"], parts.device["weights"]) == (800, 4 * 40)
    assert (parts.device["moments"], parts.device["snapshot"]) == (8 * 40, 12 * 40)


def test_ranks_of_one_host_share_nine_tenths_of_what_is_free(monkeypatch):
    monkeypatch.setattr("trainer_service.backends.planning.free_memory_bytes", lambda: 10 * GIB)

    def found(on_node: int, **settings: int) -> Available:
        world = World(rank=0, size=1, device="cpu", on_node=on_node)
        return _available(TrainerSettings(**settings), world)

    assert found(1) == Available(device=9 * GIB)
    assert found(3) == Available(device=3 * GIB)
    assert found(2, memory_bytes=4 * GIB) == Available(device=2 * GIB)
    assert found(1, memory_bytes=20 * GIB) == Available(device=9 * GIB)


def test_a_rank_with_a_gpu_plans_with_its_budget_or_what_is_free_whichever_is_less(monkeypatch):
    monkeypatch.setattr("trainer_service.backends.planning.free_memory_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * GIB, 80 * GIB))

    def found(budget: int) -> int:
        world = World(rank=0, size=1, device="cuda")
        return _available(TrainerSettings(memory_bytes=budget), world).device

    assert found(0) == 45 * GIB
    assert found(30 * GIB) == 30 * GIB
    assert found(70 * GIB) == 45 * GIB


# --- What comes and goes --------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, WITHOUT_MLP], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", ["off", "on"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_memory_a_micro_batch_takes_what_it_takes_with_it(
    models, architecture, checkpointing, lora
):
    trainer = make_rank(
        models[architecture], lora, checkpointing=checkpointing, micro_batch_tokens=60
    )
    backend = trainer.backend
    real = StandIn(
        backend=backend,
        model=backend._model,
        trainable=backend._trainable,
        groups=[],
        dtype=torch.float32,
        outer=frozenset(),
    )
    stand_in = backend._stand_in(
        models[architecture],
        TrainerSettings(device="cpu"),
        checkpointed=checkpointing == "on",
        packs=backend.packs,
    )
    planned = _of_micro_batch(stand_in, 60, on_cpu=False)
    assert planned == _of_micro_batch(real, 60, on_cpu=False) > 0
    assert planned <= backend.plan.needs.device["activations"] < 1.5 * planned
    allocated = max(accumulate(allocations(lambda: _backward(backend, _micro_batch(backend, 60)))))
    # Some of its input torch has not allocated; some kernels take what nobody sees.
    assert 0.99 * planned < allocated < 1.1 * planned


def test_gradients_that_are_added_up_take_no_other_tensor():
    table = nn.Parameter(torch.ones(100, 10, device="meta"))
    hidden = torch.ones(5, 10, device="meta")
    loss = (hidden @ table.t()).tanh().sum() + (table[:5] * hidden).sum()
    gradients = 2 * 4 * table.numel()
    assert (
        gradients <= most_living(trace_of(loss.backward, besides=[table, hidden])) < 1.5 * gradients
    )


def _backward(backend: TrainerBackend, micro_batch: MicroBatch) -> None:
    """As it is planned: beside gradients that are there."""
    _, result = backend.loss_of(
        micro_batch, lambda logprobs: LossResult(loss=-logprobs.sum()), by_entry=True
    )
    backend.backward(result.loss)


def test_ranks_on_a_cpu_reduce_in_a_copy_of_a_group_s_gradients(model, group):
    backend = make_rank(model, states="bfloat16").backend
    settings = TrainerSettings(device="cpu")
    stand_in = backend._stand_in(model, settings, checkpointed=False, packs=backend.packs)
    size = 4 * sum(each.numel() for each in stand_in.groups[-1])
    alone, several = (_of_micro_batch(stand_in, 8, ranks=ranks) for ranks in (1, 2))
    assert alone < several <= alone + size + 4096


def test_nothing_outlasts_a_micro_batch_of_several_ranks(model, group, monkeypatch):
    backend = make_rank(model, states="bfloat16").backend
    settings = TrainerSettings(device="cpu")
    stand_in = backend._stand_in(model, settings, checkpointed=False, packs=backend.packs)
    left_of = "trainer_service.backends.planning.most_taken"
    monkeypatch.setattr(left_of, lambda trace: sum(size for _, size in trace))
    assert _of_micro_batch(stand_in, 8, ranks=2) == 0


def test_a_step_that_is_staged_has_what_is_planned_for_it():
    parameter = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    moments = StagedMoments({"weight": parameter}, on_host=False)
    state = moments.state(create=True).values()
    settings = AdamWSettings(
        learning_rate=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
    )
    trace = trace_of(lambda: moments.step(settings), besides=[parameter, parameter.grad, *state])
    planned = staging_bytes(1000, TrainingSpec(states="bfloat16"), device="cpu")
    assert 0.9 * planned < most_living(trace) <= planned + 100


def test_attention_keeps_nothing_that_grows_with_the_square_of_a_sequence(models):
    sizes = []
    for tokens in (32, 64):
        trainer = make_rank(models["llama"], packing="off", micro_batch_tokens=tokens)
        sizes.append(trainer.backend.plan.needs.device["activations"])
    assert sizes[1] < 2 * sizes[0]


def test_what_has_ended_is_not_counted():
    def compute_in_turn() -> None:
        for _ in range(3):
            torch.empty(100, device="meta").add(1).mul(2)

    assert most_living(trace_of(compute_in_turn, besides=[])) == 2 * 400


def test_a_heap_keeps_its_extent_and_what_is_large_is_given_back():
    small, large = MAPPED_FROM // 2, MAPPED_FROM
    in_turn = [(0, small), (0, -small), (1, large), (1, -large)]
    assert most_living(in_turn) == large
    assert small + large <= most_taken(in_turn) < small + large + 100


def test_what_does_not_fit_between_others_makes_a_heap_longer():
    size = MAPPED_FROM // 4
    four = [(which, size) for which in range(4)]
    into_a_gap = [*four, (1, -size), (4, size // 2), (5, size // 4)]
    beside_it = [*four, (1, -size), (4, size + 4096)]
    assert most_taken([*into_a_gap, *_ended(into_a_gap)]) < 4.01 * size
    assert most_taken([*beside_it, *_ended(beside_it)]) > 5 * size


def test_gaps_that_are_neighbours_are_one():
    size = MAPPED_FROM // 4
    four = [(which, size) for which in range(4)]
    both = [*four, (1, -size), (2, -size), (4, 2 * size - 4096)]
    assert most_taken([*both, *_ended(both)]) < 4.01 * size


def test_large_tensors_do_not_make_the_heap_of_a_trainer_on_a_cpu_longer(model):
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("not glibc, or one before 2.33")
    libc.mallinfo2.restype = _MallocInfo
    make_rank(model)
    size = 16 * MAPPED_FROM
    torch.empty(size, dtype=torch.uint8)  # by itself, glibc now had all up to this size in its heap
    before = libc.mallinfo2().heap
    _kept = [torch.empty(size, dtype=torch.uint8) for _ in range(16)]
    assert libc.mallinfo2().heap == before


class _MallocInfo(ctypes.Structure):
    """As mallinfo(3) has it."""

    _fields_ = (("heap", ctypes.c_size_t), ("others", ctypes.c_size_t * 9))


def _ended(trace: list[tuple[int, int]]) -> list[tuple[int, int]]:
    gone = {which for which, size in trace if size < 0}
    return [(which, -size) for which, size in trace if size > 0 and which not in gone]


def test_a_trainer_takes_the_checkpointing_that_its_plan_chose_and_computes_the_same_bits(model):
    whole = make_rank(model)
    needed = sum(whole.backend.plan.needs.device.values())
    small = make_rank(model, memory_bytes=needed - 1)
    assert [each.backend.plan.checkpointing for each in (whole, small)] == [False, True]
    for trainer in (whole, small):
        compute(trainer, request(data_of()))
    for name, gradient in gradients(whole).items():
        assert torch.equal(gradients(small)[name], gradient)


def test_a_sequence_that_needs_checkpointed_blocks_gets_them_and_has_the_same_bits(model):
    data = request([datum(range(3, 67), weights=[1.0] * 64)])
    whole, small = make_rank(model), make_rank(model, micro_batch_tokens=16)
    small.backend.plan = replace(small.backend.plan, available=Available(device=0))
    states = []
    for trainer in (whole, small):
        compute(trainer, data)
        states.append(trainer.backend._checkpointing.on)
    assert states == [False, True]
    for name, gradient in gradients(whole).items():
        assert torch.equal(gradients(small)[name], gradient)
    compute(small, request(data_of(count=1)))
    assert not small.backend._checkpointing.on


def test_a_model_that_does_not_compute_without_memory_is_trained_without_a_plan(model, monkeypatch):
    def fail(*given: object, **named: object) -> None:
        raise RuntimeError("the value is not known")

    monkeypatch.setattr("trainer_service.backends.planning.trace_of", fail)
    trainer = make_rank(model)
    assert trainer.backend.plan is None and trainer.micro_batch_tokens == 2048


def test_a_pod_requests_what_its_trainer_plans(model, group):
    """All but the activations, of which a gateway knows less."""
    for states in ("float32", "bfloat16"):
        settings = {"parallel_micro_batches": 1, "shard_group_parameters": 1}
        planned = dict(make_rank(model, states=states, **settings).backend.plan.needs.device)
        del planned["activations"]
        pod = TrainerPod(
            model=read_size(model),
            trainer=TrainerSettings(device="cpu", **settings),
            training=TrainingSpec(states=states),
            gpu=False,
            ranks=1,
            nodes=1,
            sleeps=False,
            snapshots=True,
            runs=1,
        )
        assert pod.lasting == planned
