from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sampler_service.engine import EngineResult, StepOutput
from sampler_service.weights.loader import LoadableVersion
from tandem.errors import InternalError, LoadFailed
from tests.support.fake_engine import BASE, NEW, Bench
from tests.support.published_adapters import LAYER, RANK, adapter, pair, write_base
from tests.support.unreliable_disk import Fault, UnreliableDisk


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def test_adapters_and_the_base_model_run_together_without_a_load(base: Path, tmp_path: Path):
    bench = Bench(base=base, rank=RANK)
    one, two = (adapter(tmp_path, number) for number in (1, 2))
    answers = [bench.ask(version, version.name, steps=9) for version in (one, BASE, two)]
    bench.settle()
    assert [answer.result(0).version for answer in answers] == [one, BASE, two]
    assert frozenset({one.name, None, two.name}) in bench.engine.together
    assert bench.loader.loads == []
    assert set(bench.scheduler.status.adapters) == {one.name, two.name}


def test_an_adapter_is_added_while_others_run_and_serves_after_its_canary(
    base: Path, tmp_path: Path
):
    bench = Bench(base=base, rank=RANK)
    running = bench.ask(BASE, "running", steps=50)
    bench.turns(2)
    load = bench.scheduler.load(adapter(tmp_path, 1))
    bench.turns(1)
    assert load.result(0).canary_difference == 0.0
    assert not running.done()
    assert bench.engine.admitted == ["running", "canary of run/v1"]


def test_an_adapter_without_a_canary_serves_at_once(base: Path, tmp_path: Path):
    bench = Bench(base=base, rank=RANK)
    version = adapter(tmp_path, 1, canary=False)
    answer = bench.ask(version, "a")
    bench.turns(1)
    assert answer.result(0).version == version
    assert bench.engine.admitted == ["a"]


def test_a_request_for_an_adapter_brings_the_base_weights_back_first(base: Path, tmp_path: Path):
    bench = Bench(base=base, rank=RANK)
    version = adapter(tmp_path, 1)
    answers = [bench.ask(v, f"{i}") for i, v in enumerate([version, NEW, version])]
    bench.settle()
    again = bench.ask(version, "again")
    bench.settle()
    assert [answer.result(0).version for answer in answers] == [version, NEW, version]
    assert again.result(0).version == version
    assert bench.loader.loads == ["run/v1", "base/m"]
    assert bench.engine.admitted.count("canary of run/v1") == 2, "the load took the adapter out"


def test_the_least_recently_used_adapter_is_evicted_for_a_new_one(base: Path, tmp_path: Path):
    bench = Bench(base=base, rank=RANK, room=2)
    versions = [adapter(tmp_path, number) for number in range(1, 4)]
    for index in (0, 1, 0, 2):
        bench.ask(versions[index], f"{index}/{bench.now}")
        bench.settle()
    assert set(bench.engine.adapters) == {"run/v1", "run/v3"}


def test_an_adapter_with_requests_is_never_evicted(base: Path, tmp_path: Path):
    bench = Bench(base=base, rank=RANK, room=2)
    versions = [adapter(tmp_path, number) for number in range(1, 6)]
    answers = [
        bench.ask(version, f"{version.name}/{n}", steps=5 + n)
        for n in range(3)
        for version in versions
    ]
    bench.settle()  # the fake asserts that none is removed during its requests
    assert [a.result(0).version for a in answers] == versions * 3


def test_traffic_for_some_adapters_does_not_keep_another_out_for_ever(base: Path, tmp_path: Path):
    bench = Bench(base=base, rank=RANK, room=1, patience=2.0)
    busy, late = adapter(tmp_path, 1), adapter(tmp_path, 2)
    bench.ask(busy, "busy/0", steps=3)
    bench.turns(2)
    waiting = bench.ask(late, "late")
    for number in range(1, 20):
        bench.ask(busy, f"busy/{number}", steps=3)
        bench.now += 0.5
        bench.turns(1)
    assert waiting.result(0).version == late


def test_a_canary_that_differs_refuses_the_adapter_alone(base: Path, tmp_path: Path):
    bench = Bench(base=base, rank=RANK)
    bad, good = adapter(tmp_path, 1), adapter(tmp_path, 2)
    bench.engine.computed = {bad.name: [0.0, 0.001]}
    refused, answer, load = bench.ask(bad, "a"), bench.ask(good, "b"), bench.scheduler.load(bad)
    bench.settle()
    for future in (refused, load):
        with pytest.raises(LoadFailed, match=r"differ from the trainer's by 0\.001"):
            future.result(0)
    assert answer.result(0).version == good
    assert set(bench.engine.adapters) == {good.name}


def test_a_canary_that_the_engine_cannot_compute_refuses_the_adapter_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bench = Bench(base=base, rank=RANK)
    bad, step = adapter(tmp_path, 1), bench.engine.step

    def fail_canaries() -> StepOutput:
        output, failure = step(), InternalError("vLLM ended a sample with an error")
        for index, each in enumerate(output.results):
            if each.id == f"canary of {bad.name}":
                output.results[index] = EngineResult(id=each.id, samples=(), failure=failure)
        return output

    monkeypatch.setattr(bench.engine, "step", fail_canaries)
    refused, answer = bench.ask(bad, "a"), bench.ask(BASE, "b")
    bench.settle()
    with pytest.raises(LoadFailed, match="no canary was computed: vLLM ended a sample"):
        refused.result(0)
    assert answer.result(0).version == BASE


