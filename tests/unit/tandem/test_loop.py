from __future__ import annotations

from tandem.rl import train_async
from tests.support.loops import FakePolicy, NumberTokenizer, a_config, by_answer, numbered
from tests.support.virtual_time import in_virtual_time, now


async def run(policy, config, *, dataset=None, reward=by_answer, **arguments):
    return await train_async(
        policy,
        numbered(40) if dataset is None else dataset,
        reward,
        config,
        tokenizer=NumberTokenizer(),
        **arguments,
    )


@in_virtual_time
async def test_a_synchronous_loop_samples_and_trains_in_turns():
    policy = FakePolicy()
    result = await run(policy, a_config())
    assert (policy.step, result.step) == (10, 10)
    assert 19.9 < now() < 20.5
    assert [report.oldest for report in result.steps] == [0] * 10


@in_virtual_time
async def test_an_asynchronous_loop_samples_while_it_trains():
    policy = FakePolicy()
    result = await run(policy, a_config(off_by=1))
    assert policy.step == 10
    assert now() < 13
    assert max(report.oldest for report in result.steps) == 1
    assert not result.dropped
