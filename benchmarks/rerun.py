"""`make bench-rerun`: the seconds until the first reward after a change of the reward.

A user changes a reward and runs the script again. A second session holds a run of the same base
model, so that trainer and engine stay warm. Each round writes another reward into the script, and
starts a new Python process. The time runs from its start to the first call of the new reward."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path

import tinker
from rich.console import Console
from tinker import types

from benchmarks import record
from tandem.demo.tiny_model import write_tiny_model
from tandem.stack import Endpoint, Stack

MODEL = "bench/model"
LIMIT = 5.0
"""The promised seconds."""
ROUNDS = 3
LETTERS = "0aA1bB2cC"
"""Each round's reward counts another character."""
SCRIPT = """
import time
import tinker
from tandem.rl import Example, RLConfig, train


def note(event):
    with open({noted!r}, "a") as file:
        print(event, time.time(), file=file)


def reward(example, answer):
    note("first_reward")
    return float(answer.count({letter!r}))


if __name__ == "__main__":
    note("imported")
    with tinker.ServiceClient() as service:
        training = service.create_lora_training_client({model!r}, rank=8).result()
        note("training_client")
        config = RLConfig(
            steps=1, groups_per_step=4, group_size=4, max_tokens=8, learning_rate=1e-3
        )
        train(training, [Example("1+2="), Example("3+4=")], reward, config)
"""


def run_again(folder: Path, endpoint: Endpoint, letter: str) -> dict[str, float]:
    """Write and run the script. Return the seconds from its start to each event."""
    noted = folder / f"events-{ord(letter)}"
    script = folder / "loop.py"
    script.write_text(SCRIPT.format(noted=str(noted), letter=letter, model=MODEL))
    environment = {"TINKER_BASE_URL": endpoint.url, "TINKER_API_KEY": endpoint.api_key}
    began = time.time()
    subprocess.run([sys.executable, script], env={**os.environ, **environment}, check=True)
    ended = time.time()
    events = [line.split() for line in noted.read_text().splitlines()]
    times = {event: float(at) for event, at in reversed(events)}  # the first of each
    times["whole_run"] = ended
    return {event: round(at - began, 2) for event, at in sorted(times.items(), key=itemgetter(1))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    console = Console()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", seed=0)
        with Stack(data_dir=folder / "data", settings={"port": "0"}) as stack:
            stack.add_model(name=MODEL, path=folder / "model")
            endpoint = stack.endpoint
            with tinker.ServiceClient(base_url=endpoint.url, api_key=endpoint.api_key) as held:
                training = held.create_lora_training_client(MODEL, rank=8).result()
                sampler = training.save_weights_and_get_sampling_client().result()
                prompt = types.ModelInput.from_ints([20, 30])
                sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
                workers = _processes(stack)
                cold = run_again(folder, endpoint, LETTERS[0])
                rounds = [
                    run_again(folder, endpoint, letter) for letter in LETTERS[1:][: asked.rounds]
                ]
                same = _processes(stack) == workers
    console.print_json(json.dumps({"rounds": rounds, "workers_stayed": same}))
    path = record.save(
        {
            "machine": record.machine(),
            "rerun": {
                "limit": LIMIT,
                "load": [load[0], os.getloadavg()[0]],
                "first_run": cold,
                "rounds": rounds,
                "workers_stayed": same,
            },
        }
    )
    console.print(f"written to {path}")
    return 0 if same and all(each["first_reward"] <= LIMIT for each in rounds) else 1


def _processes(stack: Stack) -> set[int]:
    with stack.client() as client:
        found = client.get("status").raise_for_status().json()["workers"]
    return {worker["pid"] for worker in found}


if __name__ == "__main__":
    raise SystemExit(main())
