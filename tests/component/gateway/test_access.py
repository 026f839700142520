"""Two owners: ownership, publishing and lending."""

from __future__ import annotations

import time

import pytest
import tinker
from fastapi import FastAPI
from sqlalchemy import select

from gateway.api.routing import Router
from gateway.app import path_operations
from gateway.identifiers import unknown_request
from gateway.storage.tables import audit, checkpoints, operations, runs, sessions, usage
from tests.support.gateway.access_world import API, Call, World
from tests.support.gateway.running import KEY, make_model
from tests.support.sdk import load_state


@pytest.fixture(scope="module")
def ben(world):
    """The other owner's service client."""
    with tinker.ServiceClient(base_url=world.gate.url, api_key=world.keys["foreign"]) as service:
        yield service


@pytest.fixture(scope="module")
def bens_run(ben):
    return ben.create_lora_training_client("tiny:full").result()


def rest(world: World, caller: str) -> tinker.RestClient:
    return tinker.RestClient(base_url=world.gate.url, api_key=world.keys[caller])


def rows(world: World, table) -> list:
    async def read():
        gateway = world.gate.gateway
        gateway.usage.write()
        await gateway.database.flush()
        return await gateway.database.read(select(table))

    return world.gate.run(read())


def test_a_route_without_a_role_or_an_unstated_audit_cannot_be_registered():
    router = Router("/api/v1", tag="SDK")

    async def brand_new() -> None: ...

    with pytest.raises(TypeError, match="states no role"):
        router.get("/new")(brand_new)
    with pytest.raises(TypeError, match="must state its action in the audit log"):
        router.operation("POST", "/new", role="member")(brand_new)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.get("/new")(brand_new)
    with pytest.raises(TypeError, match="without a role"):
        path_operations(app)


def test_another_owners_checkpoint_cannot_be_loaded_sampled_or_copied(world, ben, bens_run):
    unknown = "there is no checkpoint"
    with pytest.raises(tinker.RequestFailedError, match=f"unknown_weights: {unknown}"):
        load_state(bens_run, world.state).result()
    with pytest.raises(tinker.NotFoundError, match=unknown):
        ben.create_training_client_from_state(world.state).result()
    with pytest.raises(tinker.NotFoundError, match=unknown):
        ben.create_sampling_client(model_path=world.weights).result()
    with pytest.raises(tinker.NotFoundError, match=unknown):
        rest(world, "foreign").copy_weights(world.state, destination_project_id="p").result()
    sample = world.sample_body(0) | {"sampling_session_id": None, "model_path": world.weights}
    answer = world.ask("POST", Call(f"{API}/asample", sample), key=world.keys["foreign"])
    assert (answer.status_code, answer.json()["type"]) == (404, "unknown_weights")


def test_a_load_of_what_is_not_ones_own_fails_as_one_of_what_is_not_there(world, bens_run):
    sentences = []
    for path in (world.state, world.state.replace(world.session, "s-000000000000")):
        with pytest.raises(tinker.RequestFailedError) as refused:
            load_state(bens_run, path).result()
        sentences.append(str(refused.value).replace(path, "PATH"))
    strip = [text.split("request_id")[0] for text in sentences]
    assert strip[0] == strip[1]


def test_what_is_published_is_read_by_everybody_and_changed_by_its_owner_alone(
    world, ben, bens_run
):
    state, weights = world.save("save_weights", "weights"), world.weights
    own, foreign = rest(world, "member"), rest(world, "foreign")
    for path in (state, weights):
        own.publish_checkpoint_from_tinker_path(path).result()
    load_state(bens_run, state).result()
    loaded = ben.create_training_client_from_state(state).result()
    sampler = ben.create_sampling_client(model_path=weights).result()
    copy = foreign.copy_weights(state, destination_project_id="p").result()
    assert foreign.get_weights_info_by_tinker_path(state).result().base_model == "tiny"
    for change in (
        foreign.delete_checkpoint_from_tinker_path,
        foreign.unpublish_checkpoint_from_tinker_path,
        foreign.publish_checkpoint_from_tinker_path,
    ):
        with pytest.raises(tinker.NotFoundError):
            change(state).result()
    with pytest.raises(tinker.NotFoundError):
        foreign.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
    # A copy belongs to its maker, and stays when the checkpoint is withdrawn.
    assert {r["owner"] for r in rows(world, runs) if r["id"] == loaded.model_id} == {"ben"}
    with pytest.raises(tinker.NotFoundError):
        own.get_weights_info_by_tinker_path(copy).result()
    for path in (state, weights):
        own.unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        ben.create_sampling_client(model_path=weights).result()
    assert foreign.get_weights_info_by_tinker_path(copy).result()
    prompt = tinker.ModelInput.from_ints([1, 2])
    params = tinker.SamplingParams(max_tokens=1)
    assert sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences


