from __future__ import annotations

import inspect
import re
from pathlib import Path

from scripts import first_hour
from tandem.cli.demo import demo
from tandem.demo.configuration import DemoConfiguration


def test_the_commands_of_the_pages_have_no_comments():
    up, *others = first_hour.commands()
    assert up.startswith(".venv/bin/tandem up --model my/model=")
    for command in ("status", "usage", "logs", "runs list", "runs show RUN", "logs WORKER"):
        assert f".venv/bin/tandem {command}" in others


def test_every_placeholder_of_a_command_is_filled_in():
    path = "tinker://s-1:train:0/sampler_weights/x"
    filled = first_hour.filled_in(path, worker="trainer-s-1-0")
    text = "\n".join(first_hour.commands())
    assert set(re.findall(r"\b[A-Z]{2,}\b", text)) == set(filled)
    assert (filled["RUN"], filled["PATH"]) == ("s-1:train:0", path)


def test_the_operations_are_about_a_key_and_a_base_model():
    assert first_hour.operations("models/tiny") == [
        ".venv/bin/tandem config",
        ".venv/bin/tandem keys create --owner ann --role member --name laptop --expires 30d",
        ".venv/bin/tandem keys list",
        ".venv/bin/tandem models add my-model models/tiny",
        ".venv/bin/tandem models list",
        ".venv/bin/tandem models remove my-model",
    ]


def test_the_model_that_readme_names_is_the_one_that_the_demo_writes():
    data_dir = inspect.signature(demo).parameters["data_dir"].default
    written = DemoConfiguration(out=Path("runs"), data_dir=data_dir).model_path
    assert first_hour.commands()[0].endswith(f"={written}")


def test_the_resuming_script_is_long_enough_for_a_ctrl_c_after_a_save():
    assert f'"addition", {first_hour.RESUMED_STEPS}, 2' in first_hour.resuming_script()
    assert "step {step + 1} of" in first_hour.resuming_script()


def test_the_example_for_openai_is_a_completion():
    assert "openai.OpenAI(" in first_hour.openai_example()
    assert "client.completions.create" in first_hour.openai_example()
