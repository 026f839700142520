from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.losses.cases import (
    EXPECTED,
    Config,
    Data,
    compute,
    golden_data,
    gradient,
    layout_for,
    random_data,
)
from trainer_service.losses import CORRECTIONS, LOSSES, LossSettings
from trainer_service.losses.corrections import Mismatch
from trainer_service.losses.policy import correction_weight, ready

SIZES = (3, 2, 3, 1)  # of the fixture
DEFAULTS = {s.name: s.default for each in CORRECTIONS.values() for s in each.settings}


def mismatch() -> Mismatch:
    data = golden_data({"logprobs": "rollout", "old_logprobs": "old"})
    mu, old = data.inputs["logprobs"], data.inputs["old_logprobs"]
    return Mismatch(
        log_rho=old - mu,
        drift=mu - data.logprobs,
        advantages=data.inputs["advantages"],
        active=torch.ones_like(mu),
    )


def weight(name: str, config: Config) -> torch.Tensor:
    settings = LossSettings({**DEFAULTS, **config})
    return CORRECTIONS[name].weight(mismatch(), settings, layout_for(SIZES))


def by_token(golden: str) -> torch.Tensor:
    rows = EXPECTED[golden]
    flat = [value for row, size in zip(rows, SIZES, strict=True) for value in row[:size]]
    return torch.tensor(flat, dtype=torch.float64)


def by_datum(golden: str) -> torch.Tensor:
    return torch.tensor(EXPECTED[golden], dtype=torch.float64)[layout_for(SIZES).datum]


GOLDEN_WEIGHTS = {
    "tis": ({}, by_token("w_token_truncate_C2")),
    "seq_tis": ({}, by_datum("w_seq_truncate_C2")),
    "mis": ({}, by_token("w_token_mask_0.5_2")),
    "seq_mis": ({}, by_datum("w_seq_mask_0.5_2")),
    "icepop": ({"icepop_high": 2.0}, by_token("w_token_mask_0.5_2")),
    "geometric": (
        {"geometric_low": 0.77, "geometric_high": 1.2},
        ((by_datum("rho_geo") >= 0.77) & (by_datum("rho_geo") <= 1.2)).double(),
    ),
    "off_policy_mask": ({}, by_datum("offpolicy_keep_delta0.1")),
}


def test_every_correction_has_a_golden_weight():
    assert GOLDEN_WEIGHTS.keys() == CORRECTIONS.keys()


@pytest.mark.parametrize("name", GOLDEN_WEIGHTS)
def test_golden_weights(name):
    config, expected = GOLDEN_WEIGHTS[name]
    torch.testing.assert_close(weight(name, config), expected, atol=1e-7, rtol=0)


def test_the_geometric_example_rejects_some_and_keeps_some():
    _, expected = GOLDEN_WEIGHTS["geometric"]
    assert set(expected.tolist()) == {0.0, 1.0}


def test_the_off_policy_mask_looks_at_the_golden_divergence():
    data = mismatch()
    found = layout_for(SIZES).datum_means(data.drift, data.active)
    torch.testing.assert_close(
        found, torch.tensor(EXPECTED["offpolicy_seq_kl"], dtype=torch.float64), atol=1e-7, rtol=0
    )


ALONE_AND_IN_PAIRS = [
    "+".join(names) for count in (1, 2) for names in itertools.combinations(CORRECTIONS, count)
]
UNCLIPPED = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}
BYPASSING: dict[str, Config] = {
    "importance_sampling": {},
    "dppo": {"delta": 1.0},
    **dict.fromkeys(("ppo", "cispo", "gspo"), UNCLIPPED),
}
"""Losses with this gradient, where nothing is clipped: their ratio times the advantage."""
NARROW: Config = {
    **dict.fromkeys(("geometric_low", "seq_mis_low", "mis_low", "icepop_low"), 0.8),
    **dict.fromkeys(("geometric_high", "mis_high", "icepop_high"), 1.2),
    **dict.fromkeys(("tis_cap", "seq_tis_cap"), 1.1),
}
"""Each correction changes some of the random data, and not all."""


def on_policy(name: str, names: str, *, old: bool) -> torch.Tensor:
    """The gradient at the start of a batch. `old` is p, or absent."""
    data = random_data()
    for bound in UNCLIPPED:
        del data.inputs[bound]
    data.inputs.pop("old_logprobs")
    if old:
        data.inputs["old_logprobs"] = data.logprobs.clone()
    config = {**BYPASSING[name], **NARROW, "correction": names}
    return gradient(LOSSES[name], data, config)


