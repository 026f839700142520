"""SFT, DPO and KTO of a table of logits, with the server's losses."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from tandem.rl import (
    DPOConfig,
    Example,
    Judgement,
    KTOConfig,
    Preference,
    Reference,
    SFTConfig,
    dpo,
    kto,
    sft,
)
from tandem.rl.environments import Renderer
from tandem.rl.sft import answers_of, weights_of
from tests.support.bandit import Table, TableClient, TableReference

SETTINGS = {"batch_size": 4, "learning_rate": 0.1, "epochs": 40}
ANSWERS = [Example("0", {"answer": "23"})] * 6
PREFERENCES = [Preference("0", "23", bad) for bad in ("21", "32", "13", "11", "22", "33")]
JUDGEMENTS = [
    Judgement("0", answer, answer == "23") for answer in ("23", "21", "23", "33", "23", "13")
]


def fit_sft(training, **options):
    config = SFTConfig(**{**SETTINGS, **options})
    return sft(training, ANSWERS, config, evaluation=ANSWERS[:2], tracked=False)


def fit_dpo(training, *, loss="dpo", reference=None, **options):
    config = DPOConfig(**{**SETTINGS, "loss": loss, **options})
    return dpo(
        training,
        PREFERENCES,
        config,
        reference=reference,
        evaluation=PREFERENCES[:2],
        tracked=False,
    )


def fit_kto(training, **options):
    config = KTOConfig(**{**SETTINGS, **options})
    return kto(training, JUDGEMENTS, config, evaluation=JUDGEMENTS[:4], tracked=False)


FITS = [fit_sft, fit_dpo, fit_kto]


@pytest.mark.parametrize("fit", FITS)
def test_each_learns_the_right_answer(fit):
    client = TableClient({})
    done = fit(client)
    assert client.table.right > 0.5
    assert done.steps[-1]["loss"] < done.steps[0]["loss"]
    assert done.step == len(done.steps) == client.steps == 80


def test_a_supervised_loss_is_the_mean_over_the_answers_tokens():
    done = fit_sft(TableClient({}), evaluate_every=1, epochs=1, learning_rate=1e-9)
    assert done.steps[0]["loss"] == pytest.approx(np.log(4), abs=1e-6)
    assert done.evaluations[2]["loss"] == pytest.approx(np.log(4), abs=1e-6)


def test_preferences_show_how_many_pairs_are_right():
    done = fit_dpo(TableClient({}))
    assert done.steps[0] == pytest.approx({"loss": np.log(2), "accuracy": 0.0, "margin": 0.0})
    assert done.evaluations[80]["accuracy"] == 1.0 and done.evaluations[80]["margin"] > 0


def test_ipo_stays_nearer_to_the_reference():
    both = [TableClient({}), TableClient({})]
    fit_dpo(both[0], beta=0.5)
    fit_dpo(both[1], beta=0.5, loss="ipo")
    assert both[0].table.right > both[1].table.right > 1 / 16


def test_another_reference_is_asked_for_its_log_probabilities():
    teacher = TableReference(Table.that_knows())
    done = fit_dpo(TableClient({}), reference=teacher)
    assert done.steps[0]["margin"] < 0  # the reference prefers the chosen answers more


class _NoLogprobs:
    async def compute_logprobs(self, tokens):
        raise PermissionError("the key has no access to the model")


def test_a_failing_reference_ends_the_training_with_its_own_error():
    with pytest.raises(PermissionError, match="the key has no access"):
        fit_dpo(TableClient({}), reference=Reference(_NoLogprobs()))


def test_the_kl_of_kto_is_that_of_answers_to_other_prompts():
    """Without it, the loss of a good answer falls with the gain alone."""
    losses = [fit_kto(TableClient({}), estimate_kl=each).steps for each in (True, False)]
    assert losses[0][0] == losses[1][0]  # at the start it is 0
    assert losses[0][-1] != losses[1][-1]


def test_the_held_out_loss_of_kto_begins_at_a_half_and_falls():
    before = fit_kto(TableClient({}), evaluate_every=1, epochs=1, learning_rate=0.0)
    assert before.evaluations[1] == pytest.approx({"loss": 0.5})
    assert fit_kto(TableClient({})).evaluations[80]["loss"] < 0.4


@pytest.mark.parametrize("killed_at", [1, 2, 5, 7])
@pytest.mark.parametrize("fit", FITS)
def test_a_killed_loop_continues_with_the_same_numbers(fit, killed_at, tmp_path):
    undisturbed = TableClient({})
    whole = fit(undisturbed, epochs=5)

    class Killed(Exception):
        pass

    class Dying(TableClient):
        def optim_step(self, parameters):
            if self.steps == killed_at:
                raise Killed
            return super().optim_step(parameters)

    saved: dict = {}
    options = {"epochs": 5, "save_every": 2, "out": tmp_path}
    with pytest.raises(Killed):
        fit(lambda path: Dying(saved), **options)

    clients = []

    def continued(path):
        client = TableClient(saved)
        if path is not None:
            client.table.load(saved[path])
        clients.append(client)
        return client

    rest = fit(continued, **options)
    kept = killed_at // 2 * 2
    assert rest.steps == whole.steps[kept:]
    assert torch.equal(clients[0].table.logits, undisturbed.table.logits)
    assert fit(continued, **options).steps == []


def test_each_row_is_in_one_batch_of_an_epoch_and_epochs_differ():
    config = SFTConfig(batch_size=4, learning_rate=1.0, epochs=2)
    epochs = [[config.rows_of(3 * epoch + step, 10) for step in range(3)] for epoch in range(2)]
    assert [sorted(chain.from_iterable(epoch)) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]


class Chat:
    """A tokenizer of bytes with a chat template. `<` and `>` enclose a message."""

    chat_template = "yes"
    eos_token_id = ord("$")
    all_special_ids = (ord(">"), ord("$"))

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode()

    def apply_chat_template(self, messages, *, add_generation_prompt, **_options):
        texts = [f"<{each['role'][0]}:{each['content']}>\n" for each in messages]
        return "".join(texts) + "<a:" * add_generation_prompt


@pytest.mark.parametrize(
    ("example", "pairs"),
    [
        (Example("2+3=", {"answer": "5"}), [("2+3=", "5$")]),
        (
            Example([{"role": "user", "content": "2+3"}], {"answer": "5"}),
            [("<u:2+3>\n<a:", "5>")],
        ),
        (
            Example(
                [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Yes?"},
                    {"role": "user", "content": "2+3"},
                    {"role": "assistant", "content": "5"},
                ]
            ),
            [("<u:Hi>\n<a:", "Yes?>"), ("<u:Hi>\n<a:Yes?>\n<u:2+3>\n<a:", "5>")],
        ),
    ],
)
def test_an_answer_ends_with_the_token_that_ends_a_sample(example, pairs):
    found = answers_of(example, Renderer(Chat()))
    assert [(bytes(prompt).decode(), bytes(answer).decode()) for prompt, answer in found] == pairs


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (Example("2+3="), "has no answer"),
        (Example([{"role": "user", "content": "Hi"}]), "nothing to train"),
        (
            Example([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [1]}]),
            "no text",
        ),
    ],
)
def test_an_example_without_an_answer_is_refused(example, message):
    with pytest.raises(ValueError, match=message):
        answers_of(example, Renderer(Chat()))


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="dataset is empty"):
        sft(TableClient({}), [], SFTConfig(batch_size=1, learning_rate=1.0))
    with pytest.raises(ValueError, match="batch_size is 0"):
        SFTConfig(batch_size=0, learning_rate=1.0)
    with pytest.raises(ValueError, match="needs `out`"):
        SFTConfig(batch_size=1, learning_rate=1.0, save_every=1)


def test_an_answer_to_an_empty_prompt_has_a_weight_for_each_target():
    assert weights_of([], [5, 6, 7]).tolist() == [1.0, 1.0]
    assert weights_of([1, 2], [5]).tolist() == [0.0, 1.0]
