"""`make bench-trl`: GRPO of `tandem.rl` beside TRL's, on one task in one run.

The task is the demo's addition. One warm-up, trained with `tandem.rl.sft`, is the start of both.
Each run is a process of its own, and the sides take turns. Model, prompts in their order, groups,
steps, learning rate, AdamW, clipping, temperature and answer length are equal, in float32 on a CPU
with one optimizer step for a batch. Tandem runs its whole stack with one rank. TRL runs in one
process, and samples with transformers' `generate` (`trl_side.py`).

The objectives are equal but for one thing. Both have A = (R - mean) / (std + 1e-4) with the
sample's deviation of a group, and take the mean over a batch's answers of the mean over an answer's
tokens, without a KL. Both clip the ratio p/old at 0.8 and 1.2. TRL takes the trainer's own p as
old, so its ratio is 1. Tandem takes the log-probabilities of the engine that sampled, which differ
from the trainer's by rounding. So neither clips with one step for a batch.

The sides draw different samples: seeds mean different random numbers in vLLM and in torch."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import psutil
import tinker
from rich.console import Console
from rich.table import Table
from tinker import types

from benchmarks import record
from tandem.cli.checkpoints import export
from tandem.demo.addition import MAX_ANSWER_TOKENS, imperfect, sums
from tandem.demo.tiny_model import write_tiny_model
from tandem.rl import Evaluation, Example, RLConfig, SFTConfig, sft, train
from tandem.stack import Stack

HERE = Path(__file__).resolve().parent
TRL = HERE.parent / ".venv" / "trl" / "bin" / "python"
MODEL = "bench/addition"
SETTINGS = {"port": "0", "trainer_ranks": "1"}
SIDES = ("tandem", "trl")
BETAS, EPS = (0.9, 0.95), 1e-12
"""Those of the SDK's `AdamParams`, which `tandem.rl` uses."""
LAST = 5
"""The steps whose mean is the last reward."""
TIMEOUT = 600.0


# --- Tandem's side, in a separate process ---------------------------------------------------------


async def reward(example: Example, answer: str) -> float:
    return float(answer == example.data["answer"])


class Clock:
    """Notes when each step ends, in the place of a run's record."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def log(self, _step: int, values: Mapping[str, Any]) -> None:
        if "reward" in values:
            self.ended.append(time.monotonic())

    def rollouts(self, _step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        pass


def tandem_side(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    clock = Clock()
    with connected(folder, Path(task["model"])) as service:
        training = service.create_lora_training_client(f"{MODEL}:full").result(TIMEOUT)
        sampler = training.save_weights_and_get_sampling_client().result(TIMEOUT)
        one_token = types.SamplingParams(max_tokens=1)
        sampler.sample(types.ModelInput.from_ints([20]), 1, one_token).result(TIMEOUT)
        ready = time.monotonic()
        result = train(
            training,
            examples(task),
            reward,
            RLConfig(
                steps=task["steps"],
                groups_per_step=task["groups"],
                group_size=task["group_size"],
                max_tokens=task["max_tokens"],
                learning_rate=task["learning_rate"],
                grad_clip_norm=task["clip_norm"],
                objective="grpo",
                shuffle=False,
                seed=task["seed"],
            ),
            evaluation=Evaluation(dataset=examples(task["evaluation"])),
            tracked=clock,
        )
    return {
        "ready": ready,
        "ended": clock.ended,
        "rewards": [step.reward for step in result.steps],
        "grad_norms": [step.metrics.get("grad_norm") for step in result.steps],
        "greedy": result.evaluations[-1].reward,
        "dropped": dict(result.dropped),
    }


def examples(task: Mapping[str, Any]) -> list[Example]:
    pairs = zip(task["prompts"], task["answers"], strict=True)
    return [Example(prompt, {"answer": answer}) for prompt, answer in pairs]


@contextmanager
def connected(folder: Path, model: Path) -> Iterator[tinker.ServiceClient]:
    """Start a stack with a model, in `folder`."""
    with Stack(data_dir=folder / "data", settings=SETTINGS) as stack:
        stack.add_model(name=MODEL, path=model)
        endpoint = stack.endpoint
        with tinker.ServiceClient(base_url=endpoint.url, api_key=endpoint.api_key) as service:
            yield service


# --- The benchmark --------------------------------------------------------------------------------


def warm_up(folder: Path, *, steps: int, target: Path) -> float:
    """Train the demo's imperfect examples, and write the weights as a Hugging Face folder. Returns
    the loss of the last step."""
    rows = imperfect(64 * steps, seed=0)
    write_tiny_model(folder / "random", seed=0)
    with connected(folder, folder / "random") as service:
        training = service.create_lora_training_client(f"{MODEL}:full").result(TIMEOUT)
        config = SFTConfig(batch_size=64, learning_rate=1e-3, grad_clip_norm=1.0)
        fitted = sft(training, rows, config, tracked=False)
        saved = training.save_weights_for_sampler("warm-up").result(TIMEOUT)
        export(saved.path, target, data_dir=folder / "data")
    return fitted.steps[-1]["loss"]


def task_of(asked: argparse.Namespace, seed: int, model: Path) -> dict[str, Any]:
    """The same for both sides. The prompts are in the order of the steps: all problems, again and
    again, in another order each."""
    rng = random.Random(seed)
    problems = sums()
    count = asked.steps * asked.groups
    order: list[Any] = []
    while len(order) < count:
        order += rng.sample(problems, len(problems))
    return {
        "model": str(model),
        "seed": seed,
        "steps": asked.steps,
        "groups": asked.groups,
        "group_size": asked.group_size,
        "max_tokens": MAX_ANSWER_TOKENS,
        "learning_rate": asked.learning_rate,
        "betas": BETAS,
        "eps": EPS,
        "clip_norm": 1.0,
        "prompts": [problem.prompt for problem in order[:count]],
        "answers": [problem.data["answer"] for problem in order[:count]],
        "evaluation": {
            "prompts": [problem.prompt for problem in problems],
            "answers": [problem.data["answer"] for problem in problems],
        },
    }


class PeakMemory:
    """The largest sum of the resident memory of a process and all below it."""

    def __init__(self, process: int) -> None:
        self.bytes = 0
        self._process = psutil.Process(process)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            with suppress(psutil.NoSuchProcess):
                found = [self._process, *self._process.children(recursive=True)]
                self.bytes = max(self.bytes, sum(map(_resident, found)))


def _resident(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        return process.memory_info().rss
    return 0


def run(side: str, task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run a side in a new process. Its start-up ends when its first step can begin."""
    folder.mkdir()
    question, answer = folder / "task.json", folder / "result.json"
    question.write_text(json.dumps(task))
    own = [sys.executable, "-m", "benchmarks.trl_grpo", "--child"]
    command = own if side == "tandem" else [str(TRL), "-P", str(HERE / "trl_side.py")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    began = time.monotonic()
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, str(question), str(answer)], env=environment, stdout=output, stderr=output
        )
        try:
            with PeakMemory(process.pid) as peak:
                failed = process.wait(TIMEOUT)
        finally:
            process.kill()
    if failed:
        raise RuntimeError(f"{side} failed: {(folder / 'output.txt').read_text()[-2000:]}")
    found = json.loads(answer.read_text())
    steps = [b - a for a, b in zip([found["ready"], *found["ended"]], found["ended"], strict=False)]
    rewards = found["rewards"]
    return {
        "start_up_seconds": round(found["ready"] - began, 2),
        "step_seconds": round(median(steps[1:]), 3),
        "first_step_seconds": round(steps[0], 3),
        "all_steps_seconds": round(sum(steps), 2),
        "peak_rss_mib": round(peak.bytes / 2**20),
        "first_reward": round(rewards[0], 3),
        "mean_reward": round(fmean(rewards), 4),
        "last_reward": round(fmean(rewards[-LAST:]), 4),
        "greedy": round(found["greedy"], 3),
        "dropped": found.get("dropped", {}),
        "rewards": [round(each, 4) for each in rewards],
        "grad_norms": [round(each, 4) for each in found["grad_norms"]],
    }


