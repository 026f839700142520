"""The loop with a policy of 1 s for a sample and 1 s for a step, on a virtual clock."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from tinker import types

from tandem.rl import Evaluation, Example, train, train_async
from tandem.rl.environments import Step
from tandem.rl.policy import SyncTimedOut
from tandem.rl.producer import ExampleOrder, RolloutsFailed
from tandem.rl.rewards import RewardFailed
from tests.support.loops import (
    Disk,
    FakePolicy,
    NumberTokenizer,
    a_config,
    by_answer,
    numbered,
    on_disk,
    steps_in,
)
from tests.support.virtual_time import in_virtual_time, now, run_in_virtual_time


async def run(policy, config, *, dataset=None, reward=by_answer, **arguments):
    return await train_async(
        policy,
        numbered(40) if dataset is None else dataset,
        reward,
        config,
        tokenizer=NumberTokenizer(),
        **arguments,
    )


def losses(result) -> list[float]:
    return [report.metrics["loss:sum"] for report in result.steps]


# --- Overlap -----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_synchronous_loop_samples_and_trains_in_turns():
    policy = FakePolicy()
    result = await run(policy, a_config())
    assert (policy.step, result.step) == (10, 10)
    assert 19.9 < now() < 20.5
    assert [report.oldest for report in result.steps] == [0] * 10
    assert policy.state.trained != tuple(range(40)), "the examples are shuffled"
    assert sorted(policy.state.trained) == list(range(40))


@in_virtual_time
async def test_an_asynchronous_loop_samples_while_it_trains():
    policy = FakePolicy()
    result = await run(policy, a_config(off_by=1))
    assert policy.step == 10
    assert now() < 13
    assert max(report.oldest for report in result.steps) == 1
    assert not result.dropped


@in_virtual_time
async def test_a_slow_publication_does_not_stop_the_trainer():
    await run(FakePolicy(sampling=0.3, syncing=0.6), a_config(off_by=1))
    assert now() < 13


@in_virtual_time
async def test_the_same_seed_repeats_a_synchronous_loop():
    first, second, other = FakePolicy(), FakePolicy(), FakePolicy()
    results = [await run(policy, a_config()) for policy in (first, second)]
    assert losses(results[0]) == losses(results[1])
    await run(other, a_config(seed=1))
    assert first.state == second.state
    assert first.state.trained != other.state.trained, "another seed is another order"
    shuffled = [order_of(seed=seed) for seed in (0, 0, 1)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert shuffled[0][:40] != shuffled[0][40:], "each epoch has an order of its own"
    assert sorted(shuffled[0][:40]) == sorted(shuffled[0][40:]) == list(range(40))


def order_of(*, seed: int) -> list[object]:
    order = ExampleOrder(numbered(40), seed=seed, shuffle=True)
    return [order[number].data["number"] for number in range(80)]


class _Attentive(FakePolicy):
    """Keeps the settings and the examples of each optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.adam: list[types.AdamParams] = []
        self.parts: list[frozenset[tuple[int, ...]]] = []

    async def train(self, data, loss, settings, adam):
        self.adam.append(adam)
        self.parts.append(frozenset(tuple(datum.model_input.to_ints()) for datum in data))
        return await super().train(data, loss, settings, adam)


@in_virtual_time
async def test_each_epoch_trains_all_parts_of_a_batch_in_an_order_of_the_seed():
    policies = [_Attentive() for _ in range(3)]
    reports = []
    for policy, seed in zip(policies, (0, 0, 1), strict=True):
        config = a_config(steps=2, substeps=4, epochs=3, seed=seed)
        await run(policy, config, on_step=reports.append)
    first, again, other = (policy.parts for policy in policies)
    assert first == again != other
    assert [report.step for report in reports] == [1, 2] * 3
    for batch in (first[:12], first[12:]):
        assert len(set(batch)) == 4
        assert set(batch[:4]) == set(batch[4:8]) == set(batch[8:])
        assert len(frozenset[tuple[int, ...]]().union(*batch)) == sum(map(len, batch[:4])) == 8
    assert len({tuple(first[start : start + 4]) for start in range(0, 24, 4)}) > 2


