"""Brings the process group up, in the engine thread of rank 0."""

from __future__ import annotations

import socket
from pathlib import Path

import torch.distributed as dist

from tandem.settings import TrainerSettings
from tandem.worker import TrainingSpec, WorkerSpec
from trainer_service.lora import chosen_layers
from trainer_service.member import START_TIMEOUT, Assignment, join
from trainer_service.model import empty_model
from trainer_service.operations import Operations
from trainer_service.ranks import Ranks


def bring_up(spec: WorkerSpec, *, settings: TrainerSettings, ranks: Ranks) -> Operations:
    """Serves the store where ranks meet, tells each its place, and joins as rank 0.

    Raises `UnsuitableLora` before any rank loads the model.
    """
    size = settings.ranks
    training = spec.training or TrainingSpec()
    if training.lora:
        # All ranks would find out, and the first to die would be the error that is told.
        chosen_layers(empty_model(Path(spec.model_path)), training.lora)
    store: dist.Store = dist.HashStore()
    port = 0
    if size > 1:
        # Bound here, to loopback and to a port that the kernel picks: nobody can take it first.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            world_size=size,
            is_master=True,
            timeout=START_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    assignments = [
        Assignment(
            rank=rank,
            size=size,
            store_port=port,
            model_path=Path(spec.model_path),
            model_name=spec.model_name,
            training=training,
            settings=settings,
            log_level=spec.log_level,
        )
        for rank in range(size)
    ]
    for assignment in assignments[1:]:
        ranks.assign(assignment.rank, assignment.model_dump_json())
    return Operations(join(assignments[0], store))
