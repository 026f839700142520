"""Joins processes into one torch process group: rank 0 by `bring_up`, the others by `join`."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from tandem.backends.memory import compiles
from tandem.errors import WorkerStartFailed, describe
from tandem.protocol.devices import Device, parse_device
from tandem.protocol.worker import LOOPBACK, TrainingSpec, WorkerSpec
from tandem.settings.workers import TrainerSettings
from tandem.telemetry import configure_logging
from tandem.weights.layout import BaseModelFiles
from trainer_service.backends.base import (
    Capability,
    TrainerBackend,
    World,
    backend_named,
)
from trainer_service.backends.planning import at_once
from trainer_service.compute.control_group import ControlGroup
from trainer_service.compute.device_memory import map_large_tensors
from trainer_service.compute.parallel import ParallelMicroBatches
from trainer_service.compute.topology import Topology, listen_on_all_addresses
from trainer_service.compute.trainer import RankTrainer
from trainer_service.lora.adapters import chosen_layers
from trainer_service.models.compiled_blocks import check_compiler
from trainer_service.models.huggingface import empty_model
from trainer_service.models.tensor_parallel import check_divisible

START_TIMEOUT = timedelta(minutes=10)
"""For ranks to meet and load the model. A launcher gives up sooner."""
_CONNECT_TIMEOUT = timedelta(minutes=1)
"""For another rank to reach the store."""
_ANSWER_SECONDS = 5.0
"""For the store to answer a connected rank."""
_COMPILED_SHARE_TOKENS = 256
"""Minimum tokens of a compiled run's share. Smaller shares were not measured in a whole step."""
_SNAPSHOT_TIMEOUT = timedelta(minutes=30)
"""For the slowest rank's thread to join a snapshot."""


class Assignment(BaseModel):
    """Rank 0's message to another rank: its number, the meeting place, and the training.

    `local_rank` is the index of this rank's GPU among the visible ones. `on_node` is the number of
    ranks on its node. `own_cores`: the rank does not share its cores with the node's other ranks.
    Rank 0 serves torch's store at `store_host` and `store_port`."""

    model_config = ConfigDict(frozen=True)

    rank: int
    local_rank: int
    on_node: int
    size: int
    device: Literal["cpu", "cuda"]
    own_cores: bool
    store_host: str = LOOPBACK
    store_port: int
    interface: str = "lo"
    model_path: Path
    model_name: str
    training: TrainingSpec
    settings: TrainerSettings
    log_level: str = "info"


class OtherRanks(Protocol):
    def meet(self) -> Sequence[str]:
        """Wait for all nodes. Return each node's network interface. Raises `WorkerStartFailed`."""
        ...

    def assign(self, rank: int, line: str) -> None:
        """Send a rank its `Assignment`, a line of JSON."""
        ...


def bring_up(
    spec: WorkerSpec, *, settings: TrainerSettings, topology: Topology, others: OtherRanks
) -> RankTrainer:
    """Serve the store where ranks meet, send each rank its assignment and join as rank 0.

    Raises `UnsuitableLora`, `UnsupportedByBackend`, or `WorkerStartFailed`, before the model is
    loaded."""
    size, on_node = topology.ranks, topology.on_each
    given = parse_device(spec.devices[0]) if spec.devices else None
    device = kind_of_device(settings, given, gpus=_visible_gpus(), ranks=on_node)
    training = spec.training or TrainingSpec()
    check_capabilities(spec, settings.backend)
    try:
        training.layout.shards(size)
    except ValueError as error:
        raise WorkerStartFailed(describe(error)) from error
    if compiles(settings.compile, device):
        check_compiler(device)
    # Check here once. Otherwise every rank would fail, and the first death would be reported
    # instead.
    if training.lora:
        chosen_layers(empty_model(Path(spec.model_path)), training.lora)
    if (count := training.layout.tensor_parallel) > 1:
        check_divisible(empty_model(Path(spec.model_path)), count)
    store, store_port, interfaces = dist.HashStore(), 0, ["lo"]
    if size > 1:
        store, store_port = serve_store(ranks=size, nodes=topology.nodes)
        interfaces = list(others.meet())
    assignments = [
        Assignment(
            rank=rank,
            local_rank=rank % on_node if given is None else 0,
            on_node=on_node,
            size=size,
            device=device,
            own_cores=given is not None and given.kind == "cpu",
            store_host=topology.host if node else LOOPBACK,
            store_port=store_port,
            interface=interface,
            model_path=Path(spec.model_path),
            model_name=spec.model_name,
            training=training,
            settings=settings,
            log_level=spec.log_level,
        )
        for node, interface in enumerate(interfaces)
        for rank in topology.ranks_of(node)
    ]
    for assignment in assignments[1:]:
        others.assign(assignment.rank, assignment.model_dump_json())
    return join(assignments[0], store)