def difference(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Tandem's mean over the seeds less TRL's, and its standard error."""
    sides = [[each[name] for each in runs if each["side"] == side] for side in SIDES]
    ours, theirs = map(fmean, sides)
    error = sum(stdev(side) ** 2 / len(side) for side in sides if len(side) > 1) ** 0.5
    return {"difference": round(ours - theirs, 4), "standard_error": round(error, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.trl_grpo", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups", type=int, default=20, help="of a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--warm-up-steps", type=int, default=400)
    parser.add_argument("--no-save", action="store_true", help="only print")
    parser.add_argument("--child", nargs=2, type=Path, default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        question, answer = asked.child
        found = tandem_side(json.loads(question.read_text()), question.parent)
        answer.write_text(json.dumps(found))
        return
    console, runs = Console(width=140), []
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="tandem-trl-") as name:
        work = Path(name)
        began = time.monotonic()
        model = work / "warm-up-model"
        loss = warm_up(work / "warm-up", steps=asked.warm_up_steps, target=model)
        warm_up_seconds = time.monotonic() - began
        for seed in range(asked.seeds):
            for side in SIDES if seed % 2 == 0 else SIDES[::-1]:
                found = run(side, task_of(asked, seed, model), work / f"{side}-{seed}")
                runs.append({"side": side, "seed": seed, **found})
                console.print(f"{side}, seed {seed}: {found}", soft_wrap=True)
    shown = ("first_reward", "last_reward", "greedy", "step_seconds", "start_up_seconds")
    table = Table("side", "seed", *shown, "peak_rss_mib")
    for each in runs:
        table.add_row(each["side"], *(str(each[key]) for key in ("seed", *shown, "peak_rss_mib")))
    console.print(table)
    result = {
        "settings": {key: value for key, value in vars(asked).items() if key != "child"},
        "load": [load[0], os.getloadavg()[0]],
        "trl": trl_versions(),
        "warm_up": {"loss": round(loss, 4), "seconds": round(warm_up_seconds, 1)},
        "tandem_less_trl": {key: difference(runs, key) for key in ("mean_reward", "last_reward")},
        "runs": runs,
    }
    console.print(result["tandem_less_trl"])
    if not asked.no_save:
        console.print(f"written to {record.save({'machine': record.machine(), 'trl': result})}")


def trl_versions() -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json; print(json.dumps({name: m.version(name) for name in "
        "('trl', 'torch', 'transformers', 'accelerate', 'datasets')}))"
    )
    found = subprocess.run([str(TRL), "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(found.stdout))


if __name__ == "__main__":
    main()
