"""The engine as a library, in this process and in its own. `test_generation` runs this file."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from sampler_service import GeneratedSample, Generation
from tandem.errors import LoadFailed, TokenOutOfVocabulary, WorkerDied, WorkerStartFailed
from tests.support.sampler_worker import PROMPT, plain_logprobs, publish

PAGE = Path(__file__).parents[3] / "docs" / "sampling.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
SETTINGS = {"device": "cpu", "kv_cache_bytes": 2**24}


@pytest.fixture(scope="module", params=[False, True], ids=["here", "own-process"])
def generation(request: pytest.FixtureRequest, model: Path) -> Iterator[Generation]:
    before = set(psutil.Process().children())
    with Generation(model, process=request.param, **SETTINGS) as generation:
        children = set(psutil.Process().children()) - before
        assert len(children) == request.param
        assert {sample.version for sample in generation.generate(PROMPT)} == {f"base/{model.name}"}
        yield generation
    assert not any(child.is_running() for child in children)
    with pytest.raises(WorkerDied, match="closed"):
        generation.generate(PROMPT)


@pytest.fixture
def base(generation: Generation, model: Path) -> Generation:
    generation.sync_weights(model)
    return generation


def assert_computed_by(weights: Path, samples: list[GeneratedSample]) -> None:
    for sample in samples:
        expected = plain_logprobs(weights, PROMPT + sample.tokens)[len(PROMPT) - 1 :]
        assert np.abs(expected - sample.logprobs).max() < 1e-4


def test_samples_have_the_models_logprobs_and_repeat_with_their_seed(base: Generation, model: Path):
    samples = base.generate(PROMPT, n=3, max_tokens=20, seed=1, stop=[])
    assert [(len(s.tokens), s.stop_reason) for s in samples] == [(20, "length")] * 3
    assert len({tuple(sample.tokens) for sample in samples}) == 3
    assert_computed_by(model, samples)
    again = base.generate(PROMPT, n=3, max_tokens=20, seed=1, stop=[])
    assert [sample.tokens for sample in again] == [sample.tokens for sample in samples]
    (stopped,) = base.generate(PROMPT, max_tokens=20, seed=1, stop=[samples[0].tokens[4]])
    assert stopped.tokens == samples[0].tokens[:5] and stopped.stop_reason == "stop"


def test_threads_and_lists_of_prompts_get_their_own_answers(base: Generation):
    prompts = [[5 + i, 9] for i in range(20)]
    together = base.generate_all(prompts, 2, max_tokens=6, seed=2)
    with ThreadPoolExecutor(8) as threads:
        apart = list(threads.map(lambda ids: base.generate(ids, 2, max_tokens=6, seed=2), prompts))
    assert [[s.tokens for s in each] for each in apart] == [
        [s.tokens for s in each] for each in together
    ]


def test_weights_come_from_a_directory_a_version_or_tensors(
    base: Generation, changed: Path, tmp_path: Path
):
    tensors = load_file(changed / "model.safetensors")
    version = publish(changed, tmp_path, number=1)
    before = base.generate(PROMPT, max_tokens=8, seed=4, temperature=0.5)
    for weights in (changed, Path(version.path), tensors):
        name = base.sync_weights(weights)
        samples = base.generate(PROMPT, n=2, max_tokens=8, seed=4, stop=[])
        assert {sample.version for sample in samples} == {name}
        assert_computed_by(changed, samples)
    assert base.sync_weights(Path(version.path)) == version.name
    assert base.generate(PROMPT, max_tokens=8, seed=4, temperature=0.5) != before


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(base: Generation, model: Path):
    tensors = load_file(model / "model.safetensors")
    (first, *_) = sorted(tensors)
    for wrong in (
        {**tensors, first: tensors[first][:-1]},
        {name: tensor for name, tensor in tensors.items() if name != first},
    ):
        with pytest.raises(LoadFailed, match=first):
            base.sync_weights(wrong)
    assert_computed_by(model, base.generate(PROMPT, max_tokens=8, stop=[]))


def test_a_sleeper_wakes_with_its_weights_or_with_new_ones(
    base: Generation, model: Path, changed: Path
):
    samples = base.generate(PROMPT, max_tokens=8, seed=5, stop=[])
    for drop in (False, True):
        base.sleep(drop_weights=drop)
        base.wake()
        woken = base.generate(PROMPT, max_tokens=8, seed=5, stop=[])
        assert [sample.tokens for sample in woken] == [sample.tokens for sample in samples]
    base.sleep(drop_weights=True)
    base.wake(load_file(changed / "model.safetensors"))
    assert_computed_by(changed, base.generate(PROMPT, max_tokens=8, stop=[]))
    base.sleep(drop_weights=True)
    with pytest.raises(ValueError, match="wake with newer weights"):
        base.wake()
    base.wake(model)
    assert_computed_by(model, base.generate(PROMPT, max_tokens=8, stop=[]))


def test_a_wrong_request_is_refused_and_others_go_on(base: Generation):
    with pytest.raises(TokenOutOfVocabulary, match="token 4000"):
        base.generate([5, 4000])
    assert base.generate(PROMPT, max_tokens=1)


def test_the_example_of_the_documents_runs(
    base: Generation, changed: Path, monkeypatch: pytest.MonkeyPatch
):
    (snippet,) = [each for each in SNIPPETS if "Generation(" in each]
    monkeypatch.setattr("sampler_service.generation.Generation", lambda *_, **__: nullcontext(base))
    found: dict[str, object] = {}
    exec(snippet.replace("models/newer", str(changed)), found)
    assert [len(samples) for samples in found["many"]] == [2, 2]
    assert base.generate(PROMPT, max_tokens=1)[0].version.startswith(f"{changed.name}#")


def test_a_directory_without_a_model_starts_nothing(tmp_path: Path):
    for process in (False, True):
        with pytest.raises(WorkerStartFailed, match="no model directory"):
            Generation(tmp_path, process=process, **SETTINGS)


def test_the_package_is_imported_without_its_engine():
    code = (
        "import sys, sampler_service; heavy = {'torch', 'vllm', 'numpy'}; "
        "assert not heavy & sys.modules.keys(); sampler_service.Generation; "
        "assert not {'torch', 'vllm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
