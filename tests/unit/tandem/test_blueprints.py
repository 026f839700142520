from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.blueprint_notebooks import notebook_of
from tandem.blueprints.catalog import blueprint_named, find_blueprints
from tandem.blueprints.description import Blueprint, read_blueprint
from tandem.blueprints.junit import junit_report
from tandem.blueprints.running import BlueprintResult, violations_of
from tandem.errors import InvalidField, InvalidRequest, UserError

DESCRIPTION = """
title = "A test"
about = "It returns numbers."
models = ["my/*"]
[needs]
minutes = 1
[parameters.steps]
about = "how many"
type = "int"
default = 3
minimum = 1
maximum = 9
[parameters.mode]
about = "which"
type = "str"
default = "fast"
choices = ["fast", "slow"]
[metrics.reward]
at_least = 0.9
[metrics.loss]
at_most = 0.5
"""


def written(folder: Path, text: str = DESCRIPTION, name: str = "some") -> Path:
    place = folder / name
    place.mkdir(parents=True)
    (place / "blueprint.toml").write_text(text)
    (place / "train.py").write_text("def train(run): return {}\n")
    return place


@pytest.fixture
def blueprint(tmp_path) -> Blueprint:
    return read_blueprint(written(tmp_path))


def test_parameters_have_their_defaults_or_given_values_in_their_types(blueprint):
    assert blueprint.values_of({}) == {"steps": 3, "mode": "fast"}
    assert blueprint.values_of({"steps": "4", "mode": "slow"}) == {"steps": 4, "mode": "slow"}


@pytest.mark.parametrize(
    ("given", "field", "sentence"),
    [
        ({"steps": 10}, "steps", "steps is 10; allowed: from 1 to 9"),
        ({"steps": "many"}, "steps", "steps is 'many', not of the type int"),
        ({"mode": "safe"}, "mode", "mode is 'safe'; choose one of fast, slow"),
        ({"step": 1}, "step", "'step' is no parameter of some; known: steps"),
    ],
)
def test_a_value_beyond_its_bounds_is_refused_with_its_name(blueprint, given, field, sentence):
    with pytest.raises(InvalidField) as refused:
        blueprint.values_of(given)
    assert (refused.value.field, refused.value.message) == (field, sentence)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("minutes = 1", "minutes = 0"), "needs.minutes: Input should be greater than 0"),
        (("default = 3", "default = 30"), "steps"),
        (('title = "A test"', ""), "title: Field required"),
        (('title = "A test"', "title = "), "cannot be used"),
        (("[metrics.reward]", "[metric.reward]"), "metric"),
    ],
)
def test_a_faulty_description_is_unusable_with_the_reason(tmp_path, change, sentence):
    written(tmp_path, DESCRIPTION.replace(*change))
    assert sentence in find_blueprints([tmp_path])["some"]
    with pytest.raises(InvalidRequest, match="the blueprint some is unusable"):
        blueprint_named("some", [tmp_path])


def test_a_folder_adds_blueprints_beside_ours(tmp_path):
    written(tmp_path, name="mine")
    assert {"mine", "grpo-arithmetic"} <= find_blueprints([tmp_path]).keys()
    with pytest.raises(UserError, match=r"no blueprint 'other'; known: mine, "):
        blueprint_named("other", [tmp_path])


def test_a_package_adds_blueprints_and_a_faulty_one_is_named(tmp_path, monkeypatch):
    for package, entry in (("good", "some_package"), ("bad", "no_package.inside")):
        about = tmp_path / f"{package}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[tandem.blueprints]\n{package} = {entry}\n")
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").write_text("raise AssertionError('imported')\n")
    written(tmp_path / "some_package", name="packed")
    monkeypatch.syspath_prepend(tmp_path)
    found = find_blueprints()
    assert isinstance(found["packed"], Blueprint)
    assert "its entry point no_package.inside is unusable" in found["bad"]


def test_our_blueprints_are_usable():
    found = find_blueprints()
    assert found
    for name, each in found.items():
        assert isinstance(each, Blueprint), (name, each)
        assert each.values_of({}).keys() == each.parameters.keys()


def test_the_notebooks_follow_from_the_descriptions():
    """`python -m scripts.blueprint_notebooks` writes them."""
    for name, each in find_blueprints().items():
        assert isinstance(each, Blueprint)
        assert (each.folder / f"{name}.ipynb").read_text(encoding="utf-8") == notebook_of(each)


def test_a_blueprint_fits_models_of_its_patterns(blueprint):
    assert blueprint.fits("my/model") and not blueprint.fits("your/model")


@pytest.mark.parametrize(
    ("numbers", "violations"),
    [
        ({"reward": 0.9, "loss": 0.5}, {}),
        ({"reward": 0.8, "loss": 0.1}, {"reward": "0.8, and at least 0.9 is expected"}),
        ({"reward": float("nan"), "loss": 0}, {"reward": "nan, and at least 0.9 is expected"}),
        ({"reward": 1}, {"loss": "the program returned no such number"}),
    ],
)
def test_numbers_beyond_their_bounds_are_violations(blueprint, numbers, violations):
    assert violations_of(blueprint, numbers) == violations


def test_the_junit_report_has_a_case_for_the_program_and_for_each_bound(blueprint):
    good = BlueprintResult(
        blueprint="some",
        model="my/model",
        values={"steps": 3},
        seconds=2.0,
        numbers={"reward": 0.8, "loss": 0.1},
        violations={"reward": "0.8, and at least 0.9 is expected"},
    )
    suite = ElementTree.fromstring(junit_report(blueprint, good))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "0")
    cases = {each.get("name"): [child.tag for child in each] for each in suite.iter("testcase")}
    assert cases == {"trains": [], "reward is at least 0.9": ["failure"], "loss is at most 0.5": []}
    failed = replace(good, numbers={}, violations={}, error="ValueError: \x1b[1mno\0")
    (case,) = ElementTree.fromstring(junit_report(blueprint, failed)).iter("testcase")
    assert [(child.tag, child.get("message")) for child in case] == [("error", "ValueError: [1mno")]
