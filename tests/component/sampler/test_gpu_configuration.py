"""vLLM's arguments on a GPU that is only a number of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sampler_service.vllm import configuration
from sampler_service.vllm.configuration import engine_args
from tandem.errors import WorkerStartFailed
from tandem.settings.workers import SamplerSettings

GIB = 2**30


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "choose_device", lambda _wanted: "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (50 * GIB, 80 * GIB))


def arguments(tmp_path: Path, model: dict[str, Any] | None = None, **settings: Any) -> Any:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", **(model or {})}))
    return engine_args(tmp_path, SamplerSettings(**settings), sleeps=True)


def test_an_engine_has_our_worker_and_its_budget_as_a_share(tmp_path):
    args = arguments(tmp_path, gpu_memory_bytes=8 * GIB)
    assert args.worker_cls == "sampler_service.vllm.gpu_worker.BudgetedWorker"
    assert args.gpu_memory_utilization == 0.1
    assert arguments(tmp_path).gpu_memory_utilization == pytest.approx(0.45)
    assert not args.additional_config, "it is part of the key of compiled code"


@pytest.mark.parametrize(
    "budget", [{"gpu_memory_bytes": 51 * GIB}, {"gpu_memory_utilization": 0.9}]
)
def test_a_budget_that_is_not_free_is_refused_before_anything_starts(tmp_path, budget):
    with pytest.raises(WorkerStartFailed, match=r"of which 50\.0 GiB are free"):
        arguments(tmp_path, **budget)


def test_graphs_are_captured_for_few_sizes_and_for_no_more_sequences_than_there_may_be(tmp_path):
    args = arguments(tmp_path)
    assert (args.max_num_seqs, len(args.cudagraph_capture_sizes)) == (256, 16)
    assert args.cudagraph_capture_sizes[-1] == 512
    assert arguments(tmp_path, max_num_seqs=16).cudagraph_capture_sizes == [1, 2, 4, 8, 16, 24, 32]
    assert arguments(tmp_path, max_num_seqs=1).cudagraph_capture_sizes == [1, 2]
    assert arguments(tmp_path, max_num_seqs=1024).cudagraph_capture_sizes[-1] == 512


@pytest.mark.parametrize(
    ("model", "tuned"),
    [({}, False), ({"num_experts": 8}, None), ({"num_local_experts": 4}, None)],
)
def test_only_a_mixture_of_experts_is_tuned(tmp_path, model, tuned):
    assert arguments(tmp_path, model).enable_flashinfer_autotune is tuned
