"""The registry of trainer backends, and the configurations of job backends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.backends import BackendDescription, register_backend
from tandem.backends.frameworks import Framework, installed_frameworks
from tandem.backends.jobs import JobPaths, JobResources
from tandem.backends.registry import backends_of_runs, descriptions, job_backend, known_backends
from tandem.backends.rendering import configure, job_paths, render_job
from tandem.backends.trl import TrlConfiguration
from tandem.errors import FrameworkMissing, InvalidField, UnsupportedByBackend
from tandem.protocol.worker import TrainingSpec
from tests.support.other_packages import register
from tests.support.trl_configurations import (
    EVERY_FIELD,
    NOT_OF_ALL,
    OF_METHODS,
    TRL,
    values,
    wrong,
)


@settings(max_examples=200, deadline=None)
@given(values)
def test_a_configuration_survives_its_own_json(given_values):
    made = configure(TRL, given_values)
    assert configure(TRL, json.loads(made.model_dump_json())) == made
    for name, value in given_values.items():
        assert getattr(made, name) == value


@settings(max_examples=200, deadline=None)
@given(values, st.sampled_from(sorted({*EVERY_FIELD, "method"})), wrong)
def test_an_invalid_field_is_named_by_the_error(given_values, name, value):
    with pytest.raises(InvalidField) as raised:
        configure(TRL, given_values | {name: value})
    assert raised.value.field == name
    assert raised.value.details == {"field": name}


@settings(max_examples=200, deadline=None)
@given(values, st.data())
def test_a_field_that_the_method_does_not_use_is_refused_by_its_name(given_values, data):
    own = OF_METHODS[str(given_values["method"])]
    for name in sorted(NOT_OF_ALL.keys() - own.keys()):
        with pytest.raises(InvalidField, match="and the method is") as raised:
            configure(TRL, given_values | {name: data.draw(NOT_OF_ALL[name])})
        assert raised.value.field == name


@pytest.mark.parametrize(
    ("given_values", "field", "sentence"),
    [
        ({}, "method", "method: Field required"),
        ({"method": "ppo"}, "method", "'sft', 'dpo', 'kto' or 'grpo'"),
        ({"method": "sft", "learnign_rate": 1}, "learnign_rate", "'learnign_rate' is no setting"),
        ({"method": "kto", "batch_size": 1}, "batch_size", "give it 2 at least"),
        ({"method": ["sft"]}, "method", "Input should be 'sft'"),
    ],
)
def test_a_refused_setting_says_how_to_correct_it(given_values, field, sentence):
    with pytest.raises(InvalidField, match=sentence) as raised:
        configure(TRL, given_values)
    assert raised.value.field == field


def test_a_group_of_completions_must_divide_a_step_of_each_process():
    values = {"method": "grpo", "group_size": 6, "batch_size": 3}
    divided = configure(TRL, {**values, "gradient_accumulation": 2})
    divided.validate_resources(JobResources(processes=2))
    with pytest.raises(InvalidField, match="each process has 3 completions") as raised:
        configure(TRL, values).validate_resources(JobResources(processes=2))
    assert raised.value.field == "group_size"


@pytest.mark.parametrize(("rank", "file"), [(0, "model.safetensors"), (4, "adapter_config.json")])
def test_a_jobs_outputs_are_a_whole_model_or_an_adapter(rank, file):
    made = configure(TRL, {"method": "sft", "lora_rank": rank})
    places = JobPaths(python="/p", program="/q", folder="/jobs/a", model="/m")
    assert f"/jobs/a/result/{file}" in made.outputs(places)


@pytest.mark.parametrize(
    "command",
    [
        ("accelerate", "launch"),
        ("/opt/trl/bin/accelerate", "launch"),
        ("python", "-m", "accelerate.commands.launch"),
        ("sh", "-c", "exec accelerate launch train.py"),
    ],
)
def test_accelerate_is_refused_as_a_launcher_with_the_reason(command):
    class Accelerated(TrlConfiguration):
        def command(self, paths: JobPaths) -> tuple[str, ...]:
            return command

    backend = BackendDescription("mine", "job", "trl", (), Accelerated)
    places = JobPaths(python="/p", program="/q", folder="/jobs/accelerate", model="/m")
    with pytest.raises(UnsupportedByBackend, match="does not read the PET_ variables"):
        render_job(backend, configure(backend, {"method": "sft"}), places, 2)


def test_a_command_that_is_not_text_is_refused():
    class Numbered(TrlConfiguration):
        def args(self, paths: JobPaths) -> tuple[str, ...]:
            return ("train.py", 7)  # type: ignore[return-value]

    backend = BackendDescription("mine", "job", "trl", (), Numbered)
    places = JobPaths(python="/p", program="/q", folder="/jobs/a", model="/m")
    with pytest.raises(UnsupportedByBackend, match="mine renders 7"):
        render_job(backend, configure(backend, {"method": "sft"}), places, 2)


def test_a_job_runs_with_the_interpreter_that_its_host_reports():
    found = {"trl": Framework("trl", "1.16.0", "/opt/trl/bin/python")}
    places = job_paths(TRL, folder="/jobs/a", model="/m", frameworks=found)
    assert places.python == "/opt/trl/bin/python"
    assert Path(places.program).parts[-3:] == ("trainer_service", "jobs", "trl")


def test_a_job_of_a_cluster_finds_its_framework_at_the_place_of_the_image(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/opt/tandem/.venv")
    places = job_paths(TRL, folder="/jobs/a", model="/m", frameworks={})
    assert places.python == "/opt/tandem/.venv/trl/bin/python"


def test_a_host_without_the_framework_is_refused_with_the_command_that_installs_it():
    found = {"torch": Framework("torch", "2.13", "/opt/tandem/bin/python")}
    with pytest.raises(FrameworkMissing, match="make setup-trl"):
        job_paths(TRL, folder="/jobs/a", model="/m", frameworks=found)


# --- The registry -----------------------------------------------------------------------------


def test_torchtune_is_refused_by_name_with_the_reason():
    with pytest.raises(InvalidField, match=r"0\.6\.1, is of April 2025; use trl") as raised:
        job_backend("torchtune")
    assert raised.value.field == "backend"


@pytest.mark.parametrize("name", ["fsdp2", "trll"])
def test_a_name_without_job_backend_is_refused_with_those_known(name):
    with pytest.raises(InvalidField, match=f"'{name}' is no job backend; known: trl$"):
        job_backend(name)


def test_a_run_cannot_use_a_job_backend():
    assert "start one with `tandem train`" in backends_of_runs()["trl"]
    assert (backends_of_runs()["fsdp2"], known_backends()["trl"]) == ("", "")


def test_a_package_is_described_by_the_class_in_the_module_of_its_entry_point(
    tmp_path, monkeypatch
):
    register(tmp_path, "two-backends", one="absent:One", two="absent:Two")
    monkeypatch.syspath_prepend(tmp_path)
    found = {name: descriptions()[name] for name in ("one", "two")}
    for name, about in found.items():
        assert isinstance(about, BackendDescription)
        assert (about.name, about.kind, about.framework) == (name, "step", "torch")


JOB = """
from tandem.backends import register_backend
from tandem.backends.jobs import JobConfiguration

