"""An episode is one sequence of tokens: each prompt continues the one before."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tandem.rl.environments import Renderer, Step, rollout
from tandem.rl.objectives import objective
from tandem.rl.rollouts import Example, Group
from tests.support.chat_tokenizers import ENDS, chat_tokenizer
from tests.support.scripted_policy import ScriptedPolicy, turn

EXTENDING = [name for name in ENDS if name not in ("thinking", "channels")]
WORDS = ["the", "a", "12", "\n\n", "ü", "€", " ", "x = 3;", "{}", "end\n", "<", "|", "im_end"]


@dataclass
class Script:
    """Replies with its observations one after the other."""

    prompt: object
    observations: list
    seen: list[str] = field(default_factory=list)

    async def reset(self, example):
        return self.prompt

    async def step(self, answer):
        self.seen.append(answer)
        left = len(self.seen) <= len(self.observations)
        observation = self.observations[len(self.seen) - 1] if left else None
        return Step(1.0, observation, {"last": len(self.seen)})


def random_text(rng: random.Random) -> str:
    """Templates may trim a content, so it begins and ends with a letter."""
    return "b" + "".join(rng.choices(WORDS, k=rng.randrange(8))) + "c"


def random_observation(rng: random.Random) -> list[dict]:
    if rng.random() < 0.5:
        return [{"role": "user", "content": random_text(rng)}]
    return [{"role": "tool", "content": random_text(rng)} for _ in range(rng.randint(1, 3))]


def random_dialogue(rng: random.Random):
    start = [{"role": "system", "content": random_text(rng)}] if rng.random() < 0.5 else []
    start += [{"role": "user", "content": random_text(rng)}]
    return start, [random_observation(rng) for _ in range(rng.randint(1, 5))]


async def test_over_200_random_dialogues_each_prompt_continues_the_previous_tokens():
    """Sampled ids are random, so they are not the tokens of any text."""
    for seed in range(200):
        rng = random.Random(seed)
        name = rng.choice([*ENDS])
        tokenizer = chat_tokenizer(name)
        [*end] = tokenizer.encode(ENDS[name][1], add_special_tokens=False)
        start, observations = random_dialogue(rng)
        answers = []
        for _ in range(len(observations) + 1):
            tokens = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 12))]
            cut = rng.random() < 0.3
            answers.append(turn(tokens if cut else tokens + end, "length" if cut else "stop"))
        policy, environment = ScriptedPolicy(answers), Script(start, observations)

        found = await rollout(
            environment,
            Example("unused"),
            sample=policy.sample,
            renderer=Renderer(tokenizer),
            max_tokens=64,
        )

        assert len(found.turns) == len(answers) == found.reward
        sequence: tuple[int, ...] = ()
        for number, (got, given) in enumerate(zip(found.turns, answers, strict=True)):
            sequence += tuple(got.observation)
            assert policy.prompts[number] == sequence
            assert (got.tokens, got.logprobs, got.steps, got.stop_reason) == (
                given.tokens,
                given.logprobs,
                given.steps,
                given.stop_reason,
            )
            sequence += given.tokens


async def test_over_200_random_dialogues_the_text_is_the_templates():
    for seed in range(200):
        rng = random.Random(seed)
        name = rng.choice(EXTENDING)
        tokenizer, renderer = chat_tokenizer(name), Renderer(chat_tokenizer(name))
        assert not renderer.rewrites_history
        start, observations = random_dialogue(rng)
        texts = [random_text(rng) for _ in range(len(observations) + 1)]
        answers, messages, expected = [], list(start), []
        for text, observation in zip(texts, [*observations, None], strict=True):
            expected.append(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            )
            cut = rng.random() < 0.3
            end = ENDS[name][1]
            if observation and name == "roles":  # its models end with the next role
                end = f"<|{observation[0]['role']}|>"
            tokens = tokenizer.encode(text if cut else text + end, add_special_tokens=False)
            answers.append(turn(tokens, "length" if cut else "stop"))
            messages += [{"role": "assistant", "content": text}, *(observation or [])]
        policy, environment = ScriptedPolicy(answers), Script(start, observations)

        await rollout(
            environment, Example(""), sample=policy.sample, renderer=renderer, max_tokens=64
        )

        assert [tokenizer.decode(list(prompt)) for prompt in policy.prompts] == expected
        if name != "plain":  # an end that is no control token stays in the text
            assert environment.seen == texts


async def test_a_template_that_rewrites_history_keeps_the_sampled_thinking():
    tokenizer = chat_tokenizer("thinking")
    renderer = Renderer(tokenizer)
    thought = tokenizer.encode("<think>\nhm\n</think>\n\nyes<|im_end|>")
    policy = ScriptedPolicy([turn(thought), turn(thought)])
    environment = Script(
        [{"role": "user", "content": "Q"}], [[{"role": "user", "content": "Sure?"}]]
    )

    found = await rollout(
        environment, Example(""), sample=policy.sample, renderer=renderer, max_tokens=64
    )

    assert renderer.rewrites_history
    assert tokenizer.decode(list(policy.prompts[1])) == (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes"
        "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found.text == "<think>\nhm\n</think>\n\nyes"


def test_replies_of_tools_are_grouped_as_the_template_groups_them():
    tokenizer = chat_tokenizer("thinking")
    replies = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    added = Renderer(tokenizer).follow(turn(tokenizer.encode("x<|im_end|>")), replies)
    assert tokenizer.decode(added) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_was_cut_is_closed_by_the_template():
    tokenizer = chat_tokenizer("chatml")
    reply = [{"role": "user", "content": "?"}]
    cut = Renderer(tokenizer).follow(turn(tokenizer.encode("x"), "length"), reply)
    whole = Renderer(tokenizer).follow(turn(tokenizer.encode("x<|im_end|>")), reply)
    assert cut == tokenizer.encode("<|im_end|>") + whole

    tokenizer = chat_tokenizer("plain")
    cut = Renderer(tokenizer).follow(turn(tokenizer.encode("x\n"), "length"), reply)
    assert tokenizer.decode(cut) == "\nuser: ?\nassistant: "


def test_another_end_token_stands_for_the_templates():
    tokenizer = chat_tokenizer("channels")
    reply = [{"role": "user", "content": "?"}]
    added = Renderer(tokenizer).follow(turn(tokenizer.encode("x<|return|>")), reply)
    assert (
        tokenizer.decode(added)
        == "<|header|>user<|end_header|>?<|eot|><|header|>assistant<|end_header|>"
    )


def test_options_and_tools_reach_the_template():
    tokenizer = chat_tokenizer("chatml")
    schema = {"type": "function", "function": {"name": "add"}}
    message = [{"role": "user", "content": "Q"}]
    text = tokenizer.decode(
        Renderer(tokenizer, enable_thinking=False).prompt(message, tools=[schema])
    )
    assert '"name": "add"' in text
    assert text.endswith("<think>\n\n</think>\n\n")


async def test_text_and_ids_are_added_as_they_are():
    tokenizer = chat_tokenizer("chatml")
    policy = ScriptedPolicy([turn([7]), turn([8]), turn([9])])
    await rollout(
        Script("2+", ["3=", [5, 6]]),
        Example(""),
        sample=policy.sample,
        renderer=Renderer(tokenizer),
        max_tokens=4,
    )
    first = tokenizer.encode("2+")
    second = [*first, 7, *tokenizer.encode("3=")]
    assert [list(prompt) for prompt in policy.prompts] == [first, second, [*second, 8, 5, 6]]


async def test_an_episode_ends_at_its_bound():
    tokenizer = chat_tokenizer("chatml")

    async def ended(**bounds):
        policy = ScriptedPolicy([turn([7] * 4, "length")] * 9)
        found = await rollout(
            Script([1] * 10, [[2] * 3] * 8),
            Example(""),
            sample=policy.sample,
            renderer=Renderer(tokenizer),
            max_tokens=4,
            **bounds,
        )
        return found

    found = await ended()
    assert (found.fields["ended"], found.fields["turns"], found.fields["last"]) == ("done", 9, 9)
    found = await ended(max_turns=2)
    assert (found.fields["ended"], len(found.turns), found.reward) == ("max_turns", 2, 2.0)


async def test_each_turn_has_a_seed_of_its_own_and_an_episode_repeats():
    tokenizer = chat_tokenizer("chatml")
    seeds = []
    for _ in range(2):
        policy = ScriptedPolicy([turn([7])] * 3)
        await rollout(
            Script([1], [[2], [3]]),
            Example(""),
            sample=policy.sample,
            renderer=Renderer(tokenizer),
            max_tokens=4,
            seed=5,
        )
        seeds.append(policy.seeds)
    assert seeds[0] == seeds[1]
    assert len({*seeds[0]}) == 3


def test_messages_without_a_template_are_refused():
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        Renderer(tokenizer).prompt([{"role": "user", "content": "Q"}])
    with pytest.raises(ValueError, match="a prompt is text"):
        Renderer(tokenizer).prompt([1, "x"])


def test_a_function_can_take_the_templates_place():
    def template(messages, tools, add_generation_prompt):
        lines = [f"{message['role']}> {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant> " if add_generation_prompt else "")

    tokenizer = chat_tokenizer("chatml")
    renderer = Renderer(tokenizer, template=template)
    start = renderer.prompt([{"role": "user", "content": "Q"}])
    added = renderer.follow(turn(tokenizer.encode("A\n")), [{"role": "user", "content": "R"}])
    assert tokenizer.decode(start) == "user> Q\nassistant> "
    assert tokenizer.decode(added) == "user> R\nassistant> "


async def test_an_environment_is_closed_also_after_an_error():
    closed = []

    class Closes(Script):
        async def close(self):
            closed.append(len(self.seen))

    class Fails(Closes):
        async def step(self, answer):
            raise RuntimeError("broken")

    tokenizer = chat_tokenizer("chatml")
    options = {"renderer": Renderer(tokenizer), "max_tokens": 4}
    sample = ScriptedPolicy([turn([7])] * 3).sample
    await rollout(Closes([1], [[2]]), Example(""), sample=sample, **options)
    with pytest.raises(RuntimeError, match="broken"):
        await rollout(Fails([1], []), Example(""), sample=sample, **options)
    assert closed == [2, 0]


async def test_only_sampled_tokens_are_trained():
    tokenizer = chat_tokenizer("thinking")
    end = tokenizer.encode("<|im_end|>")
    answers = [turn([*tokenizer.encode("one"), *end]), turn([*tokenizer.encode("two"), *end])]
    found = await rollout(
        Script([{"role": "user", "content": "Q"}], [[{"role": "tool", "content": "R"}]]),
        Example(""),
        sample=ScriptedPolicy(answers).sample,
        renderer=Renderer(tokenizer),
        max_tokens=9,
    )
    group = Group(number=0, example=Example(""), rollouts=[found])

    [datum] = await objective("grpo").data([group])

    targets = datum.loss_fn_inputs["target_tokens"].data
    mask = datum.loss_fn_inputs["mask"].data
    trained = [token for token, kept in zip(targets, mask, strict=True) if kept]
    assert trained == [*answers[0].tokens, *answers[1].tokens]
    assert tokenizer.decode(trained) == "one<|im_end|>two<|im_end|>"