@in_virtual_time
async def test_each_substep_trains_answers_to_all_examples_of_its_batch():
    policy = _Attentive()
    await run(policy, a_config(steps=2, group_size=3, substeps=3))
    examples = [{tokens[1] for tokens in part} for part in policy.parts]
    assert examples[0] == examples[1] == examples[2] != examples[3] == examples[4] == examples[5]
    assert [len(part) for part in policy.parts] == [4] * 6


@in_virtual_time
async def test_the_learning_rate_falls_with_the_batches_to_its_share():
    constant, falling = _Attentive(), _Attentive()
    await run(constant, a_config(steps=2))
    await run(falling, a_config(steps=3, substeps=2, final_learning_rate=0.5))
    assert _rates(constant) == [1e-3] * 2
    assert _rates(falling) == pytest.approx([1e-3, 1e-3, 7.5e-4, 7.5e-4, 5e-4, 5e-4])


@in_virtual_time
async def test_each_optimizer_step_has_the_settings_of_the_loop():
    policy = _Attentive()
    await run(policy, a_config(steps=2, warmup_steps=1, betas=(0.8, 0.99), grad_clip_norm=0.5))
    assert _rates(policy) == pytest.approx([5e-4, 1e-3])
    assert {(each.beta1, each.beta2, each.grad_clip_norm) for each in policy.adam} == {
        (0.8, 0.99, 0.5)
    }


def _rates(policy: _Attentive) -> list[float]:
    return [each.learning_rate for each in policy.adam]


@in_virtual_time
async def test_the_optimizer_steps_of_a_batch_age_its_successor_by_one_batch():
    result = await run(FakePolicy(), a_config(off_by=1, substeps=2, epochs=2))
    assert max(report.oldest for report in result.steps) == 4
    assert not result.dropped


# --- Bounds ------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_producer_ten_times_too_fast_holds_a_bounded_number_of_groups():
    policy = FakePolicy(sampling=0.1)
    await run(policy, a_config(off_by=2))
    assert policy.most_sampling == 3 * 4 * 2
    assert policy.events["samples"] == 10 * 4, "none is thrown away or left"


@in_virtual_time
async def test_max_concurrency_bounds_the_rollouts_under_way():
    policy = FakePolicy()
    await run(policy, a_config(off_by=3, max_concurrency=6))
    assert policy.most_sampling == 6


