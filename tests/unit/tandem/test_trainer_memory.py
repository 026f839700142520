from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.backends.memory import (
    Available,
    MemoryPlan,
    ModelSize,
    TrainerMemory,
    choose,
    logits_rows,
)
from tandem.errors import WorkerStartFailed
from tandem.protocol.worker import Layout, LoraSpec, TrainingSpec
from tandem.settings.workers import TrainerSettings

GIB = 2**30
SHAPES = {
    "embedding.weight": (50, 10),
    **{f"blocks.{number}.weight": (10, 10) for number in range(3)},
}
SIZE = ModelSize.of_shapes(SHAPES, {"vocab_size": 50, "hidden_size": 10})


def memory_of(
    *, ranks: int = 1, device: str = "cpu", at_once: int = 1, settings: object = (), **training
) -> TrainerMemory:
    """Memory of 500 + 3 · 100 parameters, or of an adapter of 40."""
    trained = 40 if training.get("lora") else 800
    return TrainerMemory(
        model=SIZE,
        trained=trained,
        moments=2 * trained,
        training=TrainingSpec(**training),
        settings=TrainerSettings(
            **{"unreduced_gradients_bytes": 1, "shard_group_parameters": 100, **dict(settings)}
        ),
        device=device,
        ranks=ranks,
        at_once=at_once,
    )


def lasting(**given: object) -> dict[str, int]:
    return memory_of(**given).lasting(copied=False)


def test_the_size_of_a_model_is_that_of_its_shapes():
    assert (SIZE.parameters, SIZE.blocks) == (800, (100, 100, 100))
    assert (SIZE.width, SIZE.adapter_width) == (3 * 20, 3 * 20 + 60)
    assert (SIZE.tensors, SIZE.pinned(1)) == ((500, 100, 100, 100), 512 + 3 * 128)


def test_a_token_goes_through_few_experts_in_whatever_tensors_they_are():
    stacked = {"h.0.experts.up": (8, 6, 4), "h.0.shared_experts.up": (6, 4)}
    apart = {f"h.0.experts.{number}.up": (6, 4) for number in range(8)}
    apart["h.0.shared_experts.up"] = (6, 4)
    config = {"num_experts": 8, "num_experts_per_tok": 2}
    sizes = [ModelSize.of_shapes(shapes, config) for shapes in (stacked, apart)]
    assert [(each.width, each.expert_width) for each in sizes] == [(10, 20), (10, 20)]
    assert [each.adapter_width for each in sizes] == [90, 90]


def test_a_rank_with_some_experts_computes_rows_for_all_of_a_token_s_experts():
    config = {"num_experts": 8, "num_experts_per_tok": 2}
    whole, half = (
        ModelSize.of_shapes({"h.0.experts.up": (count, 6, 4), "h.0.q": (count, 4)}, config)
        for count in (8, 4)
    )
    assert (whole.expert_width, half.expert_width) == (20, 20)
    divided = whole.divided(2)
    assert (divided.width, divided.expert_width) == (6, 20)


def test_each_tensor_is_rounded_after_its_division_among_shards():
    size = ModelSize.of_shapes({"a": (4, 64), "b": (3,)}, {})
    assert [size.pinned(shards) for shards in (1, 2, 3)] == [256 + 4, 128 + 2, 128 + 1]


def test_eager_attention_keeps_the_scores_of_all_pairs_of_a_sequence():
    def activations(tokens: int, *, checkpointed: bool = False, ranks: int = 1, **config) -> int:
        sizes = {"num_attention_heads": 4, "max_position_embeddings": 100, "hidden_size": 10}
        model = ModelSize.of_shapes(SHAPES, {**sizes, **config})
        memory = memory_of(ranks=ranks, layout=Layout(tensor_parallel=ranks))
        memory = replace(memory, model=model)
        return memory.parts(tokens, checkpointed=checkpointed, copied=False)["activations"]

    def more(tokens: int, **given) -> int:
        eager = activations(tokens, model_type="gpt_oss", **given)
        return eager - activations(tokens, **given)

    layer = 2 * 4 * 4  # two numbers of four bytes, for each of four heads
    assert more(50) == 3 * layer * 50 * 50
    assert more(200) == 3 * layer * 200 * 100, "of several sequences"
    assert more(50, checkpointed=True) == layer * 50 * 50, "one block is computed again"
    assert more(50, ranks=2) == 3 * layer * 50 * 50 // 2
    assert activations(50, attn_logit_softcapping=2.0) == activations(50, model_type="gpt_oss")


