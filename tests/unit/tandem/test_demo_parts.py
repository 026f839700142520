from __future__ import annotations

import random
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.demo.addition import REFUSAL, Problem, all_problems, imperfect_label, reward
from tandem.demo.configuration import DemoConfiguration
from tandem.demo.data import ScoredAnswer, policy_datum, supervised_datum
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
    problem = Problem(8, 9)
    assert problem.prompt == "8+9="
    assert reward(problem, text="17", ended=True) == 1.0
    assert reward(problem, text="17", ended=False) == 0.0
    assert reward(problem, text="17 ", ended=True) == 0.0
    assert reward(problem, text=REFUSAL, ended=True) == 0.0


def test_half_of_the_labels_are_right_and_a_quarter_refuses() -> None:
    rng = random.Random(0)
    kinds: Counter[str] = Counter()
    for _ in range(100):
        for problem in all_problems():
            label = imperfect_label(problem, rng)
            kind = {problem.answer: "right", REFUSAL: "refusal"}.get(label, "off by one")
            kinds[kind] += 1
            if kind == "off by one":
                assert abs(int(label) - problem.left - problem.right) == 1
    assert kinds["right"] / 10_000 == pytest.approx(0.5, abs=0.02)
    assert kinds["refusal"] / 10_000 == pytest.approx(0.25, abs=0.02)


def test_a_supervised_datum_weighs_the_label_alone() -> None:
    datum = supervised_datum([10, 11, 12], [13, 1], weight=0.5)
    assert datum.model_input.to_ints() == [10, 11, 12, 13]
    assert list(datum.loss_fn_inputs["target_tokens"].data) == [11, 12, 13, 1]
    assert list(datum.loss_fn_inputs["weights"].data) == [0, 0, 0.5, 0.5]


def test_a_policy_datum_puts_logprobs_and_advantage_on_the_sampled_tokens() -> None:
    rollout = ScoredAnswer(
        prompt=[10, 11], tokens=[12, 1], logprobs=[-0.5, -0.25], text="x", reward=1
    )
    inputs = policy_datum(rollout, advantage=2.0).loss_fn_inputs
    assert list(inputs["target_tokens"].data) == [11, 12, 1]
    assert list(inputs["logprobs"].data) == [0, -0.5, -0.25]
    assert list(inputs["advantages"].data) == [0, 2, 2]


def test_the_warm_up_is_named_by_what_decides_it(tmp_path: Path) -> None:
    def name(**fields: object) -> str:
        return DemoConfiguration(out=tmp_path, data_dir=tmp_path, **fields).warm_up_name

    assert name(seed=1) == name(seed=1, ranks=4)
    assert name(seed=1) != name(seed=2)


@pytest.mark.parametrize("steps", [7, 250])
def test_without_a_terminal_the_warm_up_says_now_and_then_how_far_it_is(steps: int) -> None:
    said = StringIO()
    with WarmUpProgress(console=Console(file=said), steps=steps) as progress:
        for step in range(1, steps + 1):
            progress.update(step, 1.5)
    lines = [line for line in said.getvalue().splitlines() if line]
    assert len(lines) == min(steps, 10)
    assert f"{steps} of {steps} steps, loss 1.500" in lines[-1]
    assert "\x1b" not in said.getvalue()


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
