"""The weight versions of many samples, asked for at once, and in JSON answers."""

from __future__ import annotations

import tinker
from tinker import types

from tests.support.gateway.access_world import Call
from tests.support.gateway.requests import asample
from tests.support.waiting import wait_until

OWN = "/api/tandem/v1"
WHERE = f"{OWN}/samples/versions"
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=3)


def request_of(sampler: tinker.SamplingClient, n: int = 1) -> str:
    answer = sampler.sample(PROMPT, n, PARAMS).result()
    return answer.sequences[0].sequence_id.rpartition(":")[0]


def test_each_id_has_its_versions_or_an_error_of_its_own_in_the_order_of_the_ids(gate, training):
    in_flight = training.save_weights_and_get_sampling_client(kind="inflight").result()
    frozen = training.save_weights_and_get_sampling_client().result()
    training.optim_step(types.AdamParams()).result()
    newer = training.save_weights_and_get_sampling_client().result()
    of_newer, carried, of_frozen = request_of(newer), request_of(in_flight, 2), request_of(frozen)
    ids = [of_newer, "s-none:sample:0:1", carried, f"{of_frozen}9", of_frozen, of_newer]
    with gate.http() as client:
        joined = client.get(WHERE, params={"ids": ",".join(ids)}).json()["requests"]
        repeated = client.get(WHERE, params={"ids": ids}).json()["requests"]
        alone = [client.get(f"{OWN}/samples/{each}/versions").json() for each in ids]
    assert joined == repeated
    assert [each["request_id"] for each in joined] == ids
    for found, single in zip(joined, alone, strict=True):
        assert {**found, "request_id": ""} == {**single, "request_id": ""}
    assert [each.get("type") for each in joined] == [
        None,
        "unknown_request",
        None,
        "unknown_request",
        None,
        None,
    ]
    assert [each["weight_step"] for each in (joined[0], joined[2], joined[4])] == [1, 0, 0]
    assert joined[0]["weight_version"] != joined[4]["weight_version"]
    run = {"version": joined[2]["weight_version"], "step": 0, "tokens": 3}
    assert (joined[0]["samples"], joined[2]["samples"]) == ([], [[run], [run]])


def test_a_thousand_ids_fit_into_a_request_and_no_more(gate, training):
    sampler = training.save_weights_and_get_sampling_client().result()
    known = request_of(sampler)
    longest = known.rpartition(":")[0] + ":4000000999"
    with gate.http() as client:
        many = client.get(WHERE, params={"ids": ",".join([longest] * 999 + [known])})
        assert many.status_code == 200
        found = many.json()["requests"]
        assert len(found) == 1000 and found[-1]["weight_step"] == 0 and "error" in found[0]
        for ids in (",".join([known] * 1001), "", ","):
            refused = client.get(WHERE, params={"ids": ids})
            assert (refused.status_code, refused.json()["type"]) == (400, "invalid_request")
        assert client.get(WHERE).status_code == 400


def test_a_sample_that_has_not_ended_has_no_versions_yet(gate, training):
    sampler = training.save_weights_and_get_sampling_client().result()
    known = request_of(sampler)
    engine = gate.worker(f"sampler-{training.model_id.partition(':')[0]}")[1]
    gate.run(engine.gate.clear)
    waiting = sampler.sample(PROMPT, 1, PARAMS)
    wait_until(lambda: len(engine.requests) == 2)
    under_way = f"{sampler._sampling_session_id}:{engine.requests[-1].seq_id}"
    with gate.http() as client:
        ids = {"ids": [under_way, known]}
        first, second = client.get(WHERE, params=ids).json()["requests"]
        assert first["type"] == "unknown_request" and "no samples yet" in first["error"]
        assert second["weight_version"]
        gate.run(engine.gate.set)
        waiting.result()
        first, _ = client.get(WHERE, params=ids).json()["requests"]
        assert first["weight_version"] == second["weight_version"]


def test_another_owners_samples_are_unknown_like_those_that_do_not_exist(world):
    nothing = world.sample.replace(world.session, "s-000000000000")
    call = Call(f"{WHERE}?ids={world.sample},{nothing}")
    own, _ = world.ask("GET", call, key=world.keys["member"]).json()["requests"]
    assert own["weight_version"] == "base/tiny"
    real, missing = world.ask("GET", call, key=world.keys["foreign"]).json()["requests"]
    assert real["type"] == missing["type"] == "unknown_request"
    assert real["error"].replace(world.session, "s-000000000000") == missing["error"]
    assert real.keys() == missing.keys()


def test_a_sample_in_json_names_the_versions_of_its_tokens(gate, training):
    in_flight = training.save_weights_and_get_sampling_client(kind="inflight").result()
    frozen = training.save_weights_and_get_sampling_client().result()
    found = []
    with gate.http() as client:
        for sampler in (in_flight, frozen):
            request_id = asample(client, sampler._sampling_session_id, 50).json()["request_id"]
            ask = {"request_id": request_id}
            as_json = {"Accept": "application/json"}

            def answer(ask=ask, as_json=as_json):
                return client.post("/api/v1/retrieve_future", json=ask, headers=as_json)

            wait_until(lambda answer=answer: answer().status_code == 200)
            found.append(answer().json())
            assert answer().headers["X-Tandem-Weight-Version"] == found[-1]["weight_version"]
    carried, fixed = found
    run = {"version": carried["weight_version"], "step": 0, "tokens": 3}
    assert [each["versions"] for each in carried["sequences"]] == [[run]]
    assert [each["versions"] for each in fixed["sequences"]] == [None]
    assert fixed["weight_version"] != carried["weight_version"]
