from __future__ import annotations

import asyncio
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.demo.addition import MAX_ANSWER_TOKENS, REFUSAL, imperfect, reward, sums
from tandem.demo.configuration import DemoConfiguration
from tandem.demo.report import WarmUpProgress
from tandem.demo.tiny_model import EOS, write_tiny_model
from tandem.stack import Endpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "model"
    write_tiny_model(path, seed=3)
    return path


def test_the_base_model_loads_in_transformers_and_has_a_million_parameters(model: Path) -> None:
    loaded, info = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert 1_000_000 < sum(p.numel() for p in loaded.parameters()) < 1_100_000


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(
    model: Path, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "same", seed=3)
    write_tiny_model(tmp_path / "other", seed=4)
    name = "model.safetensors"
    assert (tmp_path / "same" / name).read_bytes() == (model / name).read_bytes()
    assert (tmp_path / "other" / name).read_bytes() != (model / name).read_bytes()


def test_the_tokenizer_reads_characters_and_writes_them_back(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer.encode("3+4=7")) == 5
    assert tokenizer.decode(tokenizer.encode("a b\tc?")[:3]) == "a b"
    assert tokenizer.convert_tokens_to_ids(EOS) == tokenizer.eos_token_id == 1


def test_only_the_right_digits_followed_by_the_end_are_rewarded() -> None:
    example = sums()[89]
    assert example.prompt == "8+9="
    answers = {"17": 1.0, "17 ": 0.0, "1700": 0.0, REFUSAL: 0.0}
    assert {each: asyncio.run(reward(example, each)) for each in answers} == answers
    longest = max(len(str(each.data["answer"])) for each in sums())
    assert longest < MAX_ANSWER_TOKENS, "an answer without an end is longer than a right one"


def test_half_of_the_labels_are_right_and_a_quarter_refuses() -> None:
    right = {each.prompt: str(each.data["answer"]) for each in sums()}
    kinds: Counter[str] = Counter()
    for example in imperfect(10_000, seed=0):
        label, answer = str(example.data["answer"]), right[example.prompt]
        kind = {answer: "right", REFUSAL: "refusal"}.get(label, "off by one")
        kinds[kind] += 1
        if kind == "off by one":
            assert abs(int(label) - int(answer)) == 1
    assert kinds["right"] / 10_000 == pytest.approx(0.5, abs=0.02)
    assert kinds["refusal"] / 10_000 == pytest.approx(0.25, abs=0.02)


def test_the_warm_up_is_named_by_what_decides_it(tmp_path: Path) -> None:
    def name(**fields: object) -> str:
        return DemoConfiguration(out=tmp_path, data_dir=tmp_path, **fields).warm_up_name

    assert name(seed=1) == name(seed=1, ranks=4)
    assert name(seed=1) != name(seed=2)


class _Record:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step, values):
        self.steps.append(step)

    def rollouts(self, step, rollouts): ...


@pytest.mark.parametrize("steps", [7, 250])
def test_the_warm_up_says_now_and_then_how_far_it_is(steps: int) -> None:
    said, record = StringIO(), _Record()
    progress = WarmUpProgress(console=Console(file=said), steps=steps, record=record)
    for step in range(1, steps + 1):
        progress.log(step, {"loss": 1.5})
    lines = [line for line in said.getvalue().splitlines() if line]
    assert len(lines) == min(steps, 10)
    assert f"{steps} of {steps} steps, loss 1.500" in lines[-1]
    assert record.steps == list(range(1, steps + 1))


def test_the_key_of_a_gateway_that_runs_elsewhere_is_kept_nowhere(tmp_path: Path) -> None:
    endpoint = Endpoint(url="http://gateway.example", pid=0, api_key="tml-secret")
    configuration = DemoConfiguration(out=tmp_path, data_dir=tmp_path, endpoint=endpoint)
    assert "tml-secret" not in configuration.model_dump_json() + repr(configuration)


def test_a_demo_against_a_gateway_elsewhere_cannot_choose_its_ranks(tmp_path: Path) -> None:
    where = ["--base-url", "http://gateway.example", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["demo", "--ranks", "2", *where])
    assert done.exit_code == 2
    assert "--ranks is for a gateway that the demo starts" in done.output
    assert not (tmp_path / "out").exists()