@register_backend("other_job", capabilities=())
class OtherJob(JobConfiguration):
    framework = "other"
    size: int = 1

    def validate_resources(self, resources): pass
    def command(self, paths): return (paths.python, "-m", "torch.distributed.run")
    def args(self, paths): return ("-m", "other", str(self.size))
    def environment(self, paths): return {}
    def outputs(self, paths): return ()
"""


def test_a_job_backend_of_a_package_is_rendered_like_the_built_in_one(tmp_path, monkeypatch):
    register(tmp_path, "other-job", other_job="absent:None")
    (tmp_path / "other_job_description.py").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    backend = job_backend("other_job")
    places = JobPaths(python="/p", program="/q", folder="/jobs/a", model="/m")
    spec = render_job(backend, configure(backend, {"size": "3"}), places, 2)
    assert spec.argv == ("/p", "-m", "torch.distributed.run", "-m", "other", "3")
    assert spec.framework == "other"


@pytest.mark.parametrize(
    ("name", "implementation", "error"),
    [("my backend", "a:B", ValueError), ("mine", "", TypeError)],
)
def test_a_description_without_name_or_implementation_is_an_error(name, implementation, error):
    class Training(TrainingSpec):
        pass

    with pytest.raises(error):
        register_backend(name, implementation=implementation, capabilities=())(Training)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no driver')", "of broken-backend is unusable: no driver"),
        ("class Backend: pass", "names no module or class with @register_backend"),
    ],
)
def test_an_unusable_description_is_a_reason_and_no_crash(tmp_path, monkeypatch, code, reason):
    register(tmp_path, "broken-backend", broken="absent:Broken")
    (tmp_path / "broken_backend_description.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_backend_description", raising=False)
    assert reason in known_backends()["broken"]


# --- Frameworks -------------------------------------------------------------------------------


def test_the_metadata_of_installed_packages_is_read_once(tmp_path, monkeypatch):
    register(tmp_path, "measured", measured="measured.module")
    monkeypatch.syspath_prepend(tmp_path)
    assert "measured" in descriptions()
    monkeypatch.setattr("tandem.backends.registry.entry_points", None)  # a call would fail
    assert "measured" in descriptions()


def test_a_framework_of_its_own_environment_is_found_with_its_interpreter(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    folder = tmp_path / "trl" / "lib" / "python3.11" / "site-packages" / "trl-1.16.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.16.0\n")
    python = tmp_path / "trl" / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    (found,) = installed_frameworks(["trl", "absent-framework"])
    assert (found.name, found.version, found.python) == ("trl", "1.16.0", str(python))


def test_a_framework_beside_tandem_has_tandems_interpreter():
    (found,) = installed_frameworks(["torch", "absent"])
    assert Path(found.python) == Path(sys.executable)
