"""The test data of each loss, one row each. A loss without a row fails the tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from trainer_service.losses import DatumLayout, Loss, LossResult, LossSettings, Totals

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "losses.json").read_text())
EXPECTED = GOLDEN["expected"]
AGGREGATIONS = {
    "token_sum": "token_sum(tinker)",
    "token_mean": "token_mean(dapo)",
    "seq_mean_token_mean": "seq_mean_token_mean(grpo)",
    "constant": "const_norm_Lmax(dr_grpo)",
}
GOLDEN_LENGTH = 3.0  # Lmax of the fixture

Inputs = dict[str, torch.Tensor]
Config = Mapping[str, float | str]


@dataclass(frozen=True)
class Data:
    """Tokens of whole datums, flat, in float64."""

    logprobs: torch.Tensor
    inputs: Inputs
    sizes: tuple[int, ...]

    def pick(self, datums: Sequence[int]) -> Data:
        ends = np.cumsum(self.sizes)
        places = [
            place
            for datum in datums
            for place in range(ends[datum] - self.sizes[datum], ends[datum])
        ]
        return Data(
            logprobs=self.logprobs[places],
            inputs={name: values[places] for name, values in self.inputs.items()},
            sizes=tuple(self.sizes[datum] for datum in datums),
        )


@dataclass(frozen=True)
class Golden:
    """`inputs` maps input names to the fixture's arrays. `expected` names four numbers, one per
    aggregation."""

    expected: str
    settings: Config = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=lambda: {"logprobs": "old"})


@dataclass(frozen=True)
class Case:
    """`settings`: the loss's own ones with documented defaults. `variants`: settings for the tests
    of invariance. `reference`: an independent formula in numpy, if there is no golden number."""

    settings: Config = field(default_factory=dict)
    goldens: tuple[Golden, ...] = ()
    variants: tuple[Config, ...] = ()
    policy: bool = True
    reference: Callable[[Data], float] | None = None


def layout_for(sizes: Sequence[int], *, totals: Totals | None = None) -> DatumLayout:
    datum = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return DatumLayout(
        datum=datum,
        datums=len(sizes),
        totals=totals or Totals(datums=len(sizes), entries=sum(sizes), active=sum(sizes)),
        sizes=tuple(sizes),
        widths=(0,) * len(sizes),
        sequence=datum,
        sequences=len(sizes),
    )


def totals_of(loss: Loss, data: Data) -> Totals:
    """Count like `validate`."""
    declared = {each.name for each in loss.inputs}
    acts = torch.ones(len(data.logprobs), dtype=torch.bool)
    if "mask" in data.inputs and "mask" in declared:
        acts = data.inputs["mask"] != 0
    elif loss.active:
        acts = data.inputs[loss.active] != 0
    if "logprobs" in data.inputs and "logprobs" in declared:
        acts = acts & torch.isfinite(data.inputs["logprobs"])
    return Totals(datums=len(data.sizes), entries=len(data.logprobs), active=int(acts.sum()))


def settings_of(loss: Loss, config: Config | None = None) -> LossSettings:
    return LossSettings({**loss.defaults.as_dict(), **(config or {})})


def compute(
    loss: Loss, data: Data, config: Config | None = None, *, totals: Totals | None = None
) -> LossResult:
    inputs = {each.name for each in loss.inputs}
    return loss.compute(
        data.logprobs,
        {name: values for name, values in data.inputs.items() if name in inputs},
        settings_of(loss, config),
        layout_for(data.sizes, totals=totals or totals_of(loss, data)),
    )


def gradient(loss: Loss, data: Data, config: Config | None = None) -> torch.Tensor:
    leaf = data.logprobs.clone().requires_grad_(True)
    compute(loss, Data(leaf, data.inputs, data.sizes), config).loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def golden_data(names: Mapping[str, str]) -> Data:
    """Return the fixture without padding, with advantage R - mean and the named inputs."""
    inputs = GOLDEN["inputs"]
    mask = torch.tensor(inputs["mask"], dtype=torch.float64)
    reward = torch.tensor(inputs["reward"], dtype=torch.float64)
    real = mask.bool()
    advantages = (reward - reward.mean())[:, None].expand_as(mask)[real]
    given = {
        name: torch.tensor(inputs[of], dtype=torch.float64)[real] for name, of in names.items()
    }
    return Data(
        logprobs=torch.tensor(inputs["lp"], dtype=torch.float64)[real],
        inputs={"advantages": advantages, "weights": torch.ones_like(advantages), **given},
        sizes=tuple(int(row.sum()) for row in mask),
    )


SIZES = (3, 5, 2, 4, 1, 6)


def random_data(seed: int = 0) -> Data:
    """Return six datums with every declared input of any loss. All numbers differ."""
    random = np.random.default_rng(seed)
    count = sum(SIZES)

    def draw(mean: float, spread: float) -> torch.Tensor:
        return torch.from_numpy(random.normal(mean, spread, count))

    logprobs = draw(-2.0, 0.5)
    per_datum = torch.repeat_interleave(
        torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64), torch.tensor(SIZES)
    )
    return Data(
        logprobs=logprobs,
        inputs={
            "logprobs": logprobs + draw(0.0, 0.3),
            "old_logprobs": logprobs + draw(0.0, 0.2),
            "ref_logprobs": logprobs + draw(0.0, 0.3),
            "advantages": draw(0.0, 1.0),
            "mask": torch.from_numpy((random.random(count) < 0.8).astype(np.float64)),
            "weights": torch.from_numpy(random.uniform(0.2, 1.0, count)),
            "sequence_ratio_mask": torch.from_numpy(random.uniform(0.2, 1.0, count)),
            "clip_low_threshold": torch.full((count,), 0.85, dtype=torch.float64),
            "clip_high_threshold": torch.full((count,), 1.15, dtype=torch.float64),
            "desirable": per_datum,
            "z0": per_datum * 0.03 + 0.01,
        },
        sizes=SIZES,
    )


# --- The formulas without golden numbers, by datum and token in plain numpy --------------------


def _tokens(data: Data) -> list[list[tuple[float, float, float]]]:
    """Return (p, q, A) of each token of each datum."""
    rows = zip(
        data.logprobs.tolist(),
        data.inputs["logprobs"].tolist(),
        data.inputs["advantages"].tolist(),
        strict=True,
    )
    flat, found = list(rows), []
    for size in data.sizes:
        found.append(flat[:size])
        flat = flat[size:]
    return found


def dro_reference(data: Data) -> float:
    return -sum(p * a - 0.05 / 2 * (p - q) ** 2 for datum in _tokens(data) for p, q, a in datum)


def stable_reinforce_reference(data: Data) -> float:
    total = 0.0
    for datum in _tokens(data):
        mean = np.exp(np.mean([p - q for p, q, _ in datum]))
        if 0.5 <= mean <= 2:
            for p, q, a in datum:
                total += -min(np.exp(p - q), 2) * p * a + 0.01 * (p - q) ** 2 / 2
    return total


# --- The rows -----------------------------------------------------------------------------------

BOTH = {"logprobs": "rollout", "old_logprobs": "old"}
MEANS: tuple[Config, ...] = (
    {"aggregation": "token_mean"},
    {"aggregation": "seq_mean_token_mean"},
    {"aggregation": "constant", "max_length": 7.0},
)
CORRECTED: tuple[Config, ...] = (
    {"correction": "tis+off_policy_mask", "kl_coeff": 0.1},
    {"correction": "seq_tis", "kl_coeff": 0.1, "kl_type": "k1", "aggregation": "token_mean"},
    {"correction": "mis", "mis_low": 0.8, "mis_high": 1.2, "kl_coeff": 0.1, "kl_type": "k2"},
    {"correction": "seq_mis+icepop", "kl_coeff": 0.1, "kl_type": "k3_plus"},
    {"correction": "geometric", "geometric_low": 0.8, "geometric_high": 1.2}
    | {"kl_coeff": 0.1, "kl_type": "unbiased"},
)
POLICY: tuple[Config, ...] = (*MEANS, *CORRECTED)
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

CASES: dict[str, Case] = {
    "cross_entropy": Case(goldens=(Golden("sft_nll", inputs={}),), variants=MEANS, policy=False),
    "importance_sampling": Case(
        goldens=(Golden("importance_sampling(rollout)", inputs={"logprobs": "rollout"}),),
        variants=POLICY,
    ),
    "ppo": Case(
        settings={**CLIP, "dual_clip": 0.0},
        goldens=(
            Golden("ppo_clip_0.2"),
            Golden("ppo_clip_higher_0.2_0.28", {"clip_high_threshold": 1.28}),
            Golden("dual_clip_c3", {"dual_clip": 3.0}),
            Golden("tis_token_x_ppo_0.2", {"correction": "tis"}, BOTH),
            Golden(
                "icepop_token_mask_0.5_2_x_ppo_0.2",
                {"correction": "icepop", "icepop_high": 2.0},
                BOTH,
            ),
            Golden("icepop_token_mask_0.5_2_x_ppo_0.2", {"correction": "mis"}, BOTH),
            Golden("mis_seq_mask_0.5_2_x_ppo_0.2", {"correction": "seq_mis"}, BOTH),
            Golden(
                "grpo_full_beta0.04_k3_eps0.2",
                {"kl_coeff": 0.04},
                {"logprobs": "old", "ref_logprobs": "ref"},
            ),
        ),
        variants=(*POLICY, {"dual_clip": 1.5}, {"clip_high_threshold": 1.28}),
    ),
    "cispo": Case(
        settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        goldens=(
            Golden("cispo_cap3_upper_only(trl_form)", {"clip_high_threshold": 3.0}),
            Golden("cispo_clip_0.8_1.28", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}),
        ),
        variants=POLICY,
    ),
    "dro": Case(settings={"beta": 0.05}, variants=MEANS, reference=dro_reference),
    "gspo": Case(
        settings={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        goldens=(Golden("gspo_3e-4_4e-4"),),
        variants=(*POLICY, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ),
    "stable_reinforce": Case(
        settings={"kl_coeff": 0.01, "ratio_cap": 2.0} | {"sequence_low": 0.5, "sequence_high": 2.0},
        variants=(*MEANS, {"kl_coeff": 0.5, "ratio_cap": 1.1, "sequence_low": 0.9}),
        reference=stable_reinforce_reference,
    ),
    "sapo": Case(
        settings={"tau_positive": 1.0, "tau_negative": 1.05},
        goldens=(Golden("sapo_1.0_1.05"),),
        variants=POLICY,
    ),
    "dppo": Case(
        settings={"delta": 0.2},
        goldens=(Golden("dppo_binary_tv_0.2", inputs={"logprobs": "rollout"}),),
        variants=(*POLICY, {"delta": 0.02}),
    ),
    "dpo": Case(
        settings={"beta": 0.1, "aggregation": "sum"},
        variants=({"aggregation": "mean"}, {"beta": 0.5}),
        policy=False,
    ),
    "ipo": Case(
        settings={"beta": 0.1, "aggregation": "sum"},
        variants=({"aggregation": "mean"}, {"beta": 0.5}),
        policy=False,
    ),
    "kto": Case(
        settings={"beta": 0.1, "z0": 0.0, "aggregation": "sum"}
        | {"desirable_weight": 1.0, "undesirable_weight": 1.0},
        variants=({"aggregation": "mean"}, {"beta": 0.5, "undesirable_weight": 1.5}),
        policy=False,
    ),
}
POLICY_LOSSES = tuple(name for name, case in CASES.items() if case.policy)

REQUESTS: list[tuple[str, Config]] = [
    (name, config) for name, case in CASES.items() for config in ({}, *case.variants)
]
"""Every loss with every variant of its settings."""


def request_id(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={each}" for key, each in value.items()) or "defaults"
    return str(value)
