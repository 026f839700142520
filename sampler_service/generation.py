"""The engine as a library: samples and new weights for a program of one's own.

No server, network or database is needed. A thread owns the engine, as in the sampler's process, so
any thread may call these methods, and concurrent calls share batches."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self, TypedDict, TypeVar, Unpack

import numpy as np
import structlog
from prometheus_client import CollectorRegistry

from sampler_service.engine import Engine, EngineFacts, SleepLevel
from sampler_service.metrics import SamplerMetrics
from sampler_service.scheduler import Scheduler
from sampler_service.service.request_parser import parse_request
from sampler_service.vllm.start import start_engine
from sampler_service.weights.files import manifest_of
from sampler_service.weights.loader import LoadableVersion
from sampler_service.work import Sampled, SampleJob
from tandem.errors import (
    InvalidRequest,
    OperationTimedOut,
    TandemError,
    WorkerDied,
    WorkerStartFailed,
    describe,
)
from tandem.settings.workers import SamplerSettings
from tandem.v1 import sampler_pb2

if TYPE_CHECKING:
    import torch

Weights = str | Path | Mapping[str, "torch.Tensor"]
"""A weight version's directory, another directory of safetensors, or tensors by name."""
Value = TypeVar("Value")

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class GeneratedSample:
    """`logprobs` are those of the distribution that the tokens were drawn from. `stop_reason` is
    "stop" or "length". `version` names the weights."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    version: str


class Parameters(TypedDict, total=False):
    """See "Parameters" in docs/sampling.md. `stop` has strings or token ids."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: Sequence[str] | Sequence[int]


