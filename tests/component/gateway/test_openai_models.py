"""A caller's models, models in training, and implicit sessions."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest
from sqlalchemy import select

from gateway.api.errors import InvalidParameter
from gateway.api.openai.schemas import CompletionRequest
from gateway.api.openai.service import InferenceService
from gateway.owners.auth.identity import Caller
from gateway.storage.tables import usage
from tests.support.gateway.access_world import Call, World
from tests.support.gateway.speaking_models import (
    byte_tokenizer,
    client_of,
    speaking_gateway,
    write_speaking_model,
)
from tests.support.waiting import until, wait_until


class SpeakingWorld(World):
    def model(self, number: int) -> dict[str, object]:
        return super().model(number) | {"base_model": "speaker:full"}

    def openai(self, caller: str) -> openai.OpenAI:
        return client_of(self.gate, key=self.keys[caller])

    def version_of(self, caller: str, model: str) -> str:
        answer = self.openai(caller).completions.create(model=model, prompt="x")
        return answer.tandem_weight_version

    def publish(self, path: str) -> None:
        call = Call(f"{self.checkpoint(path)}/publish")
        self.ask("POST", call, key=self.keys["member"]).raise_for_status()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with speaking_gateway(folder, session_ttl=600) as gate:
        yield SpeakingWorld(gate, folder)


def test_the_list_has_base_models_and_what_the_caller_saved(world):
    mine = {model.id: model for model in world.openai("member").models.list()}
    assert {"tiny", "speaker", world.weights} <= mine.keys()
    assert world.state not in mine
    assert world.export not in mine
    assert (mine["speaker"].owned_by, mine["speaker"].max_model_len) == ("tandem", 64)
    assert mine[world.weights].parent == "speaker"
    assert mine[world.weights].owned_by == "ann"
    assert mine["speaker"].created > 0
    assert {m.id for m in world.openai("foreign").models.list()} == {"tiny", "speaker"}


def test_one_model_by_each_kind_of_name(world):
    models = world.openai("member").models
    assert models.retrieve("speaker").id == "speaker"
    assert models.retrieve(world.weights).id == world.weights
    assert models.retrieve(world.run).parent == "speaker"


def test_saved_weights_are_sampled_from_and_named_in_the_answer(world):
    version = world.version_of("member", world.weights)
    assert version.startswith(f"{world.run}/v")
    assert world.gate.worker("sampler")[1].requests[-1].version.name == version


@pytest.mark.parametrize("kind", ["state", "export"])
def test_a_checkpoint_that_is_not_for_sampling_is_refused_with_advice(world, kind):
    with pytest.raises(openai.NotFoundError, match="save_weights_for_sampler"):
        world.version_of("member", getattr(world, kind))


def test_another_owners_weights_do_not_exist_until_they_are_published(world):
    path = world.save("save_weights_for_sampler", "sampler_weights")
    run = world.run
    for name in (path, run):
        with pytest.raises(openai.NotFoundError) as caught:
            world.version_of("foreign", name)
        with pytest.raises(openai.NotFoundError) as unknown:
            world.version_of("foreign", name.replace(world.session, "s-000000000000"))
        assert caught.value.message.replace(world.session, "s-000000000000") == (
            unknown.value.message
        )
    world.publish(path)
    assert world.version_of("foreign", path) == world.version_of("member", path)
    with pytest.raises(openai.NotFoundError):
        world.version_of("foreign", run)


def test_a_model_in_training_answers_with_its_newest_weights(world):
    before = world.version_of("member", world.run)
    world.save("save_weights_for_sampler", "sampler_weights")
    named = world.version_of("member", world.run)
    body = world.place() | {"sampling_session_seq_id": 500}
    world.done(world.post("save_weights_for_sampler", **body))  # without a name
    unnamed = world.version_of("member", world.run)
    assert len({before, named, unnamed}) == 3
    assert before < named < unnamed
    assert world.version_of("admin", world.run) == unnamed


def test_a_run_that_saved_nothing_is_refused_with_advice(world):
    world.done(world.post("create_model", **world.model(7)))
    with pytest.raises(openai.NotFoundError, match="save_weights_for_sampler"):
        world.version_of("member", f"{world.session}:train:7")


def test_only_requests_of_one_owner_share_an_engine(world):
    started = len(world.gate.launcher.specs)
    key = world.new_key("cleo", "member")
    clients = [client_of(world.gate, key=key) for _ in range(3)]
    for client in clients:
        client.completions.create(model="speaker", prompt="x")
    assert len(world.gate.launcher.specs) == started + 1
    other = client_of(world.gate, key=world.new_key("dora", "member"))
    other.completions.create(model="speaker", prompt="x")
    assert len(world.gate.launcher.specs) == started + 2


def test_prompts_are_prepared_two_at_a_time_and_owners_take_turns(world, monkeypatch):
    """Otherwise one owner's chats would occupy all threads, which also write files."""
    begun, at_once = [], []
    refused = InvalidParameter("seen", param="prompt")

    async def many() -> list[object]:
        go_on = threading.Semaphore(0)

        def prepare(body, *_others):
            begun.append(body.prompt)
            at_once.append(len(begun) - len(ended))
            go_on.acquire()
            ended.append(body.prompt)
            raise refused

        ended = []
        inference = InferenceService(world.gate.gateway)
        monkeypatch.setattr(inference, "_prepare", prepare)

        async def ask(owner: str) -> None:
            caller = Caller(owner=owner, key_id="k-0", role="member")
            body = CompletionRequest(model="speaker", prompt=owner)
            async with inference.start_sampling(body, caller=caller, receive=None):
                raise AssertionError("it was refused")

        asked = [asyncio.ensure_future(ask("ann")) for _ in range(6)]
        await until(lambda: len(begun) == 2)
        asked.append(asyncio.ensure_future(ask("ben")))
        await until(lambda: len(inference._preparation._waiting) == 5)
        go_on.release(2)
        await until(lambda: len(begun) == 4)
        go_on.release(5)
        return await asyncio.gather(*asked, return_exceptions=True)

    assert world.gate.run(many()) == [refused] * 7
    assert max(at_once) == 2
    assert begun[:4].count("ben") == 1, begun


