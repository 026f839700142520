"""Two ranks that divide the matrices of a model compute what one does, for each kind of model."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tandem.errors import WorkerStartFailed
from tandem.settings import TrainerSettings
from tandem.worker import Layout, TrainingSpec
from tests.support.architectures import write_model
from tests.support.tiny_model import VOCABULARY
from trainer_service.backends import World
from trainer_service.backends.fsdp2 import Fsdp2Backend
from trainer_service.batches.micro_batches import MicroBatch
from trainer_service.models.huggingface import small_model
from trainer_service.models.tensor_parallel import compare_divided
from trainer_service.optimizers import AdamWSettings

ARCHITECTURES = (
    "llama",
    "qwen2",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "cohere",
    "granite",
)
PATIENCE = timedelta(seconds=120)
SETTINGS = TrainerSettings(device="cpu", threads=1)
STEP = AdamWSettings(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-2, weight_decay=0.1, grad_clip_norm=1.0
)
Found = tuple[list[torch.Tensor], list[float], dict[str, torch.Tensor]]


def train(path: Path, world: World, training: TrainingSpec) -> Found:
    """Two steps. Returns log probabilities, norms and the weights as they are exported."""
    backend = Fsdp2Backend(model_path=path, settings=SETTINGS, world=world, training=training)
    numbers = np.random.default_rng(0)
    found, norms = [], []
    for _ in range(2):
        tokens = numbers.integers(0, VOCABULARY, (3, 20))
        micro_batch = MicroBatch(
            tokens=tokens[:, :-1],
            targets=tokens[:, 1:, None],
            select=None,
            entries=np.arange(3 * 19),
            inputs={},
        )
        logprobs = backend.logprobs(micro_batch, gradients=True)
        backend.backward(-logprobs.sum())
        found.append(logprobs.detach())
        norms.append(backend.optimizer.step(STEP)["grad_norm"])
    units = {export.unit for export in backend.exports()}
    return found, norms, {name: each.clone() for name, each in backend.export_weights(units)}


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    store.set_timeout(PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    try:
        together = TrainingSpec(layout=Layout(tensor_parallel=2))
        world = World(rank=rank, size=2, device="cpu")
        found = {name: train(Path(folder) / name, world, together) for name in ARCHITECTURES}
        # A plan that forgets what computes with some of the heads.
        wrong = small_model(Path(folder) / "gemma3_text", times=2)
        wrong.tp_plan = {n: s for n, s in wrong.tp_plan.items() if not n.endswith("_norm")}
        with pytest.raises(WorkerStartFailed, match=r"the gradient of .*_norm.weight would differ"):
            compare_divided(wrong, init_device_mesh("cpu", (2,)))
        if rank == 0:
            torch.save(found, f"{folder}/found.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("divided")
    for name in ARCHITECTURES:
        write_model(folder / name, name)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, str(folder))) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(PATIENCE.total_seconds())
        assert each.exitcode == 0
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_that_divide_matrices_compute_what_one_does(folder, architecture) -> None:
    both: Found = torch.load(folder / "found.pt")[architecture]
    alone = train(folder / architecture, World(0, 1, "cpu"), TrainingSpec())
    for one, other in zip(alone[0], both[0], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    assert both[1] == pytest.approx(alone[1], rel=1e-5)
    assert both[2].keys() == alone[2].keys()
    for name, weight in alone[2].items():
        torch.testing.assert_close(both[2][name], weight, rtol=1e-5, atol=1e-5)