def serve_store(*, ranks: int, nodes: int) -> tuple[dist.Store, int]:
    """Serve the store where ranks meet. Return it with its port.

    torch gets the open socket, so nobody can take the port in between. One node uses only loopback.
    """
    listener = listen_on_all_addresses(0) if nodes > 1 else socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK,
        port,
        world_size=ranks,
        is_master=True,
        timeout=START_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def reach_store(
    host: str, port: int, *, rank: int, timeout: timedelta = _CONNECT_TIMEOUT
) -> dist.Store:
    """Raises `WorkerStartFailed`.

    torch waits without a deadline for a store that accepts and does not answer, as a proxy between
    nodes may do."""
    reached: Future[dist.Store] = Future()

    def reach() -> None:
        try:
            reached.set_result(dist.TCPStore(host, port, is_master=False, timeout=timeout))
        except Exception as error:  # noqa: BLE001 - raised by the waiting thread
            reached.set_exception(error)

    threading.Thread(target=reach, name="store", daemon=True).start()
    try:
        store = reached.result(timeout.total_seconds() + _ANSWER_SECONDS)
    except (dist.DistError, TimeoutError) as error:
        raise WorkerStartFailed(
            f"rank {rank} did not reach rank 0's store at {host}:{port} within "
            f"{timeout.total_seconds():g} s: the nodes of a trainer must reach each other at all "
            "ports, so look at firewalls and network policies between them"
        ) from error
    store.set_timeout(START_TIMEOUT)
    return store


def check_capabilities(spec: WorkerSpec, name: str) -> None:
    """Raises `UnsupportedByBackend` for a missing capability, and `WorkerStartFailed` if the
    trainer shares devices and neither backend nor host can make it sleep."""
    backend, training = backend_named(name), spec.training or TrainingSpec()
    if training.lora and Capability.ADAPTERS not in backend.capabilities:
        raise backend.cannot(Capability.ADAPTERS)
    layout = training.layout
    special = layout.replicas > 1 or layout.tensor_parallel > 1 or training.weights_on_host
    if special and Capability.LAYOUTS not in backend.capabilities:
        raise backend.cannot(Capability.LAYOUTS)
    if spec.lease and spec.no_suspender and Capability.SLEEP not in backend.capabilities:
        raise WorkerStartFailed(
            f"the trainer backend {name!r} cannot sleep, and this host cannot suspend it "
            f"({spec.no_suspender}), so it cannot take turns with others on its devices. Give it a "
            "group with `awake` 0"
        )