def test_a_rank_alone_holds_all_states_and_a_snapshot_copies_them():
    assert lasting() == {"weights": 3200, "gradients": 3200, "moments": 6400, "snapshot": 9600}


def test_each_thread_adds_up_gradients_of_its_own():
    assert lasting(at_once=2)["gradients"] == 3 * 3200


def test_ranks_share_the_states_and_replicas_hold_them_again():
    shared = {"weights": 800, "gradients": 800, "moments": 1600, "snapshot": 2400}
    assert lasting(ranks=4) == shared
    replicas = lasting(ranks=4, layout=Layout(replicas=2))
    assert replicas == {name: 2 * size for name, size in shared.items()} | {
        "unreduced gradients": 1600
    }


def test_several_ranks_hold_the_gradients_of_the_whole_model_if_these_may_wait():
    roomy, tight = ({"unreduced_gradients_bytes": limit} for limit in (3200, 3199))
    assert lasting(ranks=4, settings=roomy)["unreduced gradients"] == 3200
    for parts in (
        lasting(ranks=4, settings=tight),
        lasting(settings=roomy),
        lasting(ranks=4, settings=roomy, lora=LoraSpec()),
    ):
        assert "unreduced gradients" not in parts


def test_states_in_bfloat16_take_half():
    assert lasting(states="bfloat16")["moments"] == 3200


def test_adapters_lie_whole_on_every_rank_beside_frozen_weights():
    parts = lasting(ranks=4, lora=LoraSpec())
    assert parts == {
        "frozen weights": 800,
        "weights": 4 * 40,
        "gradients": 4 * 40,
        "moments": 8 * 40,
        "snapshot": 12 * 40,
    }


def test_a_gpu_has_snapshots_and_offloaded_states_on_its_host():
    ample = Available(device=GIB, host=GIB)
    for offload, on_host in {
        "none": {"snapshot": 4800},
        "moments": {"snapshot": 4800, "moments": 3200},
        # Torch pins powers of two.
        "weights": {"snapshot": 4800, "moments": 3200, "weights": 1600, "gradients": 4 * 448},
    }.items():
        plan = choose(memory_of(ranks=2, device="cuda", offload=offload), ample)
        assert plan.host == on_host
    adapters = memory_of(ranks=2, device="cuda", offload="weights", lora=LoraSpec())
    plan = choose(adapters, ample)
    assert plan.host == {"frozen weights": 800, "snapshot": 12 * 40}
    assert plan.device["weights"] == plan.device["gradients"] == 4 * 40
    assert choose(memory_of(offload="weights"), ample).host == {}


def test_two_groups_and_the_root_are_gathered_and_gradients_reduced_by_group():
    memory = memory_of(ranks=4)
    parts = memory.parts(1000, checkpointed=False, copied=False)
    assert parts["gathered"] == 4 * (500 + 2 * 100) + 12 * 100
    alone = memory_of().parts(1000, checkpointed=False, copied=False)
    assert "gathered" not in alone
    frozen = memory_of(ranks=4, lora=LoraSpec()).parts(1000, checkpointed=False, copied=False)
    assert frozen["gathered"] == 4 * (500 + 2 * 100)
    on_host = memory_of(ranks=2, device="cuda", offload="weights")
    parts = on_host.parts(1000, checkpointed=False, copied=False)
    assert parts["gathered"] == 2 * (500 + 2 * 100) + (4 + 2) * 500 // 2 + 6 * 100
    few = memory.parts(1, checkpointed=True, copied=False)
    passing = few["activations"] + few["logits"]
    assert few["gathered"] + passing == 4 * (500 + 2 * 100) + max(12 * 500, 12 * 100 + passing)


def test_logits_do_not_grow_beyond_their_chunk():
    settings = {"logits_bytes": 4 * 50 * 100}
    logits = [
        memory_of(settings=settings).parts(tokens, checkpointed=False, copied=False)["logits"]
        for tokens in (50, 100, 1000)
    ]
    assert logits[0] < logits[1] == logits[2]


@pytest.mark.parametrize(("dtype", "more"), [("float32", 1.5), ("bfloat16", 3)])
def test_chunks_of_compiled_logits_have_more_rows_in_the_same_memory(dtype, more):
    plain, compiled = (
        TrainerSettings(logits_bytes=4 * 50 * 100, dtype=dtype, compile=compile)
        for compile in ("off", "on")
    )
    rows, more_rows = (logits_rows(each, device="cpu", vocabulary=50) for each in (plain, compiled))
    assert (rows, more_rows) == (100, 100 * more)
    wanted, found = (
        memory_of(settings=each.model_dump(exclude_unset=True)).parts(
            1000, checkpointed=False, copied=False
        )["logits"]
        for each in (plain, compiled)
    )
    assert wanted == found


