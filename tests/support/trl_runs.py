"""Jobs of TRL that a test submits to a real stack."""

from __future__ import annotations

import json

from tests.support.processes import marked
from tests.support.sdk import TIMEOUT
from tests.support.stacks import TIED, TestStack
from tests.support.waiting import wait_until

ROWS = "".join(
    json.dumps({"prompt": f"{n} + 1 =", "completion": f" {n + 1}"}) + "\n" for n in range(16)
)


class TrlRun:
    """A submitted job of TRL."""

    def __init__(
        self, stack: TestStack, *, processes: int = 2, max_restarts: int = 0, **values: object
    ) -> None:
        self.stack = stack
        configuration = {
            "method": "sft",
            "learning_rate": 1e-3,
            "steps": 4,
            "batch_size": 2,
            "save_steps": 2,
            "max_length": 64,
        }
        body = {
            "backend": "trl",
            "model": TIED,
            "name": "sums",
            "configuration": configuration | values,
            "data": {"train": ROWS},
            "processes": processes,
            "max_restarts": max_restarts,
        }
        with stack.stack.client() as client:
            answer = client.post("jobs", json=body)
            assert answer.status_code == 200, answer.text
        self.id: str = answer.json()["id"]

    def about(self) -> dict:
        with self.stack.stack.client() as client:
            return client.get(f"jobs/{self.id}").json()

    def steps(self) -> list[int]:
        with self.stack.stack.client() as client:
            found = client.get(f"runs/{self.id}/metrics", params={"name": "tandem/loss"}).json()
        return found["metrics"].get("tandem/loss", {"step": []})["step"]

    def finished(self) -> dict:
        wait_until(lambda: self.about()["state"] == "ended", timeout=TIMEOUT)
        about = self.about()
        assert about["reason"] == "the job has finished"
        return about

    def stop(self) -> None:
        with self.stack.stack.client() as client:
            client.post(f"runs/{self.id}/stop", json={}).raise_for_status()

    def worker(self) -> dict:
        return self.stack.worker("job", session_id=self.id.partition(":")[0])

    def is_gone(self) -> bool:
        """Whether no process of it is left."""
        return not any("trainer_service.jobs" in each.command for each in marked(self.stack.mark))