def join(assignment: Assignment, store: dist.Store | None = None) -> RankTrainer:
    """Meet the other ranks and load the model. Rank 0 passes the store that it serves."""
    settings, rank, size = assignment.settings, assignment.rank, assignment.size
    if rank:
        configure_logging(service="trainer", level=assignment.log_level)
    device = assignment.device
    if device == "cuda":
        _take_gpu(assignment)
    else:
        map_large_tensors()
    threads = threads_of(assignment)
    torch.set_num_threads(threads)
    timeout = timedelta(seconds=settings.collective_timeout)
    group = snapshot_group = None
    if size > 1:  # a single rank gets a group only if FSDP holds its weights (`RankMesh`)
        # On one machine the ranks' traffic stays on its loopback interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", assignment.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", assignment.interface)
        if store is None:
            store = reach_store(assignment.store_host, assignment.store_port, rank=rank)
        _wait_for_all(store, "arrived", rank=rank, size=size)
        collectives = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(
            collectives, store=store, rank=rank, world_size=size, timeout=timeout
        )
        group = dist.new_group(backend="gloo", timeout=timeout)
        snapshot_group = dist.new_group(backend="gloo", timeout=_SNAPSHOT_TIMEOUT)
    backend = backend_named(settings.backend)(
        model_path=assignment.model_path,
        settings=settings,
        world=World(rank=rank, size=size, device=device, on_node=assignment.on_node),
        training=assignment.training,
    )
    if size > 1 and store is not None:
        _wait_for_all(store, "loaded", rank=rank, size=size)
    plan = backend.plan
    trainer = RankTrainer(
        backend=backend,
        control=ControlGroup(rank=rank, size=size, group=group, timeout=timeout, store=store),
        micro_batch_tokens=plan.micro_batch_tokens if plan else settings.micro_batch_tokens,
        base=BaseModelFiles.of_run(
            assignment.model_path, assignment.training, name=assignment.model_name
        ),
        parallel=_parallel(backend, settings, threads),
        snapshot_group=snapshot_group,
    )
    trainer.warm_up()
    return trainer


def _parallel(
    backend: TrainerBackend, settings: TrainerSettings, threads: int
) -> ParallelMicroBatches | None:
    count = at_once(backend, settings, threads=threads)
    if count < 2:
        return None
    least = _COMPILED_SHARE_TOKENS if compiles(settings.compile, backend.device) else 1
    return ParallelMicroBatches(count=count, threads=threads // count, least_tokens=least)


def _wait_for_all(store: dist.Store, stage: str, *, rank: int, size: int) -> None:
    """Wait until all ranks have reached a stage, which may exceed a collective's timeout."""
    store.set(f"tandem/{stage}/{rank}", "1")
    store.wait([f"tandem/{stage}/{other}" for other in range(size)], START_TIMEOUT)


def threads_of(assignment: Assignment) -> int:
    sharing = 1 if assignment.own_cores else assignment.on_node
    return assignment.settings.threads or max(1, len(os.sched_getaffinity(0)) // sharing)


def kind_of_device(
    settings: TrainerSettings, given: Device | None, *, gpus: int, ranks: int
) -> Literal["cpu", "cuda"]:
    """The kind of the `given` device, or else of the settings. Raises `WorkerStartFailed`.

    "auto" is the CPU only if there is no GPU. Each of a node's `ranks` needs one of its `gpus`."""
    if given is not None:
        if given.kind == "cuda" and not gpus:
            raise WorkerStartFailed(
                f"rank 0 was given {given}, which torch does not find; `nvidia-smi -L` lists the "
                "GPUs of this machine"
            )
        return given.kind
    if settings.device == "cpu" or (settings.device == "auto" and not gpus):
        return "cpu"
    if gpus < ranks:
        fewer = f"TANDEM_TRAINER_RANKS to {gpus} at most, or " if gpus else ""
        raise WorkerStartFailed(
            f"{ranks} ranks need a GPU each, and this machine has {gpus}: set {fewer}"
            "TANDEM_TRAINER_DEVICE to cpu"
        )
    return "cuda"


def _visible_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _take_gpu(assignment: Assignment) -> None:
    """Raises `WorkerStartFailed`."""
    if (there := _visible_gpus()) <= assignment.local_rank:
        raise WorkerStartFailed(
            f"rank {assignment.rank} sees {there} GPUs and was to use number "
            f"{assignment.local_rank} of them (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
        )
    torch.cuda.set_device(assignment.local_rank)
    if budget := assignment.settings.memory_bytes:  # other workers use the rest
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total))
