from __future__ import annotations

import pytest
import torch

from tandem.protocol.worker import TrainingSpec
from tests.support.devices import operations_on_gpu
from tests.support.local_trainer import batch_of, gradients
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import datum, request
from trainer_service.losses.base import _sums
from trainer_service.models.packing import bounds_of, packed_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LENGTHS = [2048] * 4
TIMES = 5


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["all", "grouped"])
def test_gradients_of_attention_are_the_same_each_time(heads, window) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    row = [
        torch.randn(1, count, sum(LENGTHS), 64, generator=generator, device="cuda").bfloat16()
        for count in (heads[0], heads[1], heads[1])
    ]
    bounds = torch.from_numpy(bounds_of(LENGTHS)).cuda()

    def of_row() -> tuple[torch.Tensor, ...]:
        parts = [each.clone().requires_grad_() for each in row]
        attended, _ = packed_attention(
            None, *parts, None, sliding_window=window, bounds=bounds, longest=max(LENGTHS)
        )
        return torch.autograd.grad(attended.float().square().sum(), parts)

    first = of_row()
    for _ in range(TIMES):
        assert all(map(torch.equal, of_row(), first))
    assert not torch.are_deterministic_algorithms_enabled()


def test_sums_by_datum_and_gradients_of_embeddings_are_the_same_each_time() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randint(0, 50, (sum(LENGTHS),), generator=generator, device="cuda")
    values = torch.randn(len(tokens), 64, generator=generator, device="cuda")
    table = torch.zeros(VOCABULARY, 64, device="cuda", requires_grad=True)

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        embedded = torch.nn.functional.embedding(tokens, table)
        (of_table,) = torch.autograd.grad(embedded, table, values)
        return _sums(values[:, 0], tokens, 50), of_table

    first = results()
    for _ in range(TIMES):
        assert all(map(torch.equal, results(), first))


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_the_gradients_of_a_batch_are_the_same_each_time(tmp_path, compiled) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [
        datum(
            torch.randint(3, VOCABULARY, (length,), generator=generator).tolist(),
            weights=[1.0] * length,
        )
        for length in LENGTHS
    ]
    with operations_on_gpu(
        tmp_path,
        dtype="bfloat16",
        training=TrainingSpec(),
        max_length=max(LENGTHS),
        compile=compiled,
        packing="on",
    ) as operations:
        trainer = operations.trainer
        assert trainer.backend.packs
        batch = batch_of(trainer, request(data))

        def of_batch() -> dict[str, torch.Tensor]:
            trainer.forward_backward(batch)
            found = gradients(trainer)
            trainer.drop_gradients()
            return found

        first = of_batch()
        for _ in range(TIMES):
            again = of_batch()
            assert [name for name in first if not torch.equal(first[name], again[name])] == []