class _SlowExamples(FakePolicy):
    """One example in eight takes as long as seven steps."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def seconds_of_sample(self, prompt, seed):
        self.asked.append((prompt[1], seed))
        return 7.3 if prompt[1] % 8 == 0 and seed % 2 else 0.5


@in_virtual_time
async def test_no_trained_token_is_older_than_the_bound_and_old_examples_are_drawn_again():
    policy = _SlowExamples()
    result = await run(policy, a_config(off_by=2, steps=30), dataset=numbered(200))
    assert max(report.oldest for report in result.steps) <= 2
    assert result.dropped["stale"] > 0
    assert len(policy.state.trained) == len(set(policy.state.trained)) == 30 * 4
    assert policy.most_sampling <= 3 * 4 * 2, "a group that is drawn again keeps its place"


@in_virtual_time
async def test_an_old_example_is_drawn_again_with_other_seeds():
    policy = _SlowExamples()
    result = await run(policy, a_config(off_by=2, steps=30), dataset=numbered(200))
    asked = Counter(policy.asked)
    assert len(asked) == asked.total() == 30 * 4 + result.dropped["stale"]


class _SilentAnswers(FakePolicy):
    """The second answer of each group has no token."""

    async def answer(self, state, prompt, **settings):
        first, second = await super().answer(state, prompt, **settings)
        return [first, replace(second, tokens=[], logprobs=[], steps=[])]


async def one_for_words(example: Example, answer: str) -> float:
    return float(bool(answer))


@in_virtual_time
async def test_an_answer_without_tokens_is_never_stale():
    longer = [Example([7, number, 9]) for number in range(40)]
    config = a_config(off_by=1)
    async with asyncio.timeout(100):
        result = await run(_SilentAnswers(), config, dataset=longer, reward=one_for_words)
    assert result.step == 10
    assert "stale" not in result.dropped


@in_virtual_time
async def test_a_sync_has_a_deadline():
    policy = FakePolicy(syncing=20.0)
    with pytest.raises((SyncTimedOut, TimeoutError)):
        await run(policy, a_config(sync_timeout=5.0))
    assert now() < 6


class QuietEpisode:
    async def reset(self, example: Example) -> list[int]:
        return list(example.prompt)

    async def step(self, answer: str) -> Step:
        return Step(0.25)


# --- Failures ----------------------------------------------------------------------------------


class _Unreliable(FakePolicy):
    """Fails for some prompts: at the first attempts, or always."""

    def __init__(self, *, always: set[int], sometimes: set[int]) -> None:
        super().__init__()
        self._always, self._left = always, dict.fromkeys(sometimes, 2)

    async def answer(self, state, prompt, **settings):
        if prompt[1] in self._always:
            raise RuntimeError("the engine refused the prompt")
        if self._left.get(prompt[1], 0):
            self._left[prompt[1]] -= 1
            raise RuntimeError("the engine died")
        return await super().answer(state, prompt, **settings)


@in_virtual_time
async def test_an_example_whose_samples_fail_is_drawn_three_times():
    policy = _Unreliable(always={5}, sometimes={6, 7})
    result = await run(policy, a_config())
    assert set(policy.state.trained) >= set(range(40)) - {5}
    assert 5 not in policy.state.trained
    assert result.dropped == {"sample": 7 * 2, "incomplete": 7, "given_up": 1}


@in_virtual_time
async def test_a_loop_ends_with_the_reason_if_all_samples_fail():
    policy = _Unreliable(always=set(range(40)), sometimes=set())
    task = asyncio.create_task(run(policy, a_config()))
    with pytest.warns(UserWarning, match="given up; .* the engine refused the prompt"):
        await asyncio.sleep(5.0)
    with pytest.raises(RolloutsFailed, match="the engine refused the prompt"):
        await task


class _Outage(FakePolicy):
    """All samples fail at once for a minute."""

    async def answer(self, state, prompt, **settings):
        if 5.0 < now() < 65.0:
            raise ConnectionError("nobody answers")
        return await super().answer(state, prompt, **settings)


@pytest.mark.parametrize("off_by", [0, 2])
@in_virtual_time
async def test_a_loop_outlives_an_outage_of_a_minute(off_by):
    policy = _Outage()
    result = await run(policy, a_config(off_by=off_by), dataset=numbered(200))
    assert result.step == 10
    assert result.dropped["given_up"] <= 2 * (off_by + 1) * 4, "each place has lost two examples"


async def fails_for_odd_answers(example: Example, answer: str) -> float:
    number = int(answer.split()[-1])
    if number % 2:
        raise ValueError("odd")
    return number / 1000


@in_virtual_time
async def test_a_failed_reward_drops_its_rollout_and_is_no_zero():
    config = a_config(group_size=8)
    result = await run(FakePolicy(), config, reward=fails_for_odd_answers)
    assert result.dropped["reward"] > 50
    assert all(report.rollouts < 32 for report in result.steps)
    with pytest.raises(RewardFailed):
        await run(FakePolicy(), a_config(reward_failure="error"), reward=fails_for_odd_answers)


@in_virtual_time
async def test_a_rollout_has_a_deadline():
    policy = _SlowExamples()
    result = await run(policy, a_config(rollout_timeout=2.0))
    assert result.dropped["timeout"] > 0
    assert policy.step == 10


async def hang() -> None:
    await asyncio.Event().wait()


class HangsAtReset(QuietEpisode):
    async def reset(self, example):
        await hang()


class HangsAtStep(QuietEpisode):
    async def step(self, answer):
        await hang()


class HangsAtClose(QuietEpisode):
    async def close(self):
        await hang()


class HangsTwice(HangsAtStep, HangsAtClose):
    pass


class _HangingSamples(FakePolicy):
    async def answer(self, state, prompt, **settings):
        await hang()


async def hanging_reward(example: Example, answer: str) -> float:
    await hang()
    return 1.0


@pytest.mark.parametrize(
    ("policy", "reward"),
    [
        (_HangingSamples, by_answer),
        (_HangingSamples, QuietEpisode),
        (FakePolicy, hanging_reward),
        (FakePolicy, HangsAtReset),
        (FakePolicy, HangsAtStep),
        (FakePolicy, HangsAtClose),
        (FakePolicy, HangsTwice),
    ],
)
@in_virtual_time
async def test_a_batch_waits_for_no_rollout_without_a_deadline(policy, reward):
    config = a_config(rollout_timeout=9.0, reward_timeout=9.0, max_concurrency=4)
    async with asyncio.timeout(10_000):
        with pytest.raises(RolloutsFailed, match=r"longer than 9 s \((rollout|reward)_timeout\)"):
            await run(policy(), config, reward=reward)
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Silent:
    """Its own program does not answer."""

    async def reset(self, example: Example) -> list[int]:
        async with asyncio.timeout(1.0):
            await asyncio.Event().wait()
        return []

    async def step(self, answer: str) -> Step:
        return Step(0.0)


@in_virtual_time
async def test_a_timeout_of_an_environment_is_its_own_failure():
    with pytest.raises(RolloutsFailed, match="last failure: TimeoutError"):
        await run(FakePolicy(), a_config(), reward=Silent)


@in_virtual_time
async def test_a_cancelled_loop_leaves_nothing_running():
    policy = FakePolicy(sampling=3.0)
    task = asyncio.create_task(run(policy, a_config(off_by=2)))
    await asyncio.sleep(4.5)
    assert policy.sampling_now > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert policy.sampling_now == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


class _BrokenTrainer(FakePolicy):
    async def train(self, *arguments):
        if self.step == 2:
            raise RuntimeError("the run was stopped")
        return await super().train(*arguments)


@in_virtual_time
async def test_an_error_of_the_trainer_ends_the_rollouts():
    policy = _BrokenTrainer(sampling=0.4)
    with pytest.raises(RuntimeError, match="the run was stopped"):
        await run(policy, a_config(off_by=4))
    assert policy.sampling_now == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- Selection ---------------------------------------------------------------------------------


async def rarely_differs(example: Example, answer: str) -> float:
    return float(int(answer.split()[-1]) % 8 == 0)


@in_virtual_time
async def test_dynamic_sampling_fills_a_batch_with_other_examples():
    config = a_config(objective="dapo", group_size=2)
    policy, again = FakePolicy(), FakePolicy()
    result = await run(policy, config, reward=rarely_differs)
    assert all(report.rollouts == 8 and report.reward == 0.5 for report in result.steps)
    assert result.dropped["no_signal"] > 40
    assert losses(result) == losses(await run(again, config, reward=rarely_differs))


async def always_right(example: Example, answer: str) -> float:
    return 1.0


@in_virtual_time
async def test_dynamic_sampling_of_a_solved_task_ends():
    result = await run(FakePolicy(), a_config(objective="dapo", steps=2), reward=always_right)
    assert result.step == 2


# --- Evaluation --------------------------------------------------------------------------------

EVALUATION = Evaluation(dataset=numbered(6), samples=3, temperature=1.0)


class _SlowEvaluation(FakePolicy):
    """Samples of an evaluation take as long as four steps. The loop's own groups have two."""

    async def answer(self, state, prompt, *, n, tokens, seed):
        if n == EVALUATION.samples:
            await asyncio.sleep(4.0)
        return await super().answer(state, prompt, n=n, tokens=tokens, seed=seed)


