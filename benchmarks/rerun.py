"""`make bench-rerun`: the seconds until the first reward after a change of the reward.

A user changes a reward and runs the script again. A second session holds a run of the same base
model, so that trainer and engine stay warm. Each round writes another reward into the script, and
starts a new Python process. The time runs from its start to the first call of the new reward.

With `--compose`, the service `client` of docker-compose.yaml runs the script from a mounted folder.
The time then includes the container's start. The other containers must run. `--model` is one of
their models, TINKER_BASE_URL their address, and TINKER_API_KEY an admin's key."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

import tinker
from rich.console import Console
from tinker import types

from benchmarks import record
from tandem.demo.tiny_model import write_tiny_model
from tandem.stack import Endpoint, Stack

ROOT = Path(__file__).parents[1]
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
    print("noted", event, time.time(), flush=True)


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


def run_again(
    folder: Path, endpoint: Endpoint, letter: str, *, model: str, command: Sequence[str]
) -> dict[str, float]:
    """Write and run the script. Return the seconds from its start to each event."""
    (folder / "loop.py").write_text(SCRIPT.format(letter=letter, model=model))
    environment = {"TINKER_BASE_URL": endpoint.url, "TINKER_API_KEY": endpoint.api_key}
    began = time.time()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    ended = time.time()
    if done.returncode:
        raise RuntimeError(f"the script failed: {done.stderr[-2000:]}")
    events = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("noted ")]
    times = {event: float(at) for event, at in reversed(events)}  # the first of each
    times["whole_run"] = ended
    return {event: round(at - began, 2) for event, at in sorted(times.items(), key=itemgetter(1))}


def measure(
    folder: Path, endpoint: Endpoint, *, model: str, command: Sequence[str], rounds: int
) -> dict[str, object]:
    def changed(letter: str) -> dict[str, float]:
        return run_again(folder, endpoint, letter, model=model, command=command)

    with tinker.ServiceClient(base_url=endpoint.url, api_key=endpoint.api_key) as held:
        training = held.create_lora_training_client(model, rank=8).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([20, 30])
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
        workers = _processes(endpoint)
        first = changed(LETTERS[0])
        again = [changed(letter) for letter in LETTERS[1:][:rounds]]
        same = _processes(endpoint) == workers
    return {
        "first_run": first,
        "rounds": again,
        "workers_stayed": same,
        "within_limit": same and all(each["first_reward"] <= LIMIT for each in again),
    }


def _processes(endpoint: Endpoint) -> set[tuple[str, int]]:
    with endpoint.client() as client:
        found = client.get("status").raise_for_status().json()["workers"]
    processes = {(worker["id"], worker["pid"]) for worker in found}
    if not all(pid for _id, pid in processes):
        raise RuntimeError("only an admin's key sees processes")
    return processes


def in_compose(folder: Path, *, model: str, rounds: int) -> dict[str, object]:
    folder.chmod(0o755)  # for the container's user
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    compose = ("docker", "compose") if plugin else ("docker-compose",)
    mounted = ("run", "--rm", "-T", f"--volume={folder}:/work", "client")
    endpoint = Endpoint(
        url=os.environ["TINKER_BASE_URL"], api_key=os.environ["TINKER_API_KEY"], pid=0
    )
    command = (*compose, *mounted, "python", "loop.py")
    return measure(folder, endpoint, model=model, command=command, rounds=rounds)


def on_this_machine(folder: Path, *, rounds: int) -> dict[str, object]:
    write_tiny_model(folder / "model", seed=0)
    command = (sys.executable, str(folder / "loop.py"))
    with Stack(data_dir=folder / "data", settings={"port": "0"}) as stack:
        stack.add_model(name=MODEL, path=folder / "model")
        return measure(folder, stack.endpoint, model=MODEL, command=command, rounds=rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--compose", action="store_true")
    parser.add_argument("--model", default="my/model", help="with --compose")
    asked = parser.parse_args()
    console = Console()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as name:
        if asked.compose:
            found = in_compose(Path(name), model=asked.model, rounds=asked.rounds)
        else:
            found = on_this_machine(Path(name), rounds=asked.rounds)
    console.print_json(json.dumps(found))
    about = {"compose": asked.compose, "limit": LIMIT, "load": [load[0], os.getloadavg()[0]]}
    path = record.save({"machine": record.machine(), "rerun": {**about, **found}})
    console.print(f"written to {path}")
    return 0 if found["within_limit"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
