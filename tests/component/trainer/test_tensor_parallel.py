"""Two ranks that divide a model's matrices agree with one rank.

The cases are all kinds of models and of runs, both optimizers, and compiled blocks, without machine
code (see `make nightly`). CI runs a few of them."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from tandem.errors import WorkerStartFailed
from tandem.protocol.worker import Layout, LoraSpec, TrainingSpec
from tandem.settings.workers import TrainerSettings
from tests.support.architectures import write_model
from tests.support.ranks import end_together
from tests.support.tiny_model import VOCABULARY
from trainer_service.backends import TrainerBackend, World
from trainer_service.backends.fsdp2 import Fsdp2Backend
from trainer_service.batches.micro_batches import MicroBatch
from trainer_service.models.huggingface import small_model
from trainer_service.models.packing import bounds_of
from trainer_service.models.tensor_parallel import compare_divided
from trainer_service.optimizers import AdamWSettings, DiMuonSettings, dimuon

pytestmark = pytest.mark.slow

ARCHITECTURES = (
    "llama",
    "qwen2",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "cohere",
    "granite",
    "phi3",
    "olmo2",
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "glm4_moe",
    "deepseek_v3",
)
ROWS_OF_HEADS = "cohere, normed heads"
DENSE = "deepseek_v3, dense"
"""No experts, and latent attention, which is whole on each rank."""
PATIENCE = timedelta(seconds=300)
SETTINGS = TrainerSettings(device="cpu", threads=1)
STEP = AdamWSettings(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-2, weight_decay=0.1, grad_clip_norm=1.0
)
STEPS = {
    "adamw": STEP,
    "dimuon": DiMuonSettings(learning_rate=1e-2, beta1=0.9, grad_clip_norm=1.0),
}
TOGETHER = Layout(tensor_parallel=2)
RUNS: dict[str, list[TrainingSpec]] = {
    "all parameters": [TrainingSpec()],
    "adapters": [
        TrainingSpec(lora=LoraSpec(rank=4, seed=5)),
        TrainingSpec(lora=LoraSpec(rank=3, seed=6, alpha=8, attention=False)),
    ],
    "states in bfloat16": [TrainingSpec(states="bfloat16", offload="moments")],
    "weights on the host": [TrainingSpec(offload="weights")],
    "adapters, weights on the host": [
        TrainingSpec(lora=LoraSpec(rank=4, seed=5), offload="weights")
    ],
    "compiled blocks": [TrainingSpec()],
    "dimuon": [TrainingSpec(optimizer="dimuon")],
    "adapters by dimuon": [TrainingSpec(optimizer="dimuon", lora=LoraSpec(rank=4, seed=5))],
}
CASES = [
    *((name, "all parameters") for name in (*ARCHITECTURES, DENSE)),
    *((name, "adapters") for name in ("llama", "gemma3_text", "gpt_neox", "phi3", DENSE)),
    ("gemma2", "states in bfloat16"),
    ("qwen3_moe", "states in bfloat16"),
    ("llama", "weights on the host"),
    ("llama", "adapters, weights on the host"),
    ("llama", "compiled blocks"),
    *((name, "dimuon") for name in ("llama", "gpt_neox", "phi3", "qwen3_moe")),
    ("llama", "adapters by dimuon"),
]
FEW = {
    *((name, "all parameters") for name in ("llama", "gemma3_text", "phi3", "qwen3_moe", DENSE)),
    *(("llama", kind) for kind in ("adapters", "compiled blocks", "dimuon")),
}
Found = tuple[list[torch.Tensor], list[float], dict[str, torch.Tensor]]


def runs_of(kind: str, layout: Layout) -> list[TrainingSpec]:
    return [each.model_copy(update={"layout": layout}) for each in RUNS[kind]]


def train(path: Path, world: World, *runs: TrainingSpec) -> list[Found]:
    """Two steps of each run. Returns log probabilities, norms, and exported weights."""
    first = Fsdp2Backend(model_path=path, settings=SETTINGS, world=world, training=runs[0])
    backends = [first, *(first.share(other) for other in runs[1:])]
    return [steps(backend) for backend in backends]


def train_compiled(path: Path, world: World, *runs: TrainingSpec) -> list[Found]:
    """Like `train`. Blocks share one graph with gradients, and one without. The head has two."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    settings = SETTINGS.model_copy(update={"compile": "on", "checkpointing": "on"})
    backend = Fsdp2Backend(model_path=path, settings=settings, world=world, training=runs[0])
    backend.activate()
    backend.warm_up()
    assert counters["stats"]["unique_graphs"] == 4, counters["stats"]
    with torch.compiler.set_stance("fail_on_recompile"):
        return [steps(backend)]


