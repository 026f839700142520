"""A user's script with a loop: `python -m tests.support.rl_script URL KEY MODEL OUT LOSSES`.

Each step appends its number and its loss to the file LOSSES. The file `run` beside it has the id of
the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tinker

from tandem.rl import Example, RLConfig, resumable, train
from tandem.rl.policy import TinkerPolicy

PROBLEMS = [Example([5 + number, 6, 7]) for number in range(12)]


def share_of_digits(_example: Example, answer: str) -> float:
    return sum(letter.isdigit() for letter in answer) / 8


class _Written(TinkerPolicy):
    """Writes the loss of each step."""

    def __init__(self, training: tinker.TrainingClient, *, step: int, losses: Path) -> None:
        super().__init__(training, step=step)
        self._losses = losses
        losses.with_name("run").write_text(training.model_id)

    async def train(self, *arguments):
        metrics = await super().train(*arguments)
        with self._losses.open("a") as file:
            print(json.dumps([self.step, metrics["loss:sum"]]), file=file, flush=True)
        return metrics


def main(url: str, key: str, model: str, out: Path, losses: Path) -> None:
    config = RLConfig(
        steps=8,
        groups_per_step=4,
        group_size=4,
        max_tokens=8,
        learning_rate=1e-3,
        stop=(),
        save_every=2,
        out=out,
    )
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        make = resumable(service, f"{model}:full")

        async def opened(path: str | None) -> _Written:
            step = json.loads((out / "state.json").read_text())["policy_step"] if path else 0
            return _Written(await make(path), step=step, losses=losses)

        train(opened, PROBLEMS, share_of_digits, config)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