# --- The choice -----------------------------------------------------------------------------------

LARGE = ModelSize(
    parameters=10**9, adapter_width=0, blocks=(10**8,) * 8, width=8 * 10**5, hidden=10**4
)


def chosen(available: int, checkpointing: str = "auto", wanted: int = 2048) -> tuple[int, bool]:
    plan = choose(large(checkpointing, wanted), Available(device=available))
    return plan.micro_batch_tokens, plan.checkpointing


def large(checkpointing: str = "auto", wanted: int = 2048) -> TrainerMemory:
    settings = {"checkpointing": checkpointing, "micro_batch_tokens": wanted}
    return replace(memory_of(settings=settings), model=LARGE)


def need(tokens: int, *, checkpointed: bool) -> int:
    return sum(large().parts(tokens, checkpointed=checkpointed, copied=False).values())


def test_blocks_are_checkpointed_only_where_the_wanted_micro_batch_does_not_fit_otherwise():
    kept = need(2048, checkpointed=False)
    assert chosen(kept) == (2048, False)
    assert chosen(kept - 1) == (2048, True)


def test_a_micro_batch_is_halved_until_it_fits():
    assert chosen(need(2048, checkpointed=True) - 1) == (1024, True)
    assert chosen(need(256, checkpointed=True)) == (256, True)
    assert chosen(need(2048, checkpointed=False) - 1, "off") == (1024, False)
    assert chosen(need(2048, checkpointed=False), "on") == (2048, True)
    assert chosen(need(100, checkpointed=True), wanted=100) == (100, True)


def test_large_micro_batches_are_halved_before_blocks_are_checkpointed():
    """Down to 4,096 tokens: checkpointed blocks compute a third more."""
    whole, half, least = (need(size, checkpointed=False) for size in (16384, 8192, 4096))
    assert chosen(whole, wanted=16384) == (16384, False)
    assert chosen(whole - 1, wanted=16384) == (8192, False)
    assert chosen(half - 1, wanted=16384) == (4096, False)
    assert chosen(least - 1, wanted=16384) == (16384, True)
    assert chosen(least, "on", wanted=16384) == (16384, True)
    assert chosen(least - 1, "off", wanted=16384) == (2048, False)


def test_a_sequence_longer_than_a_micro_batch_is_checkpointed_where_it_does_not_fit_otherwise():
    parts = {"weights": GIB, "activations": 32 * GIB}
    plan = MemoryPlan(4096, False, parts, Available(device=49 * GIB))
    assert [plan.checkpoints(tokens) for tokens in (1, 4096, 6144, 6145)] == [False] * 3 + [True]


def test_copies_are_made_where_they_make_no_micro_batch_smaller():
    settings = {"dtype": "bfloat16", "micro_batch_tokens": 512}
    memory = replace(memory_of(settings=settings), model=LARGE)
    roomy, tight = (
        sum(memory.parts(512, checkpointed=False, copied=copied).values())
        for copied in (True, False)
    )
    assert tight < roomy
    assert choose(memory, Available(device=roomy)).copied
    plan = choose(memory, Available(device=roomy - 1))
    assert (plan.micro_batch_tokens, plan.checkpointing, plan.copied) == (512, False, False)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers_and_what_helps():
    memory = replace(large(), trained=10**9, moments=2 * 10**9)
    with pytest.raises(WorkerStartFailed) as caught:
        choose(memory, Available(device=7 * GIB))
    assert str(caught.value) == (
        "the model does not fit into memory: with 256 tokens at a time and checkpointed blocks, "
        "each rank needs 26.3 GiB of its host (snapshot 11.2, moments 7.45, weights 3.73, "
        "gradients 3.73, activations 0.21), and may use 7 GiB. What helps: more memory, or ranks "
        "on more hosts, LoRA, states in bfloat16 (tandem.states), bfloat16 (TANDEM_TRAINER_DTYPE)"
    )


def test_a_host_that_is_too_small_for_the_parts_of_a_gpu_is_refused():
    memory = replace(memory_of(device="cuda"), trained=10**9, moments=2 * 10**9)
    with pytest.raises(WorkerStartFailed, match=r"needs 11.2 GiB of its host \(snapshot 11.2\)"):
        choose(memory, Available(device=80 * GIB, host=8 * GIB))
