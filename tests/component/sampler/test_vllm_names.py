"""vLLM's internals that our code uses exist in the installed version.

The CUDA build needs no GPU here."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sampler_service.vllm
from sampler_service.vllm.internals import NAMES, check_version, meet_in_a_file

OF_OTHERS = {"_C", "_host_emptyCache"}  # torch's


def test_the_installed_version_was_checked():
    check_version()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_there(name):
    module, _, path = name.partition(":")
    owner, _, attribute = path.partition(".")
    found = getattr(import_or_skip(module), owner)
    if not attribute:
        return
    # An attribute that only a constructor sets is found in the source.
    sources = (inspect.getsource(each) for each in found.__mro__ if each is not object)
    declared = hasattr(found, attribute) or attribute in inspect.get_annotations(found)
    assert declared or any(f"self.{attribute}" in each for each in sources)


def import_or_skip(module: str) -> ModuleType:
    """Skip the test if the module needs a GPU's driver."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if "libcuda" not in str(error):
            raise
        pytest.skip(f"{module} needs a driver")


def trees() -> list[ast.Module]:
    return [
        ast.parse(file.read_text())
        for file in Path(sampler_service.vllm.__file__).parent.glob("*.py")
    ]


def imported() -> list[str]:
    """MODULE:NAME of the adapter's imports from vLLM, also those for types."""
    found = {
        f"{node.module}:{name.name}"
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for name in node.names
    }
    return sorted(found)


@pytest.mark.parametrize("name", imported())
def test_an_imported_name_is_there(name):
    module, _, attribute = name.partition(":")
    if not hasattr(import_or_skip(module), attribute):
        importlib.import_module(f"{module}.{attribute}")


def test_every_private_name_of_another_object_is_listed():
    listed = {name.replace(":", ".").rpartition(".")[2] for name in NAMES}
    reached = {
        node.attr
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_)", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert reached - listed == OF_OTHERS


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vllm.v1.worker.gpu_worker:Worker.sleep", {"level": 1}),
        ("vllm.v1.worker.gpu_worker:Worker.load_model", {"load_dummy_weights": False}),
        ("vllm.v1.worker.gpu_worker:Worker.determine_available_memory", {}),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner.profile_run", {}),
        ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.profile_run", {}),
        ("vllm.model_executor.models.registry:_run_in_subprocess", {"fn": print}),
    ],
)
def test_a_function_takes_what_it_is_given(name, arguments):
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        owner, found = found, getattr(found, part)
    receiver = [owner] if inspect.isclass(owner) else []
    inspect.signature(found).bind(*receiver, **arguments)


def test_the_version_is_checked_before_anything_slow_is_imported():
    code = "import sys, sampler_service.vllm.internals; print({'torch', 'vllm'} & {*sys.modules})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "set()", answer.stderr


def test_engines_that_start_at_once_meet_in_files_of_their_own_and_take_no_port():
    import torch.distributed as dist
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    meet_in_a_file()
    modules = [multiproc_executor, uniproc_executor]
    found = [each.get_distributed_init_method("127.0.0.1", 1) for each in modules * 10]
    assert len(set(found)) == 20
    assert {each.partition("://")[0] for each in found} == {"file"}
    dist.init_process_group("gloo", init_method=found[0], rank=0, world_size=1)
    dist.destroy_process_group()
