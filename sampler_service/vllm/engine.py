"""vLLM behind the `Engine` protocol: its synchronous `LLMEngine`, in this process and thread.

Differences from vLLM's own behaviour:

- Sampled logprobs are `processed_logprobs`: after grammar, penalties, temperature, min_p, top_k and
  top_p. Greedy requests are neither scaled nor filtered, so theirs are at temperature 1.
- `prompt_scoring.py` scores prompts at temperature 1. The prefix cache is read only up to the first
  scored token.
- Samples of one prompt share its prefill, even of less than a block (`prefix_cache.py`).
- A request with n samples becomes n requests of vLLM (`sampling_parameters.py`).
- Chunked prefill is off on a CPU, where a seeded request in chunks crashes vLLM.
- Grammars are compiled beforehand (`structured_output.py`), and vLLM only masks tokens with them
  (`grammars.py`). vLLM itself would need a tokenizer at the start."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sampler_service.vllm.environment import use_environment

use_environment()  # before the import of vLLM
import vllm
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import Request

from sampler_service.engine import (
    EngineFacts,
    EngineMemory,
    EngineRequest,
    EngineResult,
    EngineUse,
    Float32Array,
    SleepLevel,
    StepOutput,
    WeightsTouched,
)
from sampler_service.vllm.adapter_sums import adapters_differ
from sampler_service.vllm.configuration import choose_device, engine_args, engine_config
from sampler_service.vllm.grammars import PrecompiledGrammars
from sampler_service.vllm.internals import (
    finish_batches,
    has_tokenizer,
    output_so_far,
    put_back,
    scheduler_of,
    take_waiting,
    use_adapter,
    use_logprobs,
    use_tokenizer,
    when_lost,
)
from sampler_service.vllm.memory import Sleeper
from sampler_service.vllm.pending import PendingRequest
from sampler_service.vllm.prefix_cache import PrefixCache
from sampler_service.vllm.sampled_logprobs import SampledLogprobsProcessor
from sampler_service.vllm.sampling_parameters import parameters_of
from sampler_service.vllm.worker_extension import WeightsExtension
from tandem.errors import (
    InternalError,
    InvalidRequest,
    LoadFailed,
    UnsupportedInput,
    describe,
    without_paths,
)
from tandem.settings.workers import SamplerSettings
from tandem.v1 import common_pb2
from tandem.weights.model_config import end_tokens, model_length
from tandem.weights.sums import sums_of_workers

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

_FAILED = "error"
"""vLLM's finish reason."""


def _sample_id(request_id: str, index: int) -> str:
    return f"{request_id}/{index}"


@dataclass(frozen=True)
class _Aside:
    """The requests of a paused engine: in vLLM's queue and in ours."""

    waiting: list[Request]
    unplaced: deque[PendingRequest]
    led: dict[str, PendingRequest]