@pytest.mark.parametrize("names", ALONE_AND_IN_PAIRS)
@pytest.mark.parametrize("name", BYPASSING)
def test_corrections_make_the_same_gradient_in_bypass_mode_and_out_of_it(name, names):
    found, whole = (on_policy(name, each, old=False) for each in (names, "none"))
    expected, plain = (on_policy("ppo", each, old=True) for each in (names, "none"))
    if {*names.split("+")} <= {"geometric", "off_policy_mask"}:  # these have no weights
        kept = expected != 0
        torch.testing.assert_close(found, whole * kept)
        torch.testing.assert_close(expected, plain * kept)
        assert 0 < kept.sum() < (plain != 0).sum()
    else:
        torch.testing.assert_close(found, expected)
    assert found.any() and not torch.equal(found, whole)


def test_truncation_in_bypass_mode_caps_the_ratio_of_importance_sampling():
    """-Σ min(r, C)·A, with each token's gradient scaled by r/sg(r)."""
    data = golden_data({"logprobs": "rollout"})
    ratio = (data.logprobs - data.inputs["logprobs"]).exp()
    capped = ratio.clamp(max=1.5)
    assert bool((ratio > 1.5).any())
    config = {"correction": "tis", "tis_cap": 1.5}
    got = compute(LOSSES["importance_sampling"], data, config).loss
    assert float(got) == pytest.approx(-float((capped * data.inputs["advantages"]).sum()))
    torch.testing.assert_close(
        gradient(LOSSES["importance_sampling"], data, config), -capped * data.inputs["advantages"]
    )


def test_corrections_are_multiplied():
    data = golden_data({"logprobs": "rollout", "old_logprobs": "old"})
    tokens, layout = ready(data.logprobs, data.inputs), layout_for(SIZES)

    def of(names: str) -> torch.Tensor:
        settings = LossSettings({**DEFAULTS, "correction": names})
        return correction_weight(tokens, settings, layout, ratio=tokens.ratio)

    torch.testing.assert_close(of("tis + off_policy_mask"), of("tis") * of("off_policy_mask"))
    assert of("none").tolist() == [1.0] * len(data.logprobs)


def test_the_sequence_weight_leaves_out_what_is_masked():
    data = golden_data({"logprobs": "rollout", "old_logprobs": "old"})
    mask = torch.tensor([1.0, 0, 1, 1, 1, 0, 1, 1, 1], dtype=torch.float64)
    tokens = ready(data.logprobs, {**data.inputs, "mask": mask})
    settings = LossSettings({**DEFAULTS, "correction": "seq_tis", "seq_tis_cap": 100.0})
    found = correction_weight(tokens, settings, layout_for(SIZES), ratio=tokens.ratio)
    log_rho = (data.inputs["old_logprobs"] - data.inputs["logprobs"]) * mask
    expected = layout_for(SIZES).datum_sums(log_rho).exp()[layout_for(SIZES).datum]
    torch.testing.assert_close(found, expected)


def test_rejected_tokens_are_counted():
    data = golden_data({"logprobs": "rollout", "old_logprobs": "old"})
    loss = LOSSES["ppo"]
    result = compute(loss, data, {"correction": "mis"})
    named = dict(zip(loss.sum_names, map(float, result.sums), strict=True))
    named.update(zip(loss.max_names, map(float, result.maxima), strict=True))
    metrics = loss.metrics(named)
    assert metrics["rejected_tokens:mean"] == pytest.approx(2 / 9)
    assert metrics["correction_weight:mean"] == pytest.approx(
        float(by_token("w_token_mask_0.5_2").mean()), abs=1e-7
    )


def test_a_dialogue_is_judged_turn_by_turn():
    """stable_reinforce drops the sampled sequence that drifted, not the whole datum."""
    count = 6
    sampled = torch.tensor([-1, 0, 0, -1, 1, 1])
    p = torch.full((count,), -2.0, dtype=torch.float64)
    q = torch.tensor([0.0, -2.0, -2.0, 0.0, -4.0, -4.0], dtype=torch.float64)
    inputs = {"logprobs": q, "advantages": torch.ones(count, dtype=torch.float64)}
    layout = layout_for((count,))
    by_turn = type(layout)(**{**vars(layout), "sequence": sampled, "sequences": 2})
    loss = LOSSES["stable_reinforce"]
    leaf = p.clone().requires_grad_(True)
    loss.compute(leaf, inputs, loss.defaults, by_turn).loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, -1.0, -1.0, 0.0, 0.0, 0.0]
    whole = Data(p, inputs, (count,))
    assert gradient(loss, whole).tolist() != leaf.grad.tolist()


def test_stable_reinforce_without_sampler_logprobs_is_reinforce():
    data = golden_data({})
    found = gradient(LOSSES["stable_reinforce"], data)
    torch.testing.assert_close(found, -data.inputs["advantages"])