@in_virtual_time
async def test_no_training_waits_for_an_evaluation():
    alone, beside = FakePolicy(), _SlowEvaluation()
    await run(alone, a_config(off_by=1))
    started = now()
    config = a_config(off_by=1, evaluate_every=2)
    result = await run(beside, config, evaluation=EVALUATION)
    assert [at - started for at in beside.trained_at] == pytest.approx(alone.trained_at)
    assert alone.state == beside.state
    assert [score.step for score in result.evaluations] == [0, 2, 4, 6, 8, 10]
    assert [score.policy_step for score in result.evaluations] == [0, 2, 4, 6, 8, 10]


@in_virtual_time
async def test_a_background_evaluation_equals_that_of_a_paused_loop():
    config = a_config(off_by=1, evaluate_every=5)
    beside = await run(_SlowEvaluation(), config, evaluation=EVALUATION)
    background = {score.step: score.reward for score in beside.evaluations}

    policy = FakePolicy()
    paused = await run(policy, a_config(off_by=1, steps=5, evaluate_every=5), evaluation=EVALUATION)
    assert {score.step: score.reward for score in paused.evaluations} == {
        0: background[0],
        5: background[5],
    }
    assert len(set(background.values())) == 3


class _NoSnapshots(FakePolicy):
    """A snapshot for an evaluation never comes, or is refused."""

    def __init__(self, *, refused: Exception | None) -> None:
        super().__init__()
        self._refused = refused

    async def snapshot(self):
        if self._refused is not None:
            raise self._refused
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (RuntimeError("the disk is full"), "disk is full"),
        (TimeoutError("the engine is silent"), "the engine is silent"),
        (None, "longer than 9 s"),
    ],
)
@in_virtual_time
async def test_a_loop_ends_well_without_the_snapshot_of_an_evaluation(refused, why):
    evaluation = replace(EVALUATION, timeout=9.0)
    result = await run(_NoSnapshots(refused=refused), a_config(), evaluation=evaluation)
    assert result.step == 10
    [score] = result.evaluations
    assert (score.step, score.policy_step, score.rollouts) == (10, 10, 0)
    assert why in score.failure


