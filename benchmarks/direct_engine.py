"""Tokens per second of vLLM called directly: `python -m benchmarks.direct_engine MODEL`.

Its process answers each [workload, round] with tokens per second (`benchmarks.in_turn`), and each
["reload", folder] with the seconds of vLLM's own reload."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.floor import OneProcess
from benchmarks.in_turn import answers
from benchmarks.workloads import WORKLOADS, Workload, prompts


def run(policy: OneProcess, workload: Workload, round_: int) -> float:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    started = time.perf_counter()
    for index, prompt in enumerate(prompts(workload)):
        params = SamplingParams(
            n=workload.samples,
            max_tokens=workload.max_tokens,
            temperature=1.0,
            seed=round_ * 1000 + index,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        policy.engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    tokens = 0
    while policy.engine.has_unfinished_requests():
        for output in policy.engine.step():
            if output.finished:
                tokens += sum(len(answer.token_ids) for answer in output.outputs)
    return tokens / (time.perf_counter() - started)


def reload(policy: OneProcess, folder: str) -> float:
    """Return the seconds of vLLM's in-place reload, with the prefix cache emptied."""
    started = time.perf_counter()
    policy.engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    assert policy.engine.reset_prefix_cache()
    return time.perf_counter() - started


def main() -> None:
    policy = OneProcess(Path(sys.argv[1]), threads=1, compiled=False)
    answers(
        lambda name, what: (
            reload(policy, what) if name == "reload" else run(policy, WORKLOADS[name], what)
        )
    )


if __name__ == "__main__":
    main()