class VllmEngine:
    """Example: `engine = VllmEngine(Path("models/tiny"), SamplerSettings())`, then
    `engine.add(request)` and `engine.step()` until `results` has the request."""

    def __init__(
        self,
        model: Path,
        settings: SamplerSettings,
        *,
        sleeps: bool = False,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`sleeps`: the engine must support `sleep`.

        `on_lost` is called in another thread when one of its processes dies."""
        args = engine_args(model, settings, sleeps=sleeps)
        self._model = model
        self._settings = settings
        config = engine_config(args, fit=not settings.max_model_len)
        self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=args.disable_log_stats)
        when_lost(self._engine, on_lost)
        self._on_workers(WeightsExtension.tandem_prepare, seed=secrets.randbits(63))
        self._cache = PrefixCache(self._engine)
        about = self._engine.vllm_config.model_config
        self.facts = EngineFacts(
            vocabulary=about.get_vocab_size(),
            max_length=about.max_model_len,
            model_length=model_length(model) or about.max_model_len,
            dtype=str(about.dtype).removeprefix("torch."),
            device=choose_device(settings.device),
            name=f"vllm {vllm.__version__}, model runner {1 + config.use_v2_model_runner}",
            end_tokens=end_tokens(model),
            max_lora_rank=settings.max_lora_rank,
            max_adapters=(args.max_cpu_loras or 0) if settings.max_lora_rank else 0,
        )
        self._adapters: dict[str, LoRARequest] = {}
        self._adapter_numbers = itertools.count(1)
        self._grammars = PrecompiledGrammars.install(self._engine)
        self._pending: dict[str, PendingRequest] = {}
        self._queued: set[str] = set()
        self._unplaced: deque[PendingRequest] = deque()
        self._led: dict[str, PendingRequest] = {}
        self._scheduler = scheduler_of(self._engine)
        self._aside: _Aside | None = None
        self._sleeper = Sleeper(self._engine, on_gpu=self.facts.device == "cuda")
        self._asleep = False

    def _on_workers(
        self,
        method: Callable[Concatenate[WeightsExtension, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Answer]:
        """Call a method in each of vLLM's workers. Returns their answers."""
        answers = self._engine.collective_rpc(method.__name__, args=args, kwargs=kwargs)
        return answers  # type: ignore[no-any-return]

    def add(self, request: EngineRequest) -> None:
        assert not self._asleep, "the KV cache is asleep"
        if request.stop_strings:
            self._load_tokenizer()
        pending = PendingRequest(request=request, unfinished=set(range(request.distinct_samples)))
        self._pending[request.id] = pending
        self._queued.add(request.id)
        self._unplaced.append(pending)

    def _place(self, step: StepOutput) -> None:
        """Hand to vLLM the requests for which it has room.

        Others wait here, so that followers find room while the first sample holds the prompt."""
        self._place_followers()
        placed = self._scheduler.get_num_unfinished_requests()
        placed += sum(len(pending.followers) for pending in self._led.values())
        while self._unplaced and placed < self._settings.max_num_seqs:
            pending = self._unplaced.popleft()
            request = pending.request
            if self._pending.get(request.id) is not pending:  # aborted
                continue
            try:
                self._place_first(pending)
            except (ValueError, VLLMValidationError) as error:  # must not end the engine
                self.abort([request.id])
                refusal = InvalidRequest(f"vLLM refuses the request: {describe(error)}")
                step.results.append(EngineResult(id=request.id, samples=(), failure=refusal))
            placed += request.distinct_samples

    def _place_first(self, pending: PendingRequest) -> None:
        """Hand a request's first sample to vLLM, and the others unless they follow it."""
        request = pending.request
        others = range(1, request.distinct_samples)
        self._add_sample(pending, index=0)
        if (
            others
            and request.max_tokens > 1
            and self._cache.is_worth_following(len(request.prompt))
        ):
            pending.followers = others
            self._led[request.id] = pending
            return
        for index in others:
            self._add_sample(pending, index=index)

    def _place_followers(self) -> None:
        """Hand followers to vLLM's front once their first sample has computed the prompt or
        ended."""
        ready = [
            pending
            for pending in self._led.values()
            if 0 not in pending.unfinished or self._cache.has_computed_prompt(pending.leader)
        ]
        for pending in ready:
            del self._led[pending.request.id]
            for index in pending.followers:
                self._add_sample(pending, index=index, leader=pending.leader)
        self._cache.put_first(sum(len(pending.followers) for pending in ready))

    def _add_sample(self, pending: PendingRequest, *, index: int, leader: str = "") -> None:
        """Hand one sample of a request to vLLM. Sample 0 scores the prompt."""
        request = pending.request
        scoring = request.scoring if index == 0 else None
        parameters = parameters_of(request, index=index, scoring=scoring, leader=leader)
        if scoring is not None:
            self._on_workers(
                WeightsExtension.tandem_begin_scores,
                request.id,
                scoring,
                prompt=list(request.prompt),
            )
        if request.grammar is not None:
            pending.grammars[index] = self._grammars.next_is(
                request.grammar, request.stop_token_ids
            )
        id_ = self._engine.add_request(
            _sample_id(request.id, index),
            {"type": "token", "prompt_token_ids": request.computed_prompt},
            parameters,
            lora_request=self._adapters[request.adapter] if request.adapter is not None else None,
        )
        use_logprobs(self._engine, id_, SampledLogprobsProcessor(request.topk))
        pending.ids[index] = id_

    def step(self) -> StepOutput:
        step = StepOutput()
        self._place(step)
        self._collect(self._engine.step(), step)
        step.loads.append(
            EngineUse(
                queued=self._scheduler.get_request_counts()[1]
                + sum(pending.request.distinct_samples for pending in self._unplaced),
                kv_used=self._scheduler.kv_cache_manager.usage,
            )
        )
        return step

    def settle(self) -> StepOutput:
        step = StepOutput()
        self._collect(finish_batches(self._engine), step)
        return step

    def _collect(self, outputs: Iterable[RequestOutput], step: StepOutput) -> None:
        computed = set()
        for output in outputs:
            request_id, _, index = output.request_id.rpartition("/")
            computed.add(request_id)
            pending = self._pending.get(request_id)
            # None if another sample's failure aborted the request in this step.
            if pending is not None:
                self._take(pending, int(index), output, step)
        if self._queued:  # vLLM adds a suffix after our last slash
            computed.update(each.request_id.rpartition("/")[0] for each in self._scheduler.running)
            step.begun.extend(self._queued & computed)
            self._queued.difference_update(step.begun)

    def _take(
        self, pending: PendingRequest, index: int, output: RequestOutput, step: StepOutput
    ) -> None:
        request = pending.request
        (completion,) = output.outputs
        if output.finished and completion.finish_reason == _FAILED:
            self.abort([request.id])
            step.results.append(pending.failed(index))
            return
        if request.streamed:
            delta = pending.delta(index, completion)
            if delta is not None:
                step.deltas.append(delta)
        if not output.finished:
            return
        pending.unfinished.remove(index)
        pending.outputs[index] = completion
        pending.grammars.pop(index, None)
        cached = output.num_cached_tokens or 0
        pending.computed_tokens += len(request.computed_prompt) - cached
        if index == 0:
            pending.cached_tokens = cached
            if request.scoring is not None:
                scores = self._on_workers(WeightsExtension.tandem_take_scores, request.id)
                pending.prompt = scores[0]
        if not pending.unfinished:
            del self._pending[request.id]
            self._queued.discard(request.id)
            step.results.append(pending.result())

    def abort(self, ids: Sequence[str]) -> None:
        known = [self._pending.pop(id_) for id_ in ids if id_ in self._pending]
        self._queued.difference_update(ids)
        for pending in known:
            self._led.pop(pending.request.id, None)
        self._engine.abort_request(
            [_sample_id(each.request.id, index) for each in known for index in each.unfinished]
        )
        for pending in known:
            if pending.request.scoring is not None:
                self._on_workers(WeightsExtension.tandem_discard_scores, pending.request.id)

    def finish(self, ids: Sequence[str]) -> StepOutput:
        assert self._aside is None
        step = StepOutput()
        for pending in [self._pending[id_] for id_ in ids if id_ in self._pending]:
            found = [
                (index, *output_so_far(self._engine, pending.ids[index]))
                for index in sorted(pending.unfinished)
                if index in pending.ids
            ]
            ended = {index: output for index, output, _cached in found if output.token_ids}
            if ended.keys() != pending.unfinished:
                continue
            request = pending.request
            for index, output, cached in found:
                if request.streamed and (delta := pending.delta(index, output)) is not None:
                    step.deltas.append(delta)
                pending.computed_tokens += len(request.computed_prompt) - cached
                pending.cached_tokens = cached if index == 0 else pending.cached_tokens
            if 0 in ended and request.scoring is not None:
                scores = self._on_workers(WeightsExtension.tandem_take_scores, request.id)
                pending.prompt = scores[0]
            pending.outputs |= ended
            step.results.append(pending.result())
            self.abort([request.id])
        return step

    @property
    def _idle(self) -> bool:
        return not self._pending or self._aside is not None

    def pause(self) -> None:
        assert self._aside is None
        # This moves running requests to the queue.
        emptied = self._engine.reset_prefix_cache(reset_running_requests=True)
        assert emptied, "the engine did not empty its prefix cache"
        self._aside = _Aside(
            waiting=take_waiting(self._engine), unplaced=self._unplaced, led=self._led
        )
        self._unplaced, self._led = deque(), {}
        left = self._scheduler.get_num_unfinished_requests()
        assert not left, f"{left} requests would be computed while the engine is paused"

    def resume(self) -> None:
        assert self._aside is not None
        put_back(self._engine, self._aside.waiting)
        self._unplaced, self._led = self._aside.unplaced, self._aside.led
        self._aside = None

    def carry_over(self, ids: Sequence[str], *, adapter: str | None = None) -> None:
        begun = []
        for pending in (self._pending[id_] for id_ in ids if id_ in self._pending):
            pending.request = replace(pending.request, adapter=adapter)
            for index in pending.unfinished:
                id_ = pending.ids.get(index)  # None if vLLM does not have the sample yet
                tokens = self._scheduler.requests[id_].num_output_tokens if id_ else 0
                pending.carried_at[index] = (*pending.carried_at.get(index, ()), tokens)
                begun += [id_] if id_ else []
        if adapter is not None:
            use_adapter(self._engine, begun, self._adapters[adapter])
            self._on_workers(WeightsExtension.tandem_use_adapter, begun, self._adapters[adapter])

    def load(self, directory: Path) -> frozenset[str]:
        return self._load(directory.name, WeightsExtension.tandem_load, str(directory))

    def load_handoff(self, handoff: common_pb2.Handoff) -> frozenset[str]:
        return self._load(handoff.name, WeightsExtension.tandem_load_handoff, handoff)

    def _load(
        self,
        name: str,
        method: Callable[Concatenate[WeightsExtension, Arguments], set[str]],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> frozenset[str]:
        assert self._idle, "a load needs an idle engine"
        try:
            missing = self._on_workers(method, *args, **kwargs)
        except Exception as error:
            raise WeightsTouched(f"vLLM could not load {name}: {describe(error)}") from error
        self._adapters.clear()  # vLLM dropped them with the old weights
        return frozenset().union(*missing)

    def weight_sums(self) -> dict[str, int]:
        return sums_of_workers(self._on_workers(WeightsExtension.tandem_weight_sums))

    def sleep(self, level: SleepLevel) -> None:
        assert not self._pending, "sleep needs an idle engine"
        self._asleep = True
        if level is SleepLevel.DROP_WEIGHTS:
            for name in list(self._adapters):
                self.remove_adapter(name)
        self._sleeper.sleep(level)

    def wake_weights(self) -> None:
        self._sleeper.wake("weights")

    def wake_cache(self) -> None:
        self._sleeper.wake("kv_cache")
        self._asleep = False

    def memory(self) -> EngineMemory:
        """On GPUs, `device` is the fullest GPU's use."""
        each = self._on_workers(WeightsExtension.tandem_memory)
        device = max if self.facts.device == "cuda" else sum
        return EngineMemory(
            device=device(worker.device for worker in each),
            host=sum(worker.host for worker in each),
        )

    def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    def score(self, tokens: Sequence[int]) -> Float32Array:
        assert self._idle, "scoring needs an idle engine"
        self.add(EngineRequest.to_score("score", list(tokens)))
        while "score" in self._pending:
            for result in self.step().results:
                assert result.prompt is not None and result.prompt.logprobs is not None
                return result.prompt.logprobs[1:]
        raise InternalError("vLLM ended a scoring request without a result")

    def add_adapter(self, name: str, directory: Path) -> None:
        number = next(self._adapter_numbers)
        # The name keys the prefix cache. The number separates it from entries of an earlier load.
        request = LoRARequest(f"{name}#{number}", number, str(directory))
        try:
            added = self._engine.add_lora(request)
        except Exception as error:
            raise LoadFailed(f"vLLM refuses {name} as an adapter: {describe(error)}") from error
        if not added:
            raise LoadFailed(f"vLLM refuses {name} as an adapter")
        method = WeightsExtension.tandem_adapter_sums
        try:
            differ = adapters_differ(self._on_workers(method, number, str(directory)))
        except Exception as error:  # usually from its files
            self._engine.remove_lora(number)
            raise LoadFailed(
                f"{name} cannot be compared with its files: {describe(error)}"
            ) from error
        if differ:
            self._engine.remove_lora(number)
            raise LoadFailed(f"{name}: the engine does not hold this adapter, but other numbers")
        self._adapters[name] = request

    def remove_adapter(self, name: str) -> None:
        self._engine.remove_lora(self._adapters.pop(name).lora_int_id)

    def shut_down(self) -> None:
        """Free the memory, so that this process may make another engine."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._engine
        cleanup_dist_env_and_memory()

    def _load_tokenizer(self) -> None:
        """Load the tokenizer at the first stop string, not at every start."""
        if has_tokenizer(self._engine):
            return
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._model)
        except Exception as error:  # the library raises nothing narrower
            raise UnsupportedInput(
                "stop strings need the model's tokenizer, which does not load: "
                f"{without_paths(describe(error))}"
            ) from error
        use_tokenizer(self._engine, tokenizer)