# --- Continuing --------------------------------------------------------------------------------


async def killed_and_continued(disk, config, *, kills, dataset=None, **settings):
    """Run a loop that is killed after each of `kills` seconds. Returns the last result, and all
    losses by step."""
    by_step: dict[int, float] = {}
    for seconds in (*kills, None):
        policy = on_disk(disk, **settings)
        task = asyncio.create_task(run(policy, config, dataset=dataset))
        _done, pending = await asyncio.wait([task], timeout=seconds)
        if pending:
            task.cancel()
            await asyncio.wait([task])
            continue
        result = await task
        by_step |= {report.step: report.metrics["loss:sum"] for report in result.steps}
        if result.step == config.steps:
            return result, by_step
    raise AssertionError("the loop did not end")


@pytest.mark.parametrize("seed", range(25))
def test_a_synchronous_loop_killed_at_random_continues_as_if_it_was_not(seed, tmp_path):
    chance = random.Random(seed)
    kills = [chance.uniform(0.2, 9) for _ in range(chance.randint(1, 4))]
    usual = a_config(seed=seed)
    if seed % 2:
        usual = replace(usual, substeps=2, epochs=2, final_learning_rate=0.1)
    config = replace(usual, out=tmp_path, save_every=chance.randint(1, 3))

    async def scenario() -> None:
        whole = FakePolicy()
        expected = await run(whole, usual)
        result, found = await killed_and_continued(Disk(), config, kills=kills)
        assert result.policy.state == whole.state
        assert found.items() <= dict(enumerate(losses(expected), 1)).items()
        assert steps_in(tmp_path) == 10

    run_in_virtual_time(scenario())


@pytest.mark.parametrize("seed", range(25))
def test_an_asynchronous_loop_killed_at_random_trains_each_example_once(seed, tmp_path):
    chance = random.Random(seed)
    kills = [chance.uniform(0.2, 9) for _ in range(chance.randint(1, 4))]
    config = a_config(
        out=tmp_path, save_every=chance.randint(1, 3), seed=seed, off_by=chance.randint(1, 3)
    )

    async def scenario() -> None:
        settings = {"sampling": chance.uniform(0.1, 2), "training": chance.uniform(0.1, 2)}
        result, _ = await killed_and_continued(
            Disk(), config, kills=kills, dataset=numbered(200), **settings
        )
        trained = result.policy.state.trained
        assert len(trained) == len(set(trained)) == 40, "no example was trained twice"
        state = json.loads((tmp_path / "state.json").read_text())
        order = ExampleOrder(numbered(200), seed=seed, shuffle=True)
        served = set(range(state["cursor"])) - {number for number, _ in state["under_way"]}
        assert {order[number].data["number"] for number in served} == set(trained)
        assert len(state["under_way"]) <= (config.off_by + 1) * 4, "nothing else is missing"

    run_in_virtual_time(scenario())


