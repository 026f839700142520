"""Starts vLLM's engine for a model, in the calling process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sampler_service.vllm.environment import choose_model_runner
from sampler_service.vllm.internals import (
    check_version,
    inspect_models_here,
    meet_in_a_file,
)
from sampler_service.vllm.libraries import import_libraries
from tandem.errors import WorkerStartFailed
from tandem.settings.workers import SamplerSettings
from tandem.telemetry import get_log

if TYPE_CHECKING:
    from sampler_service.vllm.engine import VllmEngine


def start_engine(
    model: Path, settings: SamplerSettings, on_lost: Callable[[], None], *, sleeps: bool
) -> VllmEngine:
    """Import vLLM and return an engine that has computed a token.

    Raises `WorkerStartFailed`, and vLLM's own errors."""
    if not (model / "config.json").is_file():
        raise WorkerStartFailed(f"{model} is no model directory: it has no config.json")
    check_version()
    choose_model_runner(settings)
    started = time.monotonic()
    import_libraries()
    meet_in_a_file()
    inspect_models_here()
    from sampler_service.vllm.engine import VllmEngine

    imported = time.monotonic()
    # vLLM warns about each of our settings. Its warnings matter from the first request on.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    engine = VllmEngine(model, settings, sleeps=sleeps, on_lost=on_lost)
    engine.score([0, 0])  # some kernels refuse a model only at run time
    logging.getLogger("vllm").setLevel(logging.WARNING)
    # Each load would list modules without own tensors, which `Loader` checks.
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    get_log().info(
        "engine_started",
        import_seconds=round(imported - started, 2),
        engine_seconds=round(time.monotonic() - imported, 2),
    )
    return engine
