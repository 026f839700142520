"""The same work without Tandem, in separate processes: a plain loop, and vLLM alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


def plain_loop(
    model_path: Path,
    device: str,
    sequences: Sequence[Int64Array],
    *,
    rows: int,
    rounds: int,
    compiled: bool,
) -> tuple[list[float], int]:
    """Train all parameters with float32 masters, `rows` sequences of one length at a time.

    On a GPU it computes in bfloat16, with the fused AdamW. Returns the seconds of each round after
    the first two, and the device's peak bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    on_gpu = device == "cuda"
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(device)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    tokens = torch.from_numpy(np.stack(list(sequences))).to(device)
    seconds = []
    for _ in range(rounds + 2):
        began = time.perf_counter()
        for part in tokens.split(rows):
            with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
                logits = model(input_ids=part[:, :-1], use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum"
                )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_reserved() if on_gpu else 0
    return seconds[2:], peak


def engine_alone(
    model_path: Path,
    device: str,
    prompts: Sequence[list[int]],
    *,
    samples: int,
    max_tokens: int,
    max_num_seqs: int,
    memory_share: float,
    rounds: int,
) -> list[float]:
    """Return the seconds in which vLLM answers all prompts, for each round but the first."""
    if device == "cpu":
        from benchmarks import floor  # noqa: F401 - sets the environment
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(model_path),
        dtype="bfloat16" if device == "cuda" else "float32",
        max_model_len=2048 if device == "cuda" else 512,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=memory_share,
        enforce_eager=device == "cpu",
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
    )
    seconds = []
    for round_ in range(rounds + 1):
        began = time.perf_counter()
        engine.generate(
            [{"prompt_token_ids": each} for each in prompts],
            [
                SamplingParams(
                    n=samples,
                    max_tokens=max_tokens,
                    temperature=1.0,
                    seed=round_ * 10_000 + number,
                    logprobs=0,
                    ignore_eos=True,
                    detokenize=False,
                )
                for number in range(len(prompts))
            ],
            use_tqdm=False,
        )
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
