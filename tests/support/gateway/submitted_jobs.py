"""Jobs at a gateway with a fake launcher. A test writes the files of the program."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.waiting import wait_until

OWN = "/api/tandem/v1"
ROW = json.dumps({"prompt": "2 + 2 =", "completion": " 4"})


def body(**changes) -> dict:
    values = {
        "backend": "trl",
        "model": "tiny",
        "name": "sums",
        "tags": ["a", "b"],
        "configuration": {"method": "sft", "steps": 4},
        "data": {"train": f"{ROW}\n{ROW}\n"},
        "processes": 2,
    }
    return values | changes


class Submitted:
    """A job, and its present process in the place of a program."""

    def __init__(self, gate, job_id: str = "", **changes) -> None:
        self.gate = gate
        self.client = gate.http()
        self.id = job_id
        if not job_id:
            answer = self.client.post(f"{OWN}/jobs", json=body(**changes))
            assert answer.status_code == 200, answer.text
            self.id = answer.json()["id"]
        self.folder = gate.settings.data_dir / "jobs" / self.id.replace(":", "_")

    def about(self) -> dict:
        return self.client.get(f"{OWN}/jobs/{self.id}").json()

    def run(self) -> dict:
        return self.client.get(f"{OWN}/runs/{self.id}").json()

    def continued_by(self, gate) -> Submitted:
        self.gate, self.client = gate, gate.http()
        return self

    def process(self, attempt: int = 1):
        """Return the specification of an attempt's process, which then has begun."""
        spec = wait_until(
            lambda: next(
                (s for s in self.gate.launcher.specs if s.job and s.job.attempt == attempt), None
            )
        )
        (self.folder / f"attempt-{attempt}").mkdir(exist_ok=True)
        return spec

    def log(self, *steps: int, attempt: int = 1, total: int = 4) -> None:
        with (self.folder / f"attempt-{attempt}/metrics.jsonl").open("a") as file:
            for step in steps:
                line = {"step": step, "steps": total, "values": {"loss": 1 / step}}
                file.write(json.dumps(line) + "\n")

    def exit(self, status: int | None, *, attempt: int = 1, reason: str = "") -> None:
        """End the attempt's process, without an `end.json` if the status is None."""
        spec = self.process(attempt)
        wait_until(lambda: spec.worker_id in self.gate.launcher.serving)
        wait_until(lambda: self.about()["state"] == "running")
        if status is not None:
            end = {"status": status, "reason": reason}
            (self.folder / f"attempt-{attempt}/end.json").write_text(json.dumps(end))
        self.gate.run(self.gate.launcher.kill(spec.worker_id, "it ended"))

    def write_result(self) -> None:
        model = Path(self.gate.run(lambda: self.gate.gateway.models.get("tiny").path))
        (self.folder / "result").mkdir()
        for folder in (model, self.folder / "result"):
            weight = np.ones((2, 3), np.float32)
            save_file({"model.norm.weight": weight}, folder / "model.safetensors")

    def ended(self) -> dict:
        about = self.ended_alone()
        wait_until(lambda: self.gate.run(lambda: self.gate.gateway.jobs.all() == []))
        return about

    def ended_alone(self) -> dict:
        """Wait for its end, beside other jobs."""
        return wait_until(lambda: (about := self.about())["state"] == "ended" and about)

    def curve(self) -> dict:
        name = "tandem/loss"
        found = self.client.get(f"{OWN}/runs/{self.id}/metrics", params={"name": name}).json()
        return found["metrics"].get(name, {"step": []})


def is_gone(job: Submitted) -> bool:
    """Whether no session, worker or row of it is left."""
    gateway = job.gate.gateway
    session_id = job.id.partition(":")[0]

    def left():
        return (
            gateway.sessions.get(session_id) is not None
            or job.id in gateway.supervisor.roster.rows
            or any(session_id in each for each in job.gate.launcher.serving)
        )

    return wait_until(lambda: not job.gate.run(left))
