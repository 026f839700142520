"""Every loss against golden numbers, or against a second writing of its formula."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.losses.cases import (
    AGGREGATIONS,
    CASES,
    EXPECTED,
    GOLDEN_LENGTH,
    POLICY_LOSSES,
    Data,
    Golden,
    compute,
    golden_data,
    gradient,
    random_data,
)
from trainer_service.losses import LOSSES
from trainer_service.losses.base import AGGREGATION_SETTINGS
from trainer_service.losses.policy import CORRECTION_SETTINGS, KL_SETTINGS, kl_term

GOLDENS = [(name, golden) for name, case in CASES.items() for golden in case.goldens]
SHARED = (*AGGREGATION_SETTINGS, *KL_SETTINGS, *CORRECTION_SETTINGS)


def test_every_loss_has_a_row():
    assert CASES.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", CASES)
def test_every_loss_has_a_golden_number_or_a_second_formula(name):
    preference = name in ("dpo", "ipo", "kto")  # tested below
    assert CASES[name].goldens or CASES[name].reference or preference


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    ("name", "golden"), GOLDENS, ids=lambda each: getattr(each, "expected", each)
)
def test_golden_numbers(name: str, golden: Golden, aggregation: str):
    config = {**golden.settings, "aggregation": aggregation, "max_length": GOLDEN_LENGTH}
    got = compute(LOSSES[name], golden_data(golden.inputs), config).loss
    expected = EXPECTED[golden.expected][AGGREGATIONS[aggregation]]
    assert float(got) == pytest.approx(expected, abs=2e-8)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.reference])
def test_the_formula_written_down_once_more(name):
    reference = CASES[name].reference
    assert reference is not None
    for data in (golden_data({"logprobs": "rollout"}), random_data()):
        inputs = {key: values for key, values in data.inputs.items() if key != "mask"}
        without_mask = Data(data.logprobs, inputs, data.sizes)
        got = float(compute(LOSSES[name], without_mask).loss)
        assert got == pytest.approx(reference(without_mask), rel=1e-12)


def test_the_leash_of_dro_is_the_golden_squared_log_ratio():
    data = golden_data({"logprobs": "rollout"})
    data.inputs["advantages"] = torch.zeros_like(data.logprobs)
    got = compute(LOSSES["dro"], data, {"beta": 2.0, "aggregation": "token_mean"}).loss
    assert float(got) == pytest.approx(EXPECTED["log_ratio_sq_rollout_token_mean"], abs=1e-8)


def test_golden_sequence_ratios_of_gspo():
    data = golden_data({"logprobs": "old"})
    result = compute(LOSSES["gspo"], data)
    ratios = torch.tensor(EXPECTED["gspo_seq_ratio"], dtype=torch.float64)
    summed = float((ratios * torch.tensor(data.sizes)).sum())
    assert float(result.sums[LOSSES["gspo"].sum_names.index("ratio")]) == pytest.approx(
        summed, abs=1e-6
    )
    assert float(result.maxima[0]) == pytest.approx(float(ratios.max()), abs=1e-7)


def preference_data(p: list[float], ref: list[float], **more: float) -> Data:
    values = {"ref_logprobs": ref, "weights": [1.0] * len(p)}
    inputs = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    for name, value in more.items():
        inputs[name] = torch.full((len(p),), value, dtype=torch.float64)
    return Data(torch.tensor(p, dtype=torch.float64), inputs, (1,) * len(p))


@pytest.mark.parametrize(("name", "golden"), [("dpo", "dpo_beta0.1"), ("ipo", "ipo_beta0.1")])
def test_golden_pairs(name, golden):
    data = preference_data([-12.0, -15.0], [-12.5, -14.0])
    got = float(compute(LOSSES[name], data).loss)
    assert got == pytest.approx(EXPECTED[golden], abs=1e-7)
    twice = preference_data([-12.0, -15.0] * 2, [-12.5, -14.0] * 2)
    assert float(compute(LOSSES[name], twice).loss) == pytest.approx(2 * got)
    assert float(compute(LOSSES[name], twice, {"aggregation": "mean"}).loss) == pytest.approx(got)


@pytest.mark.parametrize("z0_given_as", ["setting", "input"])
@pytest.mark.parametrize(("good", "p", "ref"), [(1.0, -12.0, -12.5), (0.0, -15.0, -14.0)])
def test_golden_kto(good, p, ref, z0_given_as):
    """The fixture's chosen and rejected answers. The policy moved them by 0.5 and -1."""
    name = "chosen" if good else "rejected"
    as_input = {"z0": 0.05} if z0_given_as == "input" else {}
    data = preference_data([p], [ref], desirable=good, **as_input)
    config = {} if as_input else {"z0": 0.05}
    got = float(compute(LOSSES["kto"], data, config).loss)
    assert got == pytest.approx(EXPECTED[f"kto_beta0.1_z0.05_{name}"], abs=1e-7)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_golden_kl_terms(kind):
    data = golden_data({"ref_logprobs": "ref"})
    ratio = torch.ones_like(data.logprobs)
    found = kl_term(data.logprobs, data.inputs["ref_logprobs"], ratio=ratio, kind=kind)
    expected = [
        value
        for row, size in zip(EXPECTED[f"kl_{kind}"], data.sizes, strict=True)
        for value in row[:size]
    ]
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=0
    )
    if kind == "k3":
        assert float(found.mean()) == pytest.approx(EXPECTED["kl_k3_token_mean"], abs=1e-8)


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    p, ref = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -1.2]).double()
    leaf = p.clone().requires_grad_(True)
    value = kl_term(leaf, ref, ratio=torch.ones(2).double(), kind="k3_plus")
    torch.testing.assert_close(value, kl_term(p, ref, ratio=torch.ones(2).double(), kind="k3"))
    value.sum().backward()
    torch.testing.assert_close(leaf.grad, p - ref)