def test_a_state_of_another_seed_or_dataset_is_refused(tmp_path):
    disk, config = Disk(), a_config(out=tmp_path, steps=1)

    async def scenario() -> None:
        await run(on_disk(disk), config)
        with pytest.raises(ValueError, match="seed 0, and this one has 1"):
            await run(on_disk(disk), a_config(out=tmp_path, seed=1))
        with pytest.raises(ValueError, match="examples 40, and this one has 3"):
            await run(on_disk(disk), config, dataset=numbered(3))
        with pytest.raises(ValueError, match="resumable"):
            await run(FakePolicy(), config)
        again = await run(on_disk(disk), config)
        assert (again.step, again.steps) == (1, [])

    run_in_virtual_time(scenario())


def test_each_substep_needs_a_rollout():
    with pytest.raises(ValueError, match="substeps is 9; each needs a rollout"):
        a_config(substeps=9)


def test_answers_without_others_to_compare_are_refused_before_sampling():
    with pytest.raises(ValueError, match=r"grpo compares .* group_size is 1"):
        train(FakePolicy(), numbered(4), by_answer, a_config(group_size=1))


@in_virtual_time
async def test_an_objective_that_compares_no_answers_trains_single_ones():
    result = await run(FakePolicy(), a_config(group_size=1, objective="reinforce"))
    assert result.step == 10
    assert [report.rollouts for report in result.steps] == [4] * 10


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="evaluations"):
        train(FakePolicy(), numbered(4), by_answer, a_config(), evaluations=EVALUATION)


def test_saving_needs_a_folder():
    with pytest.raises(ValueError, match="save_every needs `out`"):
        train(FakePolicy(), numbered(4), by_answer, a_config(save_every=1))


# --- Environments ------------------------------------------------------------------------------


class Doubling:
    """Two turns: the second prompt follows the first answer."""

    async def reset(self, example: Example) -> list[int]:
        self.answers: list[str] = []
        return list(example.prompt)

    async def step(self, answer: str) -> Step:
        self.answers.append(answer)
        if len(self.answers) == 2:
            return Step(reward=int(answer.split()[-1]) / 1000, fields={"first": self.answers[0]})
        if answer.startswith("1"):
            raise RuntimeError("the environment broke")
        return Step(reward=0.5, observation=[9, 9])


class _Record:
    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def log(self, step, values): ...

    def rollouts(self, step, rollouts):
        self.rows += rollouts


class Praising:
    """Its fields have names of the record."""

    async def reset(self, example: Example) -> list[int]:
        return list(example.prompt)

    async def step(self, answer: str) -> Step:
        return Step(0.25, fields={"reward": 1.0, "answer": "right", "guesses": 3})


@in_virtual_time
async def test_the_fields_of_an_environment_replace_no_reward_or_answer_of_the_record():
    record = _Record()
    await run(FakePolicy(), a_config(steps=1), reward=Praising, tracked=record)
    assert len(record.rows) == 8
    assert {(row["reward"], row["guesses"]) for row in record.rows} == {(0.25, 3)}
    assert "right" not in [row["answer"] for row in record.rows]


@in_virtual_time
async def test_a_loop_trains_episodes_of_an_environment_and_drops_broken_ones():
    policy, again = FakePolicy(), FakePolicy()
    config = a_config(group_size=6, off_by=0, evaluate_every=5)
    result = await run(policy, config, reward=Doubling, evaluation=EVALUATION)
    assert policy.step == 10
    assert result.dropped["environment"] > 5
    assert all(0.5 <= report.reward <= 1.5 for report in result.steps)
    assert len(result.evaluations) == 3
    repeated = await run(again, config, reward=Doubling)
    assert losses(result) == losses(repeated)
