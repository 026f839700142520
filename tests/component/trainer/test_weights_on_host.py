"""Runs that keep weights, gradients and moments on a GPU's host.

No GPU is needed. Tensors have types, shapes and devices, but no values, and a name replaces the
GPU. Mixed devices would raise."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fsdp_state
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.tiny_model import write_tiny_model
from trainer_service.backends.sharding import ShardGroups
from trainer_service.models.huggingface import find_blocks, load_model
from trainer_service.optimizers import AdamWSettings, local, staged

STEP = AdamWSettings(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.0
)
Place = tuple[str, torch.dtype]


class Block(nn.Module):
    """Records its weight's device and type at each computation."""

    def __init__(self, seen: list[Place], states: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=states)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(place_of(self.linear.weight))
        out: torch.Tensor = self.linear(x).relu()
        return out


def place_of(tensor: torch.Tensor) -> Place:
    return tensor.device.type, tensor.dtype


def ranks_on_a_gpu(*, rank: int) -> DeviceMesh:
    """One of two ranks without a peer. The device is only a name."""
    _setup_privateuseone_for_python_backend("gpu")
    for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
        module._get_device_handle = lambda kind: torch.cpu  # streams that do nothing
    torch.Tensor.is_pinned = lambda self: True  # type: ignore[method-assign]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    return init_device_mesh("gpu", (2,), mesh_dim_names=("shards",))


def sent_by(target: Callable[..., None], argument: object) -> Any:
    """The result of a separate process, because it cannot give up the device's name."""
    context = multiprocessing.get_context("spawn")
    sent = context.Queue()
    rank = context.Process(target=target, args=(argument, sent))
    rank.start()
    try:
        rank.join(timeout=120)
        assert rank.exitcode == 0
        return sent.get(timeout=10)
    finally:
        rank.kill()


def train_beside_a_gpu(states: torch.dtype, sent: Any) -> None:
    """Two micro-batches and a step. Sends the places of weights during computation, of weights,
    gradients and moments afterwards, and of stepped pieces."""
    mesh = ranks_on_a_gpu(rank=0)
    seen: list[Place] = []
    stepped: list[Place] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("meta"):
            model = nn.Sequential(
                Block(seen, states), Block(seen, states), nn.Linear(16, 4, dtype=states)
            )
        groups = ShardGroups(model, [[model[0]], [model[1]]])
        groups.shard(mesh, dtype=torch.bfloat16, on_host=True)
        model.to_empty(device="cpu")
        for _ in range(2):
            model(torch.empty(3, 16, device="gpu", dtype=torch.bfloat16)).sum().backward()

        def note(*states: list[torch.Tensor], **settings: object) -> None:
            """Replaces a kernel of real devices."""
            stepped.extend(place_of(each) for kind in states[:4] for each in kind)

        staged.adamw = note
        staged.pin = lambda tensor: None
        staged._positions = lambda parameter, first: staged.Positions(first)  # it needs values
        moments = staged.StagedMoments(
            dict(model.named_parameters()), device="gpu", on_host=True, piece=100
        )
        with torch.no_grad():
            moments._create()
            for piece in staged._pieces(list(moments._kept.values()), 100):
                staged._step(piece, STEP, device=moments._device, number=0)
        kept = [place_of(local(each)) for each in model.parameters()]
        kept += [place_of(local(each.grad)) for each in model.parameters()]
        for each in moments._kept.values():
            kept += [place_of(each.exp_avg), place_of(each.exp_avg_sq)]
    sent.put((set(seen), set(kept), set(stepped)))


def load_beside_a_gpu(model: Path, sent: Any) -> None:
    """Loads the second rank's part of a model with odd numbers of rows. Sends its parts' devices,
    and the parts that are not pinned before FSDP moves them."""
    mesh = ranks_on_a_gpu(rank=1)
    made: list[ShardGroups] = []
    empty = torch.empty

    def elsewhere(*shape: int, device: Any = None, **named: Any) -> torch.Tensor:
        """Moves a buffer of FSDP's from its device."""
        on_gpu = getattr(device, "type", "") == "gpu"
        return empty(*shape, device="cpu" if on_gpu else device, **named)

    def prepare(model: nn.Module) -> None:
        made.append(ShardGroups(model, [[block] for block in find_blocks(model)]))
        torch.empty = elsewhere
        made[0].shard(mesh, dtype=torch.bfloat16, on_host=True)
        torch.empty = empty

    loaded = load_model(model, prepare=prepare, on_host=True)
    parts = {name: local(each.detach()) for name, each in loaded.named_parameters()}
    held = {each.data_ptr() for each in made[0].even_parts()}
    odd = {name for name, each in parts.items() if each.data_ptr() not in held}
    sent.put(({each.device.type for each in parts.values()}, odd))


def test_what_is_loaded_stays_on_the_host_and_what_fsdp_moves_is_not_pinned(tmp_path) -> None:
    model = write_tiny_model(tmp_path / "odd", architecture="llama", intermediate=63)
    devices, odd = sent_by(load_beside_a_gpu, model)
    assert devices == {"cpu"}
    assert {name.rpartition("mlp.")[2] for name in odd} == {"gate_proj.weight", "up_proj.weight"}


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_computes_and_steps_what_the_host_keeps(states) -> None:
    computed, kept, stepped = sent_by(train_beside_a_gpu, states)
    assert computed == {("gpu", torch.bfloat16)}
    assert kept == {("cpu", states)}
    assert stepped == {("gpu", torch.float32)}
