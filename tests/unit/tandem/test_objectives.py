from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tinker import types

from tandem.rl.advantages import grpo
from tandem.rl.objectives import OBJECTIVES, objective
from tandem.rl.policy import TinkerPolicy
from tandem.rl.rollouts import Example, Group, Rollout, Turn
from tests.support.bandit import Table, TableClient, TableReference, learn, result_of

TEACHER = TableReference(Table.that_knows())
EACH = [
    pytest.param(name, options, id="-".join((name, *map(str, options.values()))))
    for name, options in (
        *((name, {}) for name in OBJECTIVES),
        ("grpo", {"correction": "tis", "tis_cap": 2.0}),
        ("grpo", {"kl_coefficient": 0.01}),
        ("grpo", {"kl_coefficient": 0.01, "kl_type": "k3"}),
    )
]


def rollout(reward: float = 1.0, *, tokens: int = 2, stop_reason: str = "stop") -> Rollout:
    turn = Turn(
        observation=[7, 8, 9],
        tokens=list(range(10, 10 + tokens)),
        logprobs=[-0.5] * tokens,
        steps=[0] * tokens,
        stop_reason=stop_reason,
    )
    return Rollout(turns=[turn], reward=reward)


def group(*rollouts: Rollout) -> Group:
    return Group(number=0, example=Example(""), rollouts=rollouts)


def values(datum, name):
    return np.asarray(datum.loss_fn_inputs[name].data).tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "options"), EACH)
async def test_each_objective_learns_the_bandit(name, options, seed):
    found = await learn(objective(name, max_tokens=2, **options), seed=seed, reference=TEACHER)
    assert found > 0.85


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "options"), EACH)
async def test_no_objective_learns_with_the_sign_of_its_gradient_flipped(name, options, seed):
    wanted = objective(name, max_tokens=2, **options)
    found = await learn(wanted, seed=seed, steps=15, rate=-0.1, reference=TEACHER)
    assert found < 1 / 16


async def test_a_datum_predicts_each_token_and_learns_from_sampled_ones_alone():
    turns = [
        Turn(observation=[1, 2], tokens=[3, 4], logprobs=[-0.1, -0.2], steps=[0, 0]),
        Turn(observation=[5], tokens=[6], logprobs=[-0.3], steps=[1]),
    ]
    two = Rollout(turns=turns, reward=1.0)
    made = objective("rloo", aggregation="token_sum")
    datum, _other = await made.data([group(two, replace(two, reward=0.0))])
    assert datum.model_input.to_ints() == [1, 2, 3, 4, 5]
    assert values(datum, "target_tokens") == [2, 3, 4, 5, 6]
    assert values(datum, "mask") == [0, 1, 1, 0, 1]
    assert values(datum, "logprobs") == pytest.approx([0, -0.1, -0.2, 0, -0.3])
    assert values(datum, "advantages") == [0, 1, 1, 0, 1]
    assert "weight_step" not in datum.loss_fn_inputs

    made = objective("rloo", max_staleness=2)
    datum, _other = await made.data([group(two, replace(two, reward=0.0))])
    assert made.settings == {"max_staleness": 2.0}
    assert values(datum, "weight_step") == [-1, 0, 0, -1, 1]
    assert datum.loss_fn_inputs["weight_step"].dtype == "int64"


async def test_a_part_has_the_advantages_of_whole_groups_and_a_mean_of_its_own():
    one = Rollout(turns=[Turn(observation=[1], tokens=[2], logprobs=[-0.1], steps=[0])], reward=1.0)
    groups = [group(one, replace(one, reward=0.0)), group(one, one)]
    made = objective("rloo", aggregation="token_mean")
    whole = [values(each, "advantages") for each in await made.data(groups)]
    parts = [await made.data(groups, part=part, parts=2) for part in range(2)]
    assert [[values(each, "advantages") for each in part] for part in parts] == [
        [[2 * value for value in each] for each in whole[part::2]] for part in range(2)
    ]


async def test_another_tinker_server_gets_no_mask_and_learns_the_same():
    client = TableClient({})
    groups = [client.table.group(np.random.default_rng(0), number) for number in range(4)]
    data = await objective("grpo").data(groups)
    await TinkerPolicy(client).train(data, "ppo", {}, types.AdamParams(learning_rate=0.1))
    assert set(client.sent[0].loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}
    table = Table()
    table.train(data, "ppo", {})
    assert torch.equal(table.logits, client.table.logits)


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_sum", [1, 1]),
        ("token_mean", [1 / 5, 1 / 5]),
        ("seq_mean_token_mean", [1 / 4, 1 / 6]),
        ("constant", [1 / 20, 1 / 20]),
    ],
)
async def test_a_client_side_aggregation_is_the_servers(aggregation, weights):
    groups = [group(rollout(1.0, tokens=2), rollout(0.0, tokens=3))]
    ours = objective("rloo", aggregation=aggregation, max_length=10)
    made = await ours.data(groups)
    assert [max(map(abs, values(datum, "advantages"))) for datum in made] == pytest.approx(weights)


