"""The floor: the demo's RL step in one process, with plain torch and vLLM.

The process (`python -m benchmarks.floor MODEL THREADS [compiled]`) makes a step on request
(`benchmarks.in_turn`). Like the demo, a step has 100 prompts × 8 samples of at most 4 tokens, 48
updates of 100 sequences, and new weights for the engine. The loss is importance sampling with the
reward as advantage. Optimizer, clipping and rewards are equal."""

from __future__ import annotations

import os
import sys

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "0" if "compiled" in sys.argv[3:] else "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
os.environ |= {key: value for key, value in _ENVIRONMENT.items() if key not in os.environ}

import random
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.in_turn import answers
from benchmarks.plain_update import PlainUpdates, Sample
from tandem.demo.addition import MAX_ANSWER_TOKENS, sums

GROUP, MINIBATCHES, EPOCHS, EOS = 8, 8, 6, 1


class OneProcess:
    def __init__(self, model: Path, *, threads: int, compiled: bool) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                dtype="float32",
                enforce_eager=True,
                disable_log_stats=True,
                max_model_len=512,
                max_num_seqs=1024,
                max_num_batched_tokens=8192,
                distributed_executor_backend="uni",
                logprobs_mode="processed_logprobs",
            )
        )
        # vLLM pins its process to one core, but training uses all.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        self.threads = threads
        torch.set_num_threads(threads)
        self.policy = PlainUpdates(model, compiled=compiled)
        self.examples = sums()
        self.prompts = [self.tokenizer.encode(example.prompt) for example in self.examples]
        self.random = random.Random(0)
        self.directory = tempfile.TemporaryDirectory()

    def sample(self, round_: int) -> list[Sample]:
        torch.set_num_threads(1)  # two contend in the engine's small operations
        for index, prompt in enumerate(self.prompts):
            params = SamplingParams(
                n=GROUP,
                max_tokens=MAX_ANSWER_TOKENS,
                temperature=1.0,
                seed=round_ * 1000 + index,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self.engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        found: dict[int, list[Sample]] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    index = int(output.request_id)
                    found[index] = [self._score(index, answer) for answer in output.outputs]
        torch.set_num_threads(self.threads)
        return [sample for index in range(len(self.prompts)) for sample in found[index]]

    def _score(self, index: int, answer) -> Sample:
        tokens = list(answer.token_ids)
        ended = tokens[-1] == EOS
        text = self.tokenizer.decode(tokens[:-1] if ended else tokens)
        logprobs = [
            step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)
        ]
        value = float(text == self.examples[index].data["answer"])
        return Sample(self.prompts[index], tokens, logprobs, value)

    def train(self, samples: list[Sample]) -> None:
        order = list(range(len(samples)))
        size = len(order) // MINIBATCHES
        for _epoch in range(EPOCHS):
            self.random.shuffle(order)
            for start in range(0, len(order), size):
                self.policy.update([samples[index] for index in order[start : start + size]])

    def synchronise(self) -> None:
        """Reload the new weights into the engine, in place, from a file."""
        state = self.policy.model.state_dict()
        if self.policy.model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        path = Path(self.directory.name)
        save_file(state, str(path / "model.safetensors"), metadata={"format": "pt"})
        self.engine.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        assert self.engine.reset_prefix_cache()

    def step(self, round_: int) -> dict[str, float]:
        """Make a step. Return the seconds of its parts, and processor seconds as "trainer CPU"."""
        started, busy = time.perf_counter(), time.process_time()
        samples = self.sample(round_)
        sampled = time.perf_counter()
        self.train(samples)
        trained = time.perf_counter()
        self.synchronise()
        ended = time.perf_counter()
        return {
            "sample": sampled - started,
            "train": trained - sampled,
            "sync": ended - trained,
            "seconds": ended - started,
            "trainer CPU": time.process_time() - busy,
        }


def main() -> None:
    model, threads = Path(sys.argv[1]), int(sys.argv[2])
    answers(OneProcess(model, threads=threads, compiled="compiled" in sys.argv[3:]).step)


if __name__ == "__main__":
    main()
