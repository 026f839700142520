"""How a process becomes a rank, and what ranks other than 0 do all day."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from tandem.errors import GradientsNotFinite, WorkerStartFailed
from tandem.settings import TrainerSettings
from tandem.telemetry import configure_logging
from tandem.v1 import trainer_pb2
from tandem.worker import TrainingSpec
from trainer_service.backends import World, backend_named
from trainer_service.batch import parse
from trainer_service.control import Control, Op
from trainer_service.lanes import Lanes
from trainer_service.losses import LOSSES, losses_for
from trainer_service.optimizers import step_settings
from trainer_service.rank_trainer import RankTrainer
from trainer_service.validate import Limits, validate

START_TIMEOUT = timedelta(minutes=10)
"""For ranks to find each other and to load the model. A launcher gives up sooner."""


class Assignment(BaseModel):
    """What a rank is told: its place, where the ranks meet, the model and what to train of it."""

    model_config = ConfigDict(frozen=True)

    rank: int
    size: int
    store_port: int
    model_path: Path
    model_name: str
    training: TrainingSpec
    settings: TrainerSettings
    log_level: str = "info"


def join(assignment: Assignment, store: dist.Store | None = None) -> RankTrainer:
    """Meets the other ranks and loads the model. Rank 0 brings the store that it serves."""
    settings, rank, size = assignment.settings, assignment.rank, assignment.size
    if rank:
        configure_logging(service="trainer", level=assignment.log_level)
    device = _take_device(settings, rank)
    threads = settings.threads or max(1, _cores() // size)
    torch.set_num_threads(threads)
    timeout = timedelta(seconds=settings.collective_timeout)
    needs_group = size > 1 or device == "cuda" or settings.dtype == "bfloat16"
    group = None
    if needs_group:
        # All ranks are on this machine, and what they say to each other is for nobody else.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        if store is None:
            store = dist.TCPStore(
                "127.0.0.1", assignment.store_port, is_master=False, timeout=START_TIMEOUT
            )
        _meet(store, "arrived", rank=rank, size=size)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        if size > 1:
            group = dist.new_group(backend="gloo", timeout=timeout)
    made = backend_named(settings.backend)(
        model_path=assignment.model_path,
        settings=settings,
        world=World(rank=rank, size=size, device=device),
        training=assignment.training,
    )
    if size > 1 and store is not None:
        _meet(store, "loaded", rank=rank, size=size)
    return RankTrainer(
        backend=made,
        control=Control(rank=rank, size=size, group=group),
        micro_batch_tokens=settings.micro_batch_tokens,
        model_path=assignment.model_path,
        model_name=assignment.model_name,
        lanes=_lanes(settings, threads) if made.threadsafe else None,
    )


def _lanes(settings: TrainerSettings, threads: int) -> Lanes | None:
    count = min(settings.lanes or 2, threads)
    return Lanes(count=count, threads=threads // count) if count > 1 else None


def _meet(store: dist.Store, stage: str, *, rank: int, size: int) -> None:
    """Waits until all ranks are at the same stage of starting.

    Imports and loading differ in time by more than a collective may take.
    """
    store.set(f"tandem/{stage}/{rank}", "1")
    store.wait([f"tandem/{stage}/{other}" for other in range(size)], START_TIMEOUT)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _take_device(settings: TrainerSettings, rank: int) -> str:
    """Sets this rank's GPU, if it is to have one. "auto" takes GPUs when there are enough."""
    device = settings.device
    if device == "auto":
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= settings.ranks
        device = "cuda" if enough else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available() or torch.cuda.device_count() <= rank:
            raise WorkerStartFailed(
                f"rank {rank} has no GPU: {torch.cuda.device_count()} are there for "
                f"{settings.ranks} ranks"
            )
        torch.cuda.set_device(rank)
    return device


def obey(trainer: RankTrainer) -> None:
    """Applies what rank 0 broadcasts, for ever. Requests were checked by rank 0."""
    while True:
        op, payload = trainer.control.receive()
        if op == Op.FORWARD_BACKWARD:
            facts = trainer.backend.facts
            limits = Limits(vocabulary=facts.vocabulary, max_length=facts.max_length)
            request = trainer_pb2.ForwardBackwardRequest.FromString(payload)
            losses = losses_for(registry=LOSSES, definition=request.loss_definition)
            trainer.forward_backward(validate(parse(request.payload), losses=losses, limits=limits))
        elif op == Op.OPTIM_STEP:
            step = trainer_pb2.OptimStepRequest.FromString(payload)
            optimizer = trainer.backend.training.optimizer
            try:
                trainer.optim_step(step_settings(step, optimizer=optimizer))
            except GradientsNotFinite:
                continue  # all ranks decided the same, and rank 0 tells the client
        elif op == Op.DROP_GRADIENTS:
            trainer.drop_gradients()
        elif op == Op.PUBLISH:
            trainer.publish(trainer_pb2.PublishRequest.FromString(payload))
        elif op == Op.SAVE_CHECKPOINT:
            trainer.save(trainer_pb2.SaveCheckpointRequest.FromString(payload))
        elif op == Op.LOAD_CHECKPOINT:
            trainer.load(trainer_pb2.LoadCheckpointRequest.FromString(payload))
