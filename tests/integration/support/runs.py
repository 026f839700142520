"""Training runs that tests share, and how each test gets one at its beginning."""

from __future__ import annotations

import warnings

from tinker import ServiceClient, TrainingClient

START = "start"


def start_runs(service: ServiceClient, *models: str) -> dict[str, TrainingClient]:
    """A training run for each model, all at once, with a checkpoint of its beginning."""
    futures = {name: service.create_lora_training_client(f"{name}:full") for name in models}
    clients = {name: future.result(timeout=240) for name, future in futures.items()}
    for saved in [client.save_state(START) for client in clients.values()]:
        saved.result(timeout=60)
    return clients


def rewind(training: TrainingClient) -> TrainingClient:
    """Back to the beginning, with an optimizer that has not stepped yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still part of the SDK
        training.load_state(f"tinker://{training.model_id}/weights/{START}").result(timeout=60)
    return training