def test_usage_is_the_owners(world):
    key = world.new_key("emil", "member")
    client_of(world.gate, key=key).completions.create(model="speaker", prompt="the", n=2)
    list(
        client_of(world.gate, key=key).completions.create(model="speaker", prompt="a", stream=True)
    )
    with world.client(key) as http:
        sessions = http.get("/api/v1/sessions").json()["sessions"]
        found = http.get(f"/api/v1/sessions/{sessions[0]}").json()
        assert len(sessions) == 1
        assert len(found["sampler_ids"]) == 1
    world.gate.run(world.gate.gateway.usage.write)
    sums = world.gate.run(usage_of(world, "emil"))
    assert [(row["event"], row["count"], row["input_tokens"]) for row in sums] == [("sample", 2, 2)]
    assert sums[0]["output_tokens"] == 3


async def usage_of(world, owner):
    await world.gate.gateway.database.flush()
    return await world.gate.gateway.database.read(select(usage).where(usage.c.owner == owner))


def test_an_idle_implicit_session_ends_and_the_next_request_gets_another(tmp_path):
    with speaking_gateway(tmp_path, session_ttl=600, openai={"idle_ttl": 1}) as gate:
        client = client_of(gate)
        client.completions.create(model="speaker", prompt="x")
        (first,) = gate.launcher.servicers
        wait_until(lambda: first in gate.launcher.stopped)
        assert client.completions.create(model="speaker", prompt="x").choices
        assert len(gate.launcher.servicers) == 2


def test_a_model_that_is_added_again_is_read_again(world, tmp_path):
    folder = write_speaking_model(tmp_path / "m", byte_tokenizer(), template=None)
    add = world.gate.gateway.models.add
    world.gate.run(add(name="mended", path=str(folder)))
    chat = world.openai("member").chat.completions
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        chat.create(model="mended", messages=messages)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    world.gate.run(add(name="mended", path=str(folder)))
    assert chat.create(model="mended", messages=messages).choices
