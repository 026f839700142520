"""Scores sequences with real engines, one after the other: `python -m tests.support.engine_scores
FILE`.

The file is a JSON list of `{"base", "tokens", "full", "adapter", "expected"}`: paths of a base
model and versions, and expected values of some. Each entry gets `"found"`: logprobs by those names,
or the error."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from sampler_service.engine import EngineRequest, PromptScoring
from sampler_service.vllm.libraries import import_libraries
from tandem.settings.workers import SamplerSettings


def scores(base: Path, tokens: list[int], *, full: str = "", adapter: str = "") -> list[float]:
    from sampler_service.vllm.engine import VllmEngine

    settings = SamplerSettings(
        device="cpu", kv_cache_bytes=4 * 2**20, max_lora_rank=4 if adapter else 0, max_adapters=1
    )
    engine = VllmEngine(base, settings)
    if full and (missing := engine.load(Path(full))):
        raise ValueError(f"left without a value: {sorted(missing)}")
    if adapter:
        engine.add_adapter("adapter", Path(adapter))
    engine.add(
        EngineRequest(
            id="scored",
            prompt=tokens,
            num_samples=1,
            max_tokens=1,
            temperature=0.0,
            scoring=PromptScoring(first=1),
            adapter="adapter" if adapter else None,
        )
    )
    while not (results := engine.step().results):
        pass
    prompt = results[0].prompt
    assert prompt is not None and prompt.logprobs is not None
    return [float(value) for value in prompt.logprobs[1:]]


def main(file: Path) -> None:
    import_libraries()
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    jobs = json.loads(file.read_text())
    for job in jobs:
        base, tokens, found = Path(job["base"]), job["tokens"], job.setdefault("found", {})
        for kind in job["expected"]:
            try:
                found[kind] = scores(base, tokens, **{kind: job[kind]})
            except Exception as error:  # noqa: BLE001 - the others are to be computed
                found[kind] = f"{type(error).__name__}: {error}"
            gc.collect()
            cleanup_dist_env_and_memory()
    file.write_text(json.dumps(jobs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