def test_the_unbiased_kl_is_the_ratio_times_k3():
    data = golden_data({"logprobs": "rollout", "old_logprobs": "old", "ref_logprobs": "ref"})
    ratio = (data.logprobs - data.inputs["old_logprobs"]).exp()
    k3 = kl_term(data.logprobs, data.inputs["ref_logprobs"], ratio=ratio, kind="k3")
    plain = compute(LOSSES["ppo"], data).loss
    got = compute(LOSSES["ppo"], data, {"kl_coeff": 0.3, "kl_type": "unbiased"}).loss
    assert float(got - plain) == pytest.approx(0.3 * float((ratio * k3).sum()))


def test_the_gradient_of_a_token_of_ppo_is_the_golden_one():
    found = gradient(LOSSES["ppo"], golden_data({"logprobs": "old"}))
    expected = EXPECTED["grad_ppo_token_1_0(numeric,analytic)"][1]
    assert float(found[3]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_documented_defaults_hold(name):
    loss, documented = LOSSES[name], CASES[name].settings
    own = {each.name: each.default for each in loss.settings if each not in SHARED}
    assert own == documented
    data = random_data()
    omitted, given = compute(loss, data), compute(loss, data, documented)
    assert float(omitted.loss) == float(given.loss)


def test_the_shared_defaults_hold():
    shared = {each.name: each.default for each in AGGREGATION_SETTINGS + KL_SETTINGS}
    assert shared == {
        "aggregation": "token_sum",
        "max_length": 0.0,
        "kl_coeff": 0.0,
        "kl_type": "k3",
    }
    assert {each.name: each.default for each in CORRECTION_SETTINGS} == {
        "correction": "none",
        "tis_cap": 2.0,
        "seq_tis_cap": 2.0,
        "mis_low": 0.5,
        "mis_high": 2.0,
        "seq_mis_low": 0.5,
        "seq_mis_high": 2.0,
        "icepop_low": 0.5,
        "icepop_high": 5.0,
        "geometric_low": 0.99,
        "geometric_high": 1.01,
        "off_policy_delta": 0.1,
    }


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_at_the_sampling_policy_every_gradient_is_minus_the_advantage_as_ppo_has_it(name):
    data = golden_data({})
    data.inputs["logprobs"] = data.logprobs.clone()
    found = gradient(LOSSES[name], data)
    torch.testing.assert_close(found, -data.inputs["advantages"])
    torch.testing.assert_close(found, gradient(LOSSES["ppo"], data))


def test_a_ratio_beyond_e_to_the_20_is_held_there():
    p, mu = torch.tensor([-1.0]).double(), torch.tensor([-90.0]).double()
    data = Data(p, {"logprobs": mu, "advantages": torch.ones(1).double()}, (1,))
    got = float(compute(LOSSES["importance_sampling"], data).loss)
    assert got == pytest.approx(-math.exp(20))
