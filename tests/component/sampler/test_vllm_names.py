"""What of vLLM's insides is reached into is there, in the version that is installed."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

from sampler_service.vllm.internals import NAMES, check_version


def test_the_installed_version_was_checked():
    check_version()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_there(name):
    module, _, path = name.partition(":")
    owner, _, attribute = path.partition(".")
    found = getattr(importlib.import_module(module), owner)
    # What is set in a constructor, and no more, is found in the source alone.
    sources = (inspect.getsource(each) for each in found.__mro__ if each is not object)
    assert hasattr(found, attribute) or any(f"self.{attribute}" in each for each in sources)


def test_the_version_is_checked_before_anything_slow_is_imported():
    code = "import sys, sampler_service.vllm.internals; print({'torch', 'vllm'} & {*sys.modules})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "set()", answer.stderr
