"""A training run of a gateway under test, over plain HTTP."""

from __future__ import annotations

from pathlib import Path

from tests.support.gateway.fake_trainer import FakeRun, FakeTrainer, after
from tests.support.gateway.running import forward_backward_bytes

PROTO = {"Content-Type": "application/x-protobuf"}

OFTEN = {"share": 1.0, "replay": 0.0}
SELDOM = {"replay": 1e6, "share": 1e-9}
"""Settings for frequent and rare snapshots."""


class Run:
    def __init__(self, gate, run_id, worker_id, trainer, client) -> None:
        self.gate, self.id, self.worker_id = gate, run_id, worker_id
        self.trainer, self.client = trainer, client

    @classmethod
    def new(cls, gate, *, rank: int = 0) -> Run:
        """Create a run in a new session. With a rank, it trains adapters."""
        run_id = gate.run_id(gate.session_id(), rank=rank)
        trainer = gate.trainer_of(run_id)
        return cls(gate, run_id, trainer.spec.worker_id, trainer, gate.http())

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
        self.gate.run(self.gate.launcher.kill(self.newest.spec.worker_id, reason))

    @property
    def newest(self) -> FakeTrainer:
        return self.gate.trainer_of(self.id)

    @property
    def state(self) -> FakeRun:
        """The run as its newest trainer has it."""
        return self.newest.runs[self.id]

    @property
    def session_id(self) -> str:
        return self.id.partition(":")[0]

    def hold(self):
        self.gate.run(self.trainer.gate.clear)

    def release(self):
        self.gate.run(self.trainer.gate.set)


def train(run: Run, *numbers: int) -> list[dict]:
    """Each step is a batch 2n-1 and a step 2n. Returns their outcomes."""
    for number in numbers:
        assert run.backward(2 * number - 1).status_code == 200
        run.outcome(2 * number - 1)
        assert run.step(2 * number).status_code == 200
    return [run.outcome(2 * number).json() for number in numbers]


def undisturbed(steps: int) -> str:
    """Return a trainer's history after `steps` steps of `train`."""
    history = ""
    for seq_id in range(1, 2 * steps + 1):
        history = after(history, "forward_backward" if seq_id % 2 else "optim_step", seq_id)
    return history


def snapshots(gate) -> list[Path]:
    return sorted((gate.settings.data_dir / "snapshots").glob("*/*"))


def save(run: Run, seq_id: int, name: str) -> str:
    body = {"model_id": run.id, "seq_id": seq_id, "path": name}
    assert run.client.post("/api/v1/save_weights", json=body).status_code == 200
    return run.outcome(seq_id).json()["path"]


def ended(gate, run_id: str) -> dict | None:
    """Return the row of a run after its end, else None."""
    row = gate.http().get(f"/api/tandem/v1/runs/{run_id}").json()
    return row if row["state"] == "ended" else None


def run_of(run: Run):
    return run.gate.gateway.runs.get(run.id)