@pytest.mark.parametrize(
    ("name", "server"),
    [
        ("grpo", {"aggregation": "seq_mean_token_mean"}),
        ("dapo", {"aggregation": "token_mean"}),
        ("dr_grpo", {"aggregation": "constant", "max_length": 2.0}),
    ],
)
async def test_the_loss_of_a_batch_is_the_servers_with_its_aggregation(name, server):
    rng = np.random.default_rng(0)
    table = Table()
    groups = [table.group(rng, number) for number in range(4)]
    ours = objective(name, max_tokens=2)
    theirs = replace(ours, aggregation="token_sum")
    found = result_of(table, await ours.data(groups), ours.loss, ours.settings)
    wanted = result_of(table, await theirs.data(groups), ours.loss, {**ours.settings, **server})
    assert found.loss.item() == pytest.approx(wanted.loss.item(), abs=1e-7)


async def test_dynamic_sampling_drops_groups_of_equal_rewards():
    groups = [group(rollout(1), rollout(1)), group(rollout(1), rollout(0)), group(rollout(0))]
    assert objective("dapo").select(groups) == ([groups[1]], [groups[0], groups[2]])
    assert objective("grpo").select(groups) == (groups, [])


def test_long_answers_lose_reward_before_the_bound():
    made = objective("dapo", max_tokens=20, overlong_buffer=10)
    answers = group(rollout(1, tokens=10), rollout(1, tokens=15), rollout(1, tokens=20))
    assert made.advantages(answers) == pytest.approx(grpo(np.array([[1.0, 0.5, 0.0]]))[0])


def test_a_long_episode_of_short_answers_loses_no_reward():
    made = objective("dapo", max_tokens=20, overlong_buffer=10)
    short = rollout(1, tokens=10)
    answers = group(replace(short, turns=[*short.turns] * 3), rollout(0, tokens=10))
    assert made.advantages(answers) == pytest.approx(grpo(np.array([[1.0, 0.0]]))[0])


async def test_nothing_is_learned_from_a_truncated_answer_if_asked():
    answers = group(rollout(1), rollout(0, stop_reason="length"))
    _right, truncated = await objective("grpo", mask_truncated=True).data([answers])
    assert not any(values(truncated, "mask")) and not any(values(truncated, "advantages"))


async def test_a_kl_to_the_reference_is_in_the_advantages_or_in_the_servers_loss():
    rng = np.random.default_rng(0)
    groups = [Table().group(rng, 0)]
    made = objective("grpo", kl_coefficient=0.5, aggregation="token_sum")
    plain = await objective("grpo", aggregation="token_sum").data(groups)
    with_kl = await made.data(groups, reference=TEACHER)
    (scored, *_) = await TEACHER.logprobs([[0, *groups[0].rollouts[0].turns[0].tokens]])
    moved = np.subtract(values(with_kl[0], "advantages"), values(plain[0], "advantages"))
    assert moved == pytest.approx(0.5 * (scored - np.log(0.25)), abs=1e-6)

    server = objective("grpo", kl_coefficient=0.5, kl_type="k3")
    assert server.settings == {
        "kl_coeff": 0.5,
        "kl_type": "k3",
        "aggregation": "seq_mean_token_mean",
    }
    (datum, *_) = await server.data(groups, reference=TEACHER)
    assert values(datum, "ref_logprobs") == pytest.approx(scored)
    with pytest.raises(ValueError, match="needs a reference"):
        await server.data(groups)


async def test_a_teacher_that_likes_no_answer_still_rewards_the_better_tokens():
    rng = np.random.default_rng(0)
    groups = [Table().group(rng, number) for number in range(4)]
    strict = Table.that_knows()
    with torch.no_grad():
        strict.logits[:, 1] += 20.0  # a token that the policy gives no more often than others
    made = objective("distillation", aggregation="token_sum")
    data = await made.data(groups, reference=TableReference(strict))
    tokens = np.concatenate([values(datum, "target_tokens") for datum in data])
    advantages = np.concatenate([values(datum, "advantages") for datum in data])
    assert advantages.sum() == pytest.approx(0, abs=1e-4)
    assert (advantages[tokens == 1] > 0).all() and (advantages[tokens == 0] < 0).all()


async def test_a_token_without_a_finite_logprob_gives_no_kl():
    turn = Turn(observation=[0], tokens=[1], logprobs=[-np.inf], steps=[0])
    answers = group(Rollout(turns=[turn], reward=0.0))
    (datum,) = await objective("distillation").data([answers], reference=TEACHER)
    assert values(datum, "advantages") == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "pppo"}, "known: grpo, dr_grpo"),
        ({"name": "grpo", "aggregation": "mean"}, "use one of token_sum"),
        ({"name": "dr_grpo"}, "max_length"),
        ({"name": "dapo", "max_tokens": 8, "overlong_buffer": 9}, "between 1 and max_tokens"),
        ({"name": "grpo", "kl_type": "k3"}, "kl_coefficient"),
        ({"name": "distillation", "kl_coefficient": 0.1}, "only with kl_type"),
    ],
)
def test_a_wrong_objective_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        objective(**arguments)
