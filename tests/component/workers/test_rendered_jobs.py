"""Commands of job backends, as processes get them."""

from __future__ import annotations

import json
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.backends.jobs import JobPaths
from tandem.backends.rendering import configure, render_job
from tests.support.trl_configurations import TRL, paths, values


def test_two_renders_are_equal_and_a_process_gets_each_word_as_it_is():
    words: list[str] = []
    count = 0

    @settings(max_examples=200, deadline=None)
    @given(values, paths, st.integers(1, 1024))
    def render(given_values: dict[str, object], places: JobPaths, processes: int) -> None:
        nonlocal count
        count += 1
        first, second = (
            render_job(TRL, configure(TRL, given_values), places, processes) for _ in range(2)
        )
        assert first == second
        assert all(type(each) is str for each in (*first.argv, *first.environment.values()))
        assert first.argv[:3] == (places.python, "-m", "torch.distributed.run")
        assert not any(each.startswith("PET_") for each in first.environment)
        assert (first.framework, first.processes, first.attempt) == ("trl", processes, 1)
        words.extend(first.argv)

    render()
    assert count >= 200
    echo = "import json, sys; print(json.dumps(sys.argv[1:]))"
    command = [sys.executable, "-X", "utf8", "-c", echo, *words]
    shown = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    assert json.loads(shown) == words


def test_descriptions_are_found_without_an_import_of_torch():
    code = (
        "import sys; from tandem.backends.registry import descriptions; found = descriptions(); "
        "print(*found, 'torch' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60
    )
    assert shown.stdout == "fsdp2 trl False\n"