def test_a_published_checkpoint_shows_no_more_of_its_run_than_itself(world):
    own, foreign = rest(world, "member"), rest(world, "foreign")
    number = world.number()
    body = world.model(number) | {"user_metadata": {"note": "private"}}
    world.done(world.post("create_model", **body))
    run_id = f"{world.session}:train:{number}"

    def save(seq_id: int, name: str) -> None:
        place = {"model_id": run_id, "seq_id": seq_id, "path": name}
        world.done(world.post("save_weights", **place))

    save(1, "shown")
    with pytest.raises(tinker.NotFoundError):
        foreign.get_training_run(run_id, access_scope="accessible").result()
    own.publish_checkpoint_from_tinker_path(f"tinker://{run_id}/weights/shown").result()
    save(2, "hidden")
    seen = foreign.get_training_run(run_id, access_scope="accessible").result()
    assert (seen.user_metadata, seen.last_checkpoint) == (None, None)
    listed = foreign.list_checkpoints(run_id).result().checkpoints
    assert [c.checkpoint_id for c in listed] == ["weights/shown"]
    assert own.get_training_run(run_id).result().user_metadata == {"note": "private"}
    assert run_id not in str(foreign.list_training_runs(access_scope="accessible").result())


def test_an_owner_lends_a_checkpoint_with_a_key_that_is_kept_nowhere(world, ben, bens_run):
    lent = world.new_key("ann", "reader")
    load_state(bens_run, world.state, token=lent).result()
    ben.create_training_client_from_state(world.state, weights_access_token=lent).result()
    foreign = rest(world, "foreign")
    assert foreign.copy_weights(
        world.state, destination_project_id="p", weights_access_token=lent
    ).result()
    assert any(world.state.encode() in r["request"] for r in rows(world, operations))
    kept = str([dict(row) for row in rows(world, operations)])
    assert lent not in kept
    assert lent not in str([dict(row) for row in rows(world, audit)])
    world.gate.run(world.gate.gateway.keys.revoke(key_id(world, lent)))
    refused = world.gate.gateway.metrics.refused_keys.labels(reason="weights_access_token")
    with pytest.raises(tinker.PermissionDeniedError, match="access token for the weights"):
        ben.create_training_client_from_state(world.state, weights_access_token=lent).result()
    assert refused._value.get() == 1


def key_id(world: World, secret: str) -> str:
    return world.gate.gateway.keys.find(secret.encode()).id


def test_what_a_reader_looks_at_stays_for_its_owner_and_is_no_sign_of_life(world):
    world.done(world.post("optim_step", **world.place(), adam_params={}))
    request_id = f"{world.run}:{world._next_seq_id - 1}"
    future = world.gate.gateway.futures.get(request_id)
    fetched = future.fetched_at = None
    session = world.gate.gateway.sessions.get(world.session)
    session.seen_at = seen = time.monotonic() - 100
    ask = Call(f"{API}/retrieve_future", {"request_id": request_id})
    assert world.ask("POST", ask, key=world.keys["reader"]).status_code == 200
    assert future.fetched_at is fetched
    assert session.seen_at == seen
    assert world.ask("POST", ask, key=world.keys["member"]).status_code == 200
    assert future.fetched_at is not None
    assert session.seen_at > seen


def test_what_an_admin_makes_in_anothers_session_belongs_to_that_owner(world):
    number = world.number()
    made = world.ask("POST", Call(f"{API}/create_model", world.model(number)), key=KEY)
    world.done(made)
    run_id = f"{world.session}:train:{number}"
    assert [r["owner"] for r in rows(world, runs) if r["id"] == run_id] == ["ann"]
    body = {"source_path": world.state, "session_id": world.session, "model_seq_id": 5000}
    copied = world.ask("POST", Call(f"{API}/copy_weights", body), key=KEY).json()["tinker_path"]
    assert [r["owner"] for r in rows(world, checkpoints) if r["path"] == copied] == ["ann"]


