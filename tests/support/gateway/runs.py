"""A training run of a gateway under test, over plain HTTP."""

from __future__ import annotations

from tests.support.gateway.fake_trainer import FakeTrainer
from tests.support.gateway.running import forward_backward_bytes

PROTO = {"Content-Type": "application/x-protobuf"}


class Run:
    def __init__(self, gate, run_id, worker_id, trainer, client) -> None:
        self.gate, self.id, self.worker_id = gate, run_id, worker_id
        self.trainer, self.client = trainer, client

    def step(self, seq_id: int, **changes):
        fields = {"learning_rate": 0.1} | changes
        return self.client.post(
            "/api/v1/optim_step",
            json={"model_id": self.id, "seq_id": seq_id, "adam_params": fields},
        )

    def backward(self, seq_id: int, body: bytes | None = None, **headers):
        return self.client.post(
            "/api/v1/forward_backward",
            content=body or forward_backward_bytes(self.id, seq_id),
            headers=PROTO | headers,
        )

    def outcome(self, seq_id: int):
        return self.gate.retrieve(f"{self.id}:{seq_id}")

    def die(self, reason: str = "it was killed by SIGKILL") -> None:
        """Let the newest trainer of the run die."""
        worker_id, _ = self.gate.worker(f"trainer-{self.session_id}")
        self.gate.run(self.gate.launcher.kill(worker_id, reason))

    @property
    def newest(self) -> FakeTrainer:
        return self.gate.worker(f"trainer-{self.session_id}")[1]

    @property
    def session_id(self) -> str:
        return self.id.partition(":")[0]

    def hold(self):
        self.gate.run(self.trainer.gate.clear)

    def release(self):
        self.gate.run(self.trainer.gate.set)
