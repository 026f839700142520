"""The argument of a blueprint's `train`: its gateway, its model and its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.blueprints.description import Value

if TYPE_CHECKING:
    import tinker


@dataclass(frozen=True)
class BlueprintRun:
    """`service` is a session of the SDK, whose runs have a deadline. `values` are the parameters.
    `tags` are for the records of runs, and name the blueprint. Saved states and weights expire
    after `ttl_seconds`, because nobody deletes those of a killed program. `runs` are the ids of the
    runs so far, and `saved` has the paths of the tuned weights."""

    service: tinker.ServiceClient
    model: str
    values: Mapping[str, Value]
    seed: int
    tags: tuple[str, ...]
    ttl_seconds: int
    runs: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)

    def training_client(self) -> tinker.TrainingClient:
        """Return a new run of the model. It trains an adapter of the rank in the parameter
        `lora_rank`, or all parameters if that is 0 or the blueprint has none."""
        rank = int(self.values.get("lora_rank", 0))
        made = (
            self.service.create_lora_training_client(self.model, rank=rank, seed=self.seed)
            if rank
            else self.service.create_lora_training_client(f"{self.model}:full")
        )
        return self._noted(made.result())

    def copy_of(self, training: tinker.TrainingClient) -> tinker.TrainingClient:
        """Return a new run with the same weights, and with a new optimizer."""
        state = training.save_state(f"copy-{self.seed}", ttl_seconds=self.ttl_seconds).result()
        return self._noted(self.service.create_training_client_from_state(state.path).result())

    def _noted(self, client: tinker.TrainingClient) -> tinker.TrainingClient:
        self.runs.append(client.model_id)
        print(f"The run is {client.model_id}. `tandem runs show {client.model_id}` shows it.")
        return client

    def save_weights(self, training: tinker.TrainingClient) -> None:
        """Save the tuned weights for samplers, so that people can chat with them."""
        saved = training.save_weights_for_sampler("tuned", ttl_seconds=self.ttl_seconds).result()
        self.saved.append(saved.path)

    def integer(self, name: str) -> int:
        return int(self.values[name])

    def number(self, name: str) -> float:
        return float(self.values[name])

    def text(self, name: str) -> str:
        return str(self.values[name])