class Generation:
    """Use: `with Generation("models/tiny") as generation: generation.generate([5, 9], n=4)`."""

    def __init__(
        self, model: str | Path, *, process: bool = False, **settings: int | float | str
    ) -> None:
        """Start an engine for a model's directory, in this process or in its own `process`.

        `settings` are fields of `SamplerSettings`, such as `kv_cache_bytes`, `max_num_seqs`,
        `dtype` and `operation_timeout`, which limits the start and each call, in seconds. In this
        process, the start sets the environment variables of vLLM. Raises `WorkerStartFailed`."""
        if not structlog.is_configured():
            warnings_only = structlog.make_filtering_bound_logger(logging.WARNING)
            structlog.configure(wrapper_class=warnings_only)
        chosen = {"engine_process": "on" if process else "off", **settings}
        self._settings = SamplerSettings.model_validate(chosen)
        self._model = Path(model).absolute()
        self._numbers = itertools.count(1)
        self._version = LoadableVersion(name=f"base/{self._model.name}", path=self._model)
        self._dropped = False
        started: Future[tuple[Scheduler, EngineFacts]] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(process, started), name="generation", daemon=True
        )
        self._thread.start()
        self._scheduler, self._facts = self._result(started)

    def _run(self, process: bool, started: Future[tuple[Scheduler, EngineFacts]]) -> None:
        """Make the engine, compute until `close`, and end the engine."""
        with ExitStack() as ending:
            try:
                engine = self._start(process, ending)
                scheduler = Scheduler.of_engine(
                    engine,
                    base=self._version,
                    timeout=self._settings.operation_timeout,
                    metrics=SamplerMetrics(CollectorRegistry()),
                    on_fatal=lambda _: None,  # the calls fail
                )
            except TandemError as error:
                started.set_exception(error)
            except Exception as error:  # noqa: BLE001 (vLLM raises anything)
                failed = f"vLLM did not start with {self._model.name}: {describe(error)}"
                started.set_exception(WorkerStartFailed(failed))
            else:
                started.set_result((scheduler, engine.facts))
                scheduler.run()

    def _start(self, process: bool, ending: ExitStack) -> Engine:
        if process:
            from sampler_service.service.engine_process import EngineProcess  # imports torch

            child = EngineProcess.spawn(self._model, self._settings)
            ending.callback(child.kill_engine)
            return child.connect(lambda: None)  # the next step notices its end
        engine = start_engine(self._model, self._settings, lambda: None, sleeps=True)
        ending.callback(engine.shut_down)
        gc.enable()
        gc.unfreeze()
        return engine

    def generate(
        self, ids: Sequence[int], n: int = 1, **parameters: Unpack[Parameters]
    ) -> list[GeneratedSample]:
        """Return n samples of a prompt. Raises a `UserError`, or `WorkerDied`."""
        return self.generate_all([ids], n, **parameters)[0]

    def generate_all(
        self, prompts: Sequence[Sequence[int]], n: int = 1, **parameters: Unpack[Parameters]
    ) -> list[list[GeneratedSample]]:
        """Return n samples of each prompt, computed together. Raises as `generate`."""
        requests = [self._request(ids, n, parameters) for ids in prompts]
        futures = [self._scheduler.submit(each) for each in requests]
        try:
            return [_samples(self._result(future)) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def sync_weights(self, weights: Weights) -> str:
        """Load weights, and return their name. Running samples are completed with the old ones.

        The files are checked first, and the loaded numbers afterwards. Raises `LoadFailed`, after
        which the old weights serve."""
        with self._opened(weights) as version:
            self._load(version)
        return version.name

    def sleep(self, *, drop_weights: bool = False) -> None:
        """Give back the KV cache, and move the weights to host memory or drop them."""
        level = SleepLevel.DROP_WEIGHTS if drop_weights else SleepLevel.KEEP_WEIGHTS
        self._result(self._scheduler.sleep(level))
        self._dropped = drop_weights

    def wake(self, weights: Weights | None = None) -> None:
        """Continue with these weights, or the ones before the sleep. Raises `LoadFailed`.

        Dropped weights that came as tensors are not kept, so give newer ones."""
        if weights is None and self._dropped and not self._version.path.is_dir():
            raise InvalidRequest("the dropped weights came as tensors; wake with newer weights")
        with self._opened(weights) as version:
            self._result(self._scheduler.wake(version))
            self._load(version)  # at once, unless the wake fell back to the weights before
        self._dropped = False

    def close(self) -> None:
        """End the engine. Running calls fail."""
        self._scheduler.stop_scheduling(WorkerDied("the engine was closed"))
        self._thread.join(self._settings.operation_timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, version: LoadableVersion) -> None:
        self._result(self._scheduler.load(version))
        self._version = version

    @contextmanager
    def _opened(self, weights: Weights | None) -> Iterator[LoadableVersion]:
        """Yield a version of these or the present weights. Tensors are written to memory files for
        the block."""
        if weights is None:
            yield self._version
        elif isinstance(weights, Mapping):
            from safetensors.torch import save_file

            memory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
            with TemporaryDirectory(dir=memory) as folder:
                for index, (name, tensor) in enumerate(weights.items()):
                    whole = tensor.detach().cpu().contiguous()
                    save_file({name: whole}, Path(folder, f"{index:05d}.safetensors"))
                yield self._plain("tensors", Path(folder))
        else:
            path = Path(weights).absolute()
            manifest = manifest_of(path)
            yield (
                self._plain(path.name, path)
                if manifest is None
                else LoadableVersion(
                    name=manifest.version,
                    path=path,
                    run_id=manifest.run_id,
                    step=manifest.step,
                    adapter=manifest.adapter,
                )
            )

    def _plain(self, name: str, path: Path) -> LoadableVersion:
        return LoadableVersion(name=f"{name}#{next(self._numbers)}", path=path, plain=True)

    def _request(self, ids: Sequence[int], n: int, parameters: Parameters) -> SampleJob:
        number = next(self._numbers)
        stop = parameters.get("stop")
        params = sampler_pb2.SamplingParams(
            temperature=1.0, top_k=-1, top_p=1.0, stop_given=stop is not None
        )
        for name, value in parameters.items():
            if name != "stop":
                setattr(params, name, value)
        for each in stop or ():
            if isinstance(each, str):
                params.stop_strings.append(each)
            else:
                params.stop_token_ids.append(each)
        message = sampler_pb2.SampleRequest(
            operation_id=f"generation-{number}",
            prompt_tokens=np.asarray(ids, "<i4").tobytes(),
            num_samples=n,
            params=params,
        )
        request = parse_request(message, self._facts).request
        return SampleJob(request=request, version=self._version, session_id="", seq_id=number)

    def _result(self, future: Future[Value]) -> Value:
        try:
            return future.result(self._settings.operation_timeout)
        except TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise OperationTimedOut(
                f"the engine did not answer within {self._settings.operation_timeout:g} s; raise "
                "operation_timeout"
            ) from error


def _samples(sampled: Sampled) -> list[GeneratedSample]:
    return [
        GeneratedSample(
            tokens=each.tokens.tolist(),
            logprobs=each.logprobs.tolist(),
            stop_reason="stop" if each.stopped else "length",
            version=sampled.version.name,
        )
        for each in sampled.result.samples
    ]
