from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_service.backends.base import Export
from trainer_service.batches.micro_batches import plan_batch
from trainer_service.checkpoints.storage import FILE_BYTES
from trainer_service.checkpoints.version_files import assign_owners, name_files

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)
ranks = st.integers(1, 5)
limits = st.integers(1, 200)


@given(lengths, ranks, limits)
def test_every_datum_is_computed_once(lengths, ranks, limit):
    plan = plan_batch(lengths, ranks=ranks, micro_batch_tokens=limit)
    computed = [datum for share in plan for part in share for datum in part]
    assert sorted(computed) == list(range(len(lengths)))


@given(lengths, ranks, limits)
def test_all_ranks_have_as_many_micro_batches(lengths, ranks, limit):
    plan = plan_batch(lengths, ranks=ranks, micro_batch_tokens=limit)
    assert len(plan) == ranks
    assert len({len(share) for share in plan}) == 1


@given(lengths, ranks, limits)
def test_no_micro_batch_exceeds_the_limit_unless_it_is_one_datum(lengths, ranks, limit):
    for share in plan_batch(lengths, ranks=ranks, micro_batch_tokens=limit):
        for part in share:
            padded = len(part) * max((lengths[datum] for datum in part), default=0)
            assert padded <= limit or len(part) == 1


@given(lengths, ranks, limits)
def test_packed_micro_batches_are_filled_without_padding(lengths, ranks, limit):
    for share in plan_batch(lengths, ranks=ranks, micro_batch_tokens=limit, packed=True):
        tokens = [sum(lengths[datum] for datum in part) for part in share]
        for part, held, following in zip(share, tokens, [*share[1:], ()], strict=True):
            assert held <= limit or len(part) == 1
            if following:
                assert held + lengths[following[0]] > limit


@given(lengths, ranks)
def test_loads_differ_by_one_datum_at_most(lengths, ranks):
    plan = plan_batch(lengths, ranks=ranks, micro_batch_tokens=10**6)
    loads = [sum(lengths[datum] for part in share for datum in part) for share in plan]
    assert max(loads) - min(loads) <= max(lengths)


@given(lengths, ranks, limits, st.integers(1, 3), st.booleans())
def test_groups_stay_together_and_in_order(lengths, ranks, limit, group, packed):
    lengths = lengths * group
    plan = plan_batch(lengths, ranks=ranks, micro_batch_tokens=limit, group=group, packed=packed)
    parts = [part for share in plan for part in share]
    assert sorted(datum for part in parts for datum in part) == list(range(len(lengths)))
    for part in parts:
        for start in range(0, len(part), group):
            first = part[start]
            assert first % group == 0
            assert part[start : start + group] == tuple(range(first, first + group))


def test_a_rank_without_datums_gets_empty_micro_batches():
    assert plan_batch([5], ranks=2, micro_batch_tokens=8) == (((0,),), ((),))


def test_equal_datums_are_split_evenly():
    first, second = plan_batch([8] * 100, ranks=2, micro_batch_tokens=10**6)
    assert len(first[0]) == len(second[0]) == 50


@given(st.dictionaries(st.text(min_size=1), st.integers(1, 10**6), min_size=1), ranks)
def test_owners_are_balanced_by_size(sizes, ranks):
    exports = [Export(name, (size,), torch.uint8, unit=name) for name, size in sizes.items()]
    owners = assign_owners(exports, ranks=ranks)
    assert owners.keys() == sizes.keys()
    loads = [0] * ranks
    for name, owner in owners.items():
        loads[owner] += sizes[name]
    assert max(loads) - min(loads) <= max(sizes.values())


@given(st.lists(st.integers(1, 2 * FILE_BYTES), min_size=1), ranks)
def test_files_of_a_version_are_bounded_numbered_and_written_by_the_owners(sizes, ranks):
    exports = [Export(f"{n}", (size,), torch.uint8, unit=f"{n}") for n, size in enumerate(sizes)]
    owners = assign_owners(exports, ranks=ranks)
    by_rank = name_files(exports, owners, ranks=ranks)
    assert len(by_rank) == ranks
    names = [name for files in by_rank for name in files]
    count = len(names)
    assert names == (
        ["model.safetensors"]
        if count == 1
        else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    )
    for rank, files in enumerate(by_rank):
        mine = [export for tensors in files.values() for export in tensors]
        assert mine == [export for export in exports if owners[export.unit] == rank]
        for tensors in files.values():
            assert len(tensors) == 1 or sum(each.bytes for each in tensors) <= FILE_BYTES


@given(st.lists(st.integers(1, 2**30), min_size=1), st.integers(1, 8))
def test_each_writer_of_a_rank_gets_a_file_of_a_large_version(sizes, writers):
    exports = [Export(f"{n}", (size,), torch.uint8, unit=f"{n}") for n, size in enumerate(sizes)]
    owners = assign_owners(exports, ranks=1)
    (files,) = name_files(exports, owners, ranks=1, writers=writers)
    if sum(sizes) + max(sizes) <= FILE_BYTES:
        assert len(files) <= writers