def test_everything_that_is_made_and_used_has_the_owner_of_its_key(world):
    made = {r["owner"] for r in rows(world, sessions) if r["id"] == world.session} | {
        r["owner"] for r in rows(world, runs) if r["session_id"] == world.session
    }
    assert made == {"ann"}
    assert {
        r["owner"] for r in rows(world, checkpoints) if r["run_id"].startswith(world.session)
    } == {"ann"}
    used = {r["event"]: r["owner"] for r in rows(world, usage) if r["session_id"] == world.session}
    assert set(used.values()) == {"ann"}
    assert {"sample", "save_weights"} <= used.keys()


def test_status_shows_each_its_own_and_how_workers_are_reached_to_admins_alone(world, bens_run):
    def status(caller: str) -> dict:
        return world.ask("GET", Call("/api/tandem/v1/status"), key=world.keys[caller]).json()

    bens = status("foreign")
    assert bens_run.model_id in [run["id"] for run in bens["runs"]]
    assert {s["owner"] for s in bens["sessions"]} == {"ben"}
    for part in ("runs", "samplers", "sampling_sessions", "workers"):
        of = [thing.get("session_id") or thing["id"].partition(":")[0] for thing in bens[part]]
        assert set(of) <= {session["id"] for session in bens["sessions"]}
        assert of
    assert {w["address"] for w in bens["workers"]} == {""}
    everything = status("admin")
    assert {s["owner"] for s in everything["sessions"]} == {"ann", "ben"}
    assert all(worker["address"] for worker in everything["workers"])


def test_prometheus_finds_the_metrics_of_each_worker_that_serves(world, bens_run):
    def ask(path: str):
        return world.ask("GET", Call(f"/api/tandem/v1/{path}"), key=world.keys["admin"]).json()

    found = {group["labels"]["worker"]: group for group in ask("metrics/targets")}
    serving = [worker for worker in ask("status")["workers"] if worker["address"]]
    assert found.keys() == {worker["id"] for worker in serving}
    for worker in serving:
        host, _, _ = worker["address"].rpartition(":")
        assert found[worker["id"]]["targets"] == [f"{host}:{worker['metrics_port']}"]
        labels = found[worker["id"]]["labels"]
        assert labels["kind"] == worker["kind"]
        assert labels["__meta_tandem_session_id"] == worker["session_id"]


def test_models_are_listed_to_each_and_where_they_lie_to_admins_alone(world, tmp_path):
    def listed(caller: str) -> list[dict]:
        call = Call("/api/tandem/v1/models")
        return world.ask("GET", call, key=world.keys[caller]).json()["models"]

    path = str(make_model(tmp_path / "variant"))
    world.gate.run(world.gate.gateway.models.add(name="a/model/variant", path=path))
    shown, everything = listed("reader"), listed("admin")
    assert [model["name"] for model in shown] == [model["name"] for model in everything]
    assert {model["path"] for model in shown} == {""}
    assert path in [model["path"] for model in everything]
    for models, told in ((shown, "name it by its path when sampling"), (everything, f"{path}/")):
        (note,) = [model["note"] for model in models if model["name"] == "a/model/variant"]
        assert note.endswith(told)
    world.gate.run(world.gate.gateway.models.remove("a/model/variant"))


def test_one_owner_cannot_read_anothers_samples_by_guessing_their_names(world, ben):
    """Names of samples follow from a session's id."""
    for request_id in (world.sample, f"{world.sample}0", world.request, "x", "", "s-1:sample:0:0"):
        ask = Call(f"{API}/retrieve_future", {"request_id": request_id})
        answer = world.ask("POST", ask, key=world.keys["foreign"])
        assert answer.status_code == 404
        assert answer.json()["error"] == unknown_request(request_id).message
        cancel = Call(f"{API}/cancel_future", {"request_id": request_id})
        assert world.ask("POST", cancel, key=world.keys["foreign"]).status_code == 404