def steps(backend: TrainerBackend) -> Found:
    backend.activate()
    numbers = np.random.default_rng(0)
    found, norms = [], []
    for _ in range(2):
        tokens = numbers.integers(0, VOCABULARY, (3, 20))
        shape = (1, 3 * 19) if backend.packs else (3, 19)
        micro_batch = MicroBatch(
            tokens=tokens[:, :-1].reshape(shape),
            targets=tokens[:, 1:].reshape(*shape, 1),
            select=None,
            entries=np.arange(3 * 19),
            inputs={},
            positions=np.tile(np.arange(19), 3)[None] if backend.packs else None,
            bounds=bounds_of([19] * 3) if backend.packs else None,
        )
        logprobs = backend.logprobs(micro_batch, gradients=True)
        backend.backward(-logprobs.sum())
        backend.sum_gradients()
        found.append(logprobs.detach())
        with dimuon_that_keeps_last_bits_small():
            norms.append(backend.optimizer.step(STEPS[backend.training.optimizer])["grad_norm"])
    if backend.training.lora:
        return found, norms, backend.export_adapter()
    units = {export.unit for export in backend.exports()}
    return found, norms, {name: each.clone() for name, each in backend.export_weights(units)}


@contextmanager
def dimuon_that_keeps_last_bits_small() -> Iterator[None]:
    """Newton-Schulz in float32, and AdamW with the other tests' eps.

    Two ranks' sums differ from one rank's in last bits. Torch's iterations in bfloat16 amplify them
    to 1e-3. AdamW with an eps of 1e-12 makes a whole step of a gradient that is otherwise zero,
    such as that of GPT-NeoX's biases of keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", orthogonalize)
        patch.setattr(dimuon, "ADAMW_EPS", STEP.eps)
        yield


def orthogonalize(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Like torch's, but in the matrix's type."""
    a, b, c = coefficients
    found = matrix / matrix.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found


def run_rank(rank: int, folder: str, cases: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    store.set_timeout(PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    try:
        world = World(rank=rank, size=2, device="cpu")
        found = {}
        for name, kind in cases:
            trained = train_compiled if kind == "compiled blocks" else train
            found[name, kind] = trained(Path(folder) / name, world, *runs_of(kind, TOGETHER))
        # A plan without modules that compute some of the heads.
        wrong = small_model(Path(folder) / "gemma3_text", times=2)
        wrong.tp_plan = {n: s for n, s in wrong.tp_plan.items() if not n.endswith("_norm")}
        with pytest.raises(WorkerStartFailed, match=r"the gradient of .*_norm.weight would differ"):
            compare_divided(wrong, init_device_mesh("cpu", (2,)))
        # A plan without norms that have a row for each head.
        rows = small_model(Path(folder) / ROWS_OF_HEADS, times=2)
        with pytest.raises(WorkerStartFailed, match="CohereForCausalLM cannot be divided among 2"):
            compare_divided(rows, init_device_mesh("cpu", (2,)))
        if rank == 0:
            torch.save(found, f"{folder}/found.pt")
        end_together(store, rank=rank, size=2)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    """Return a folder with the results of two ranks, for the cases that this session runs."""
    params = [each.callspec.params for each in request.session.items if each.path == request.path]
    cases = [(each["architecture"], each["kind"]) for each in params]
    folder: Path = tmp_path_factory.mktemp("divided")
    for name in ARCHITECTURES:
        write_model(folder / name, name)
    write_model(folder / DENSE, "deepseek_v3", first_k_dense_replace=2)
    write_model(folder / ROWS_OF_HEADS, "cohere", use_qk_norm=True)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, str(folder), cases)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(PATIENCE.total_seconds())
        assert each.exitcode == 0
    return folder


@pytest.fixture
def group_of_one(folder) -> Iterator[None]:
    """FSDP needs a group to cast bfloat16 states."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.nightly) for case in CASES],
)
def test_two_ranks_that_divide_matrices_compute_what_one_does(folder, architecture, kind) -> None:
    found: list[Found] = torch.load(folder / "found.pt")[architecture, kind]
    expected = train(folder / architecture, World(0, 1, "cpu"), *runs_of(kind, Layout()))
    # The last bit of a float32 gradient can round a weight up or down.
    close = 2**-7 if "bfloat16" in kind else 1e-5
    for both, alone in zip(found, expected, strict=True):
        for one, other in zip(alone[0], both[0], strict=True):
            torch.testing.assert_close(other, one, rtol=close, atol=close)
        assert both[1] == pytest.approx(alone[1], rel=close)
        assert both[2].keys() == alone[2].keys()
        for name, weight in alone[2].items():
            torch.testing.assert_close(both[2][name], weight, rtol=close, atol=1e-5)
        if "bfloat16" in kind:
            differ = [(both[2][name] != weight).flatten() for name, weight in alone[2].items()]
            assert torch.cat(differ).float().mean() < 0.01
