"""LoRA runs share trainers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from gateway.checkpoints.base_models import BaseModelEntry
from gateway.runs.trainer_hosts import TrainerHosts
from gateway.workers.needs import with_needs
from gateway.workers.request_maker import RequestMaker
from gateway.workers.run_options import RunOptions
from tandem.errors import InvalidRequest
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.settings.gateway import GatewaySettings
from tandem.settings.sharing import Sharing
from tandem.v1 import trainer_pb2
from tests.support.gateway.supervised_places import PlacesWorld, quiet
from tests.support.gateway.supervised_places import group as group_of

MODEL = BaseModelEntry(name="tiny", path="/tiny", max_length=None)


class Samplers:
    """Samplers for ranks up to 16. Those in `busy` have other weights."""

    def __init__(self) -> None:
        self.lent: list[tuple[str, str]] = []
        self.kept: list[str] = []
        self.released: list[str] = []
        self.busy = ""
        self.newest = 16

    def key_for(self, *, session_id: str, model_name: str, rank: int, apart: bool) -> str:
        return f"{session_id}/{model_name}/{self.newest}"

    def takes_adapters(self, key: str, *, rank: int) -> bool:
        return rank <= 16 and key != self.busy

    def engine_requests(self, sampler: str, options: RunOptions, **_about: object) -> list[object]:
        return []

    def keep(self, key: str, *, sharing: Sharing | None, apart: bool) -> None:
        self.kept.append(key)

    async def release_unused(self, key: str) -> None:
        self.released.append(key)

    def lend(self, key: str, session_id: str, model: BaseModelEntry) -> None:
        self.lent.append((key, session_id))


class World:
    """A group with room for one trainer and one sampler."""

    def __init__(self, **sharing: object) -> None:
        self.settings = GatewaySettings(sharing=sharing)
        self.samplers = Samplers()
        self.hosts: Any = None

    async def open(self, *, groups: int = 1) -> World:
        found = [group_of(f"gpu-{number}", workers=2) for number in range(groups)]
        self.places = await PlacesWorld(*found).open()
        samplers: Any = self.samplers
        adapter: Any = MagicMock()
        adapter.worker.return_value = None
        self.hosts = TrainerHosts(
            settings=self.settings,
            supervisor=self.places.supervisor,
            adapter=adapter,
            requests=RequestMaker(
                settings=self.settings, groups=lambda: tuple(found), prepare=with_needs
            ),
            samplers=samplers,
        )
        return self

    def run(
        self,
        name: str,
        *,
        owner: str = "ann",
        model: BaseModelEntry = MODEL,
        rank: int | None = 8,
        **options: Any,
    ) -> Any:
        lora = None if rank is None else LoraSpec(rank=rank)
        return SimpleNamespace(
            id=f"{name}:train:0",
            session_id=name,
            owner=owner,
            model=model,
            training=TrainingSpec(lora=lora),
            options=RunOptions(**{"share": self.settings.sharing.lora_runs, **options}),
            about=trainer_pb2.DescribeTrainerReply(),
        )

    def shares(self, run: Any) -> str:
        """Create a run, and return the session of its trainer."""
        return self.hosts.for_new(run).key.partition(":")[0]


async def world(**sharing: object) -> World:
    return await World(**sharing).open()


async def test_runs_that_always_share_join_the_first_trainer_that_has_room(monkeypatch):
    monkeypatch.setattr("gateway.runs.trainer_hosts.MOST_RUNS", 2)
    here = await world(lora_runs="always")
    assert [here.shares(here.run(name)) for name in "abcde"] == ["a", "a", "c", "c", "e"]
    assert here.samplers.lent == [("a/tiny/16", "b"), ("c/tiny/16", "d")]


async def test_a_run_that_shares_when_all_is_full_shares_when_it_would_have_to_wait():
    here = await world()
    first = here.run("a")
    here.hosts.for_new(first)
    assert here.shares(here.run("b")) == "a", "the first is about to have all places"
    await here.hosts.place(first)
    await quiet()
    assert here.shares(here.run("c")) == "a"
    assert here.shares(here.run("d", share="never")) == "d"
    assert here.samplers.kept == ["a/tiny/16", "d/tiny/16"]


async def test_a_run_that_shares_when_all_is_full_takes_an_empty_group_before():
    here = await World().open(groups=2)
    assert [here.shares(here.run(name)) for name in "abc"] == ["a", "b", "a"]


async def test_runs_of_a_backend_of_another_package_share_once_a_trainer_says_that_they_can():
    here = await world(lora_runs="always")
    first = here.run("a", backend="theirs")
    assert [here.shares(first), here.shares(here.run("b", backend="theirs"))] == ["a", "b"]
    first.about.shares = True
    assert here.shares(here.run("c", backend="theirs")) == "a"


@pytest.mark.parametrize(
    "other",
    [
        {"owner": "ben"},
        {"model": BaseModelEntry(name="tiny", path="/elsewhere", max_length=None)},
        {"rank": None},
        {"rank": 32},
        {"share": "never"},
        {"dtype": "bfloat16"},
        {"compile": "on"},
        {"tensor_parallel": 2},
        {"priority": -1},
        {"group": "gpu-9"},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_a_run_that_does_not_suit_gets_a_trainer_of_its_own(other):
    here = await world(lora_runs="always")
    here.shares(here.run("a"))
    run = here.run("b", **other)
    if "group" in other:
        with pytest.raises(InvalidRequest):
            here.shares(run)
    else:
        assert here.shares(run) == "b"


async def test_a_run_joins_one_whose_model_was_registered_before_the_gateway_restarted():
    here = await world(lora_runs="always")
    here.shares(here.run("a"))
    assert here.shares(here.run("b", model=replace(MODEL, added_at=1.0))) == "a"


async def test_a_trainer_that_trains_all_parameters_or_shares_never_is_joined_by_nobody():
    here = await world(lora_runs="always")
    here.shares(here.run("a", rank=None))
    here.shares(here.run("b", share="never"))
    assert here.shares(here.run("c")) == "c"


async def test_a_run_that_is_sampled_from_joins_none_whose_engine_has_all_weights():
    here = await world(lora_runs="always")
    here.shares(here.run("a"))
    here.samplers.busy = "a/tiny/16"
    assert here.shares(here.run("b")) == "b"
    assert here.shares(here.run("c", sampler="none")) == "a"


async def test_runs_share_the_engine_that_is_kept_for_them_whatever_else_its_session_has():
    here = await world(lora_runs="always")
    here.shares(here.run("a"))
    here.samplers.newest = 64  # a run of the same session made another one
    assert here.shares(here.run("b")) == "a"
    assert here.samplers.lent == [("a/tiny/16", "b")]
    whole = here.run("a", rank=None)  # in the other one
    whole.id = "a:train:1"
    here.shares(whole)
    assert here.shares(here.run("c")) == "a"


async def test_runs_of_several_owners_share_where_it_is_allowed():
    here = await world(lora_runs="always", across_owners=True)
    here.shares(here.run("a"))
    assert here.shares(here.run("b", owner="ben")) == "a"


async def test_a_trainer_is_joined_after_its_first_run_has_ended_but_not_after_the_last():
    here = await world(lora_runs="always")
    host = here.hosts.for_new(here.run("a"))
    here.hosts.for_new(here.run("b"))
    await here.hosts.leave(host, "a:train:0")
    assert here.shares(here.run("c")) == "a"
    await here.hosts.leave(host, "b:train:0")
    await here.hosts.leave(host, "c:train:0")
    assert here.shares(here.run("d")) == "d"


async def test_the_engines_of_a_trainer_that_cannot_be_left_are_released():
    here = await world()
    host = here.hosts.for_new(here.run("a"))
    with (
        patch.object(host, "leave", side_effect=ValueError("a fault")),
        pytest.raises(ValueError, match="a fault"),
    ):
        await here.hosts.leave(host, "a:train:0")
    assert here.samplers.released == ["a/tiny/16"]