def test_cancelling_all_requests_of_an_unverified_adapter_leaves_the_scheduler_running(
    base: Path, tmp_path: Path
):
    bench = Bench(base=base, rank=RANK)
    version = adapter(tmp_path, 1)
    bench.ask(BASE, "running", steps=1)
    gone = bench.ask(version, "gone")
    bench.adapters.load_adapter(bench.adapters.verify(version, lambda: None))
    assert gone.cancel()
    bench.turns(1)
    assert bench.scheduler.status.adapters == (version.name,)


def _no_config(path: Path) -> None:
    (path / "adapter_config.json").unlink()


def _cut_short(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("spoil", [_no_config, _cut_short])
def test_a_damaged_adapter_is_refused_before_the_engine_sees_it(base: Path, tmp_path: Path, spoil):
    bench = Bench(base=base, rank=RANK)
    version = adapter(tmp_path, 1)
    spoil(version.path)
    refused, answer = bench.ask(version, "a"), bench.ask(BASE, "b")
    bench.settle()
    with pytest.raises(LoadFailed):
        refused.result(0)
    assert answer.result(0).version == BASE
    assert bench.engine.adapters == {}


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        (pair(LAYER, rank=8), {"r": 8}, "rank 8; this sampler was started for ranks up to 4"),
        (pair(LAYER, rank=2), {}, "rank 4 they must be"),
        (pair(LAYER, outputs=7), {}, r"for a matrix \[6, 5\]"),
        (pair("model.layers.9.mlp.up_proj"), {}, "does not have"),
        ({"lm_head.weight": np.zeros((9, 5), np.float32)}, {}, "no matrix of an adapter"),
        ({k: v for k, v in pair(LAYER).items() if "lora_A" in k}, {}, "they must be"),
        (pair(LAYER), {"use_dora": True}, "use_dora"),
        (pair(LAYER), {"bias": "all"}, "bias"),
        (pair(LAYER), {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (pair(LAYER), {"r": "four"}, "names no rank"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(
    base: Path, tmp_path: Path, tensors, config, reason
):
    bench = Bench(base=base, rank=RANK)
    refused = bench.ask(adapter(tmp_path, 1, tensors=tensors, **config), "a")
    bench.settle()
    with pytest.raises(LoadFailed, match=reason):
        refused.result(0)
    assert bench.engine.adapters == {}


def test_an_adapter_of_a_tied_output_head_fits_the_embeddings(base: Path, tmp_path: Path):
    bench = Bench(base=base, rank=RANK)
    version = adapter(tmp_path, 1, tensors=pair("lm_head", outputs=9))
    answer = bench.ask(version, "a")
    bench.settle()
    assert answer.result(0).version == version


def test_an_adapter_is_loaded_by_a_host_that_looked_too_early_and_whose_files_get_stale(
    base: Path, tmp_path: Path
):
    (data := tmp_path / "run").mkdir()
    with UnreliableDisk(data) as disk:
        early = LoadableVersion(name="run/v1", path=data / "v1", adapter=True)
        with disk.at("sampler"):
            bench = Bench(base=base, rank=RANK)
            answer = bench.ask(early, "early")
            bench.settle()
            with pytest.raises(LoadFailed, match="not a published weight version"):
                answer.result(0)
        version = adapter(data, 1)
        with disk.at("sampler"):
            assert not version.path.exists()
            answer = bench.ask(version, "told")
            bench.settle()
            assert answer.result(0).version == version
            for strike in disk.strikes(Fault.STALE):
                bench = Bench(base=base, rank=RANK)
                with strike:
                    answer = bench.ask(version, "stale")
                    bench.settle()
                assert answer.result(0).version == version, strike.hit


def test_a_sampler_without_adapters_says_so(base: Path, tmp_path: Path):
    bench = Bench(base=base)
    refused = bench.ask(adapter(tmp_path, 1), "a")
    bench.settle()
    with pytest.raises(LoadFailed, match="started without any"):
        refused.result(0)


def test_a_load_of_what_serves_does_not_stop_the_engine_for_one_without_room(
    base: Path, tmp_path: Path
):
    bench = Bench(base=base, rank=RANK, room=1)
    here, late = adapter(tmp_path, 1), adapter(tmp_path, 2)
    bench.ask(here, "here")
    bench.settle()
    load, answer = bench.scheduler.load(here), bench.ask(late, "late")
    bench.settle()
    assert load.result(0).version == here
    assert answer.result(0).version == late
    assert bench.loader.loads == []


def test_a_request_that_the_engine_refuses_does_not_stop_it_for_one_without_room(
    base: Path, tmp_path: Path
):
    bench = Bench(base=base, rank=RANK, room=1)
    here, late = adapter(tmp_path, 1), adapter(tmp_path, 2)
    bench.ask(here, "here")
    bench.settle()
    refused, answer = bench.ask(here, "refused", steps=101), bench.ask(late, "late")
    bench.settle()
    assert refused.exception(0) is not None
    assert answer.result(0).version == late
