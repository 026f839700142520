"""Sessions that sample one base model share a fake sampler."""

from __future__ import annotations

import pytest

from gateway.owners.auth.keys import NewKey
from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.requests import asample, create_sampler, finish
from tests.support.gateway.running import KEY, running_gateway
from tests.support.waiting import wait_until

OWN = "/api/tandem/v1"


@pytest.fixture
def start(tmp_path):
    launcher = FakeLauncher()

    def with_(**sharing):
        return running_gateway(
            tmp_path,
            launcher=launcher,
            session_ttl=600,
            sharing={"lora_runs": "when_full"} | sharing,
        )

    return with_


class Evaluator:
    """A session that samples the base model."""

    def __init__(self, gate, key: str = KEY) -> None:
        self.gate, self.key = gate, key
        self.session = gate.session_id(key)
        with gate.http(key) as client:
            self.sampler = create_sampler(client, self.session).json()["sampling_session_id"]

    def sample(self, seq_id: int = 0, *, gate=None) -> int:
        gate = gate or self.gate
        with gate.http(self.key) as client:
            answer = asample(client, self.sampler, seq_id)
            assert answer.status_code == 200, answer.text
            body = {"request_id": answer.json()["request_id"]}

            def outcome():
                found = client.post("/api/v1/retrieve_future", json=body)
                return found.status_code if found.status_code != 408 else None

            return wait_until(outcome)


def engines(gate) -> list[str]:
    return [spec.worker_id for spec in gate.launcher.specs if spec.kind == "sampler"]


def key_of(gate, owner: str) -> str:
    return gate.run(gate.gateway.keys.create(NewKey(owner=owner, role="member")))[1]


def test_an_engine_serves_all_sessions_of_an_owner_until_the_last_has_ended(start):
    with start() as gate:
        first, second = Evaluator(gate), Evaluator(gate)
        assert [each.sample() for each in (first, second)] == [200, 200]
        (engine,) = engines(gate)
        (about,) = gate.http().get(f"{OWN}/status").json()["samplers"]
        assert (about["session_id"], about["weight_version"]) == (first.session, "base/tiny")
        finish(gate.http(), first.session)
        assert second.sample(1) == 200
        assert engines(gate) == [engine] and gate.launcher.stopped == []
        finish(gate.http(), second.session)
        wait_until(lambda: gate.launcher.stopped == [engine])
        assert not gate.placed()


@pytest.mark.parametrize("across_owners", [False, True])
def test_owners_share_an_engine_only_if_the_administrator_allows_it(start, across_owners):
    with start(across_owners=across_owners) as gate:
        theirs = [Evaluator(gate, key_of(gate, name)) for name in ("ann", "ben", "cat")]
        assert [each.sample() for each in theirs] == [200, 200, 200]
        assert len(engines(gate)) == (1 if across_owners else 3)
        for each in theirs:
            status = gate.http(each.key).get(f"{OWN}/status")
            assert len(status.json()["samplers"]) == 1
            others = [other for other in theirs if other is not each]
            assert all(other.session not in status.text for other in others)


def test_the_sampler_of_a_session_that_has_ended_outlives_the_gateway(start):
    with start() as gate:
        first, second, third = (Evaluator(gate) for _ in range(3))
        assert [each.sample() for each in (first, second, third)] == [200, 200, 200]
        finish(gate.http(), first.session)
        sampler = f"{first.session}/tiny/0"
        assert list(gate.placed()) == [sampler]
    with start() as gate:  # the fake engine has ended with the first gateway
        assert list(gate.run(lambda: dict(gate.gateway.supervisor.roster.rows))) == [sampler]
        finish(gate.http(), second.session)
        assert third.sample(1, gate=gate) == 200
        assert list(gate.placed()) == [sampler]
        finish(gate.http(), third.session)
        wait_until(lambda: not gate.placed())
