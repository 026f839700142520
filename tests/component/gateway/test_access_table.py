"""Every route × {no key, foreign owner, reader, ci, member, another owner's maintainer, admin}.

Routes come from the application. A route without a row fails."""

from __future__ import annotations

import re

import pytest

from gateway.api.routing import OPEN_ROLES
from tests.support.gateway.access_world import CALLERS, CALLS, OPERATIONS, Call, World, routes

OPEN = (200, 200, 200, 200, 200, 200, 200)
NO_PROVIDER = (404, 404, 404, 404, 404, 404, 404)
SIGN_IN = (303, 303, 303, 303, 303, 303, 303)
EVERYBODY = (401, 200, 200, 200, 200, 200, 200)
OWN_LOOK = (401, 404, 200, 200, 200, 404, 200)
LOOK = (401, 404, 200, 200, 200, 200, 200)
OWN_CHANGE = (401, 404, 403, 403, 200, 404, 200)
OWN_CHANGE_EMPTY = (401, 404, 403, 403, 204, 404, 204)
OF_BLUEPRINT = (401, 404, 403, 200, 200, 404, 200)
CHANGE = (401, 200, 403, 403, 200, 200, 200)
MAINTAINER = (401, 403, 403, 403, 403, 200, 200)
ADMIN = (401, 403, 403, 403, 403, 403, 200)

EXPECTED: dict[str, tuple[int, ...]] = {
    "healthz": OPEN,
    "readyz": OPEN,
    "metrics": OPEN,  # from this machine
    "openapi": EVERYBODY,
    "docs": EVERYBODY,
    "docs_file": EVERYBODY,
    "download": OPEN,  # a signed address
    "trace_file": OPEN,  # a signed address
    "static_file": OPEN,
    "sign_in_page": OPEN,
    "sign_in": SIGN_IN,
    "begin_oidc": NO_PROVIDER,
    "finish_oidc": NO_PROVIDER,
    "sign_out": (401, 303, 303, 303, 303, 303, 303),
    "runs_page": EVERYBODY,
    "live_runs": EVERYBODY,
    "run_page": LOOK,
    "run_curves": LOOK,
    "live_run": LOOK,
    "compare_page": LOOK,
    "stop_run_form": (401, 404, 403, 403, 303, 303, 303),
    "run_logs": LOOK,
    "checkpoint_page": OWN_LOOK,
    "devices_page": EVERYBODY,
    "rollouts_page": OWN_LOOK,
    "rollout_page": (401, 404, 400, 400, 400, 404, 400),  # the run has none
    "chat_page": EVERYBODY,
    "chat": CHANGE,
    "chat_stream": (401, 400, 403, 403, 400, 400, 400),  # the form names no model
    "playground_page": EVERYBODY,
    "live_playground": EVERYBODY,
    "switch_playground": (401, 403, 403, 403, 403, 303, 303),
    "start_trial_form": (401, 303, 403, 403, 303, 303, 303),
    "trial_page": LOOK,
    "live_trial": LOOK,
    "end_trial_form": (401, 404, 403, 403, 303, 303, 303),
    "client_config": EVERYBODY,
    "dynamic_config": EVERYBODY,
    "capabilities": EVERYBODY,
    "telemetry": EVERYBODY,
    "get_version": EVERYBODY,
    "status": EVERYBODY,
    "usage_summary": EVERYBODY,
    "blueprint_usage": EVERYBODY,
    "list_models": EVERYBODY,
    "list_groups": EVERYBODY,
    "list_backends": EVERYBODY,
    "list_runs": EVERYBODY,
    "run_steps": LOOK,
    "list_run_events": LOOK,
    "run_usage": LOOK,
    "log_files": EVERYBODY,
    "log_lines": LOOK,
    "create_job": CHANGE,
    "list_jobs": EVERYBODY,
    "get_job": LOOK,
    "get_playground": EVERYBODY,
    "change_playground": MAINTAINER,
    "start_trial": CHANGE,
    "list_trials": EVERYBODY,
    "get_trial": LOOK,
    "end_trial": (401, 404, 403, 403, 200, 200, 200),
    "claim_trial": ADMIN,
    "keep_claim": ADMIN,
    "end_claim": ADMIN,
    "stop_run": (401, 404, 403, 403, 200, 200, 200),
    "get_run": LOOK,
    "change_run": OF_BLUEPRINT,
    "add_metrics": OF_BLUEPRINT,
    "run_metrics": LOOK,
    "add_rollouts": OF_BLUEPRINT,
    "run_rollouts": OWN_LOOK,
    "score_sequences": OF_BLUEPRINT,
    "sampled_versions": OWN_LOOK,
    "many_sampled_versions": EVERYBODY,
    "create_trace": CHANGE,
    "get_trace": OWN_LOOK,
    "delete_trace": OWN_CHANGE_EMPTY,
    "trace_chat_completions": (401, 404, 403, 403, 400, 404, 400),  # the model has no tokenizer
    "trace_messages": (401, 404, 403, 403, 400, 404, 400),
    "anthropic_messages": (401, 404, 403, 403, 400, 404, 400),
    "exchange_token": EVERYBODY,
    "own_key": EVERYBODY,
    "delete_own_key": (401, 204, 204, 204, 204, 204, 204),
    "retrieve_future": OWN_LOOK,
    "retrieve_futures": OF_BLUEPRINT,
    "cancel_future": (401, 404, 403, 204, 204, 404, 204),
    "create_session": (401, 200, 403, 403, 200, 200, 200),
    "session_heartbeat": OF_BLUEPRINT,
    "finish_session": (401, 404, 403, 204, 204, 204, 204),
    "list_sessions": EVERYBODY,
    "get_session": LOOK,
    "search_sessions": EVERYBODY,
    "assign_session_project": OWN_CHANGE_EMPTY,
    "trace_export": OWN_LOOK,
    "create_model": OF_BLUEPRINT,
    "get_info": OWN_LOOK,
    "forward_backward": OF_BLUEPRINT,
    "forward_of_old_sdk": (401, 400, 403, 400, 400, 400, 400),
    "optim_step": OF_BLUEPRINT,
    "save_weights": OF_BLUEPRINT,
    "save_weights_for_sampler": OF_BLUEPRINT,
    "save_weights_external": OF_BLUEPRINT,
    "load_weights": OF_BLUEPRINT,
    "create_custom_loss": OF_BLUEPRINT,
    "create_sampling_session": OF_BLUEPRINT,
    "join_sampling_session": OF_BLUEPRINT,
    "get_sampler": OWN_LOOK,
    "asample": OF_BLUEPRINT,
    "training_runs": EVERYBODY,
    "training_run": LOOK,
    "run_checkpoints": OWN_LOOK,
    "user_checkpoints": EVERYBODY,
    "weights_info": OWN_LOOK,
    "copy_weights": OWN_CHANGE,
    "delete_checkpoint": OWN_CHANGE_EMPTY,
    "publish_checkpoint": OWN_CHANGE_EMPTY,
    "unpublish_checkpoint": OWN_CHANGE_EMPTY,
    "set_checkpoint_ttl": OWN_CHANGE_EMPTY,
    "external_weights_urls": OWN_LOOK,
    "checkpoint_files": OWN_LOOK,
    "usage_events": EVERYBODY,
    "checkpoint_storage": EVERYBODY,
    "audit_log": ADMIN,
    "add_model": ADMIN,
    "remove_model": (401, 403, 403, 403, 403, 403, 204),
    "sampler_state": OWN_LOOK,
    "scale_sampler": OWN_CHANGE,
    "change_sampling_session": OF_BLUEPRINT,
    "drain_group": MAINTAINER,
    "undrain_group": MAINTAINER,
    "config": ADMIN,
    "metrics_targets": ADMIN,
    "list_owners": EVERYBODY,
    "get_owner": LOOK,
    "change_owner": ADMIN,
    "list_keys": ADMIN,
    "create_key": ADMIN,
    "revoke_key": ADMIN,
    "openai_models": EVERYBODY,
    "openai_model": OWN_LOOK,
    # This test's model has no tokenizer. Only its owner is told.
    "openai_completions": (401, 404, 403, 403, 400, 404, 400),
    "openai_chat_completions": (401, 404, 403, 403, 400, 404, 400),
}

ROUTES = routes()
NOWHERE = "s-000000000000"


def key_of(world: World, route: str, caller: str) -> str:
    """The caller's key, or a copy if the route deletes it."""
    if route != "delete_own_key" or caller == "nobody":
        return world.keys[caller]
    owner = {"foreign": "ben", "maintainer": "max", "admin": "eve"}.get(caller, "ann")
    return world.new_key(owner, "member" if caller == "foreign" else caller)


def test_every_route_has_a_row():
    names = {name for name, _ in ROUTES}
    assert names - EXPECTED.keys() == set()
    assert names - CALLS.keys() == set()
    assert all(len(row) == len(CALLERS) for row in EXPECTED.values())


def test_each_row_has_the_rights_that_its_route_states():
    for name, operation in OPERATIONS.items():
        row = dict(zip(CALLERS, EXPECTED[name], strict=True))
        if operation.role in OPEN_ROLES:
            continue
        assert row.pop("nobody") == 401, name
        foreign = row.pop("foreign")
        if name == "create_session":
            assert row.pop("ci") == 403, "the request names no blueprint"
        reach = {role: operation.reach_of(role) for role in row}
        assert {role: found is None for role, found in reach.items()} == {
            role: status == 403 for role, status in row.items()
        }, name
        if foreign == 404:
            assert (reach["maintainer"] == "all") == (row["maintainer"] != 404), name


@pytest.mark.parametrize(("route", "method"), ROUTES)
def test_each_caller_gets_the_status_of_the_table(world, route, method):
    answers = {}
    for caller in CALLERS:
        call = CALLS[route](world)
        answers[caller] = world.ask(method, call, key=key_of(world, route, caller))
    found = tuple(answer.status_code for answer in answers.values())
    assert found == EXPECTED[route], {c: a.text[:200] for c, a in answers.items()}
    for caller, answer in answers.items():
        if answer.status_code in (401, 403):
            said = answer.json()["error"]
            assert isinstance(said, dict) or answer.json()["category"] == "user"
        blind = caller == "foreign" or (caller == "maintainer" and not OPERATIONS[route].overseen)
        if blind and answer.status_code == 200 and EXPECTED[route] != OPEN:
            assert world.session not in answer.text, "a thing of another owner is shown"
        if caller != "admin" and route != "get_info":  # tells the SDK where the tokenizer is
            assert str(world.folder) not in answer.text, "a path of the server is shown"
    if answers["reader"].status_code == 403:
        assert f"a key with the role {OPERATIONS[route].role}" in answers["reader"].text


def test_a_key_for_metrics_is_good_for_these_alone_and_not_for_what_its_owner_has(world):
    key = world.new_key("ann", "metrics")
    found = {
        (route, method): world.ask(method, CALLS[route](world), key=key).status_code
        for route, method in ROUTES
        if OPERATIONS[route].role not in OPEN_ROLES
    }
    allowed = {route for (route, _), status in found.items() if status == 200}
    assert allowed == {"metrics_targets"}
    assert {*found.values()} == {200, 403}


def test_the_key_of_a_trace_is_good_for_its_agent_alone(world):
    trace, other = world.create_trace(), world.new_trace()
    refused = {}
    for route, method in ROUTES:
        if OPERATIONS[route].role in OPEN_ROLES:
            continue
        call = CALLS[route](world)  # for a trace's routes, about another trace
        refused[route] = world.ask(method, call, key=trace["key"]).status_code
    assert set(refused.values()) == {401}, refused
    for route in ("trace_chat_completions", "trace_messages"):
        call = CALLS[route](world)
        path = re.sub(r"tr-\w+", trace["id"], call.path)
        call = type(call)(path, call.json)
        assert world.ask("POST", call, key=trace["key"]).status_code == 400  # no tokenizer
        call = type(call)(path.replace(trace["id"], other), call.json)
        assert world.ask("POST", call, key=trace["key"]).status_code == 401


def test_the_key_of_a_trace_ends_with_the_key_that_made_it(world):
    secret = world.new_key("ann", "member")
    trace = world.create_trace(secret)
    call = Call(f"/traces/{trace['id']}/v1/messages", {})
    assert world.ask("POST", call, key=trace["key"]).status_code == 400
    caller = world.gate.run(lambda: world.gate.gateway.identity.identify(secret.encode()))
    world.gate.run(world.gate.gateway.keys.revoke(caller.key_id))
    assert world.ask("POST", call, key=trace["key"]).status_code == 401


@pytest.mark.parametrize(
    ("route", "method"), [r for r in ROUTES if EXPECTED.get(r[0], EVERYBODY)[1] == 404]
)
def test_anothers_thing_is_answered_as_one_that_does_not_exist_byte_by_byte(world, route, method):
    call = CALLS[route](world)
    named = re.search(r"s-[0-9a-f]{12}", call.path)
    real = named[0] if named else world.session
    foreign = world.ask(method, call, key=world.keys["foreign"])
    nothing = world.ask(method, call.about(real, NOWHERE), key=world.keys["foreign"])
    assert foreign.status_code == nothing.status_code == 404
    assert foreign.content.replace(real.encode(), NOWHERE.encode()) == nothing.content
    assert {**foreign.headers, "date": ""} == {**nothing.headers, "date": ""}


@pytest.mark.parametrize("kind", ["wrong", "revoked", "expired", "token of a revoked key"])
def test_a_key_that_is_not_good_is_refused_at_every_route(world, kind):
    key = bad_key(world, kind)
    refused = {
        (route, method): world.ask(method, CALLS[route](world), key=key).status_code
        for route, method in ROUTES
        if OPERATIONS[route].role not in OPEN_ROLES
    }
    assert set(refused.values()) == {401}, refused


def bad_key(world: World, kind: str) -> str:
    keys, identity = world.gate.gateway.keys, world.gate.gateway.identity
    if kind == "wrong":
        return "tml-" + "A" * 43
    secret = world.new_key("ann", "admin")
    caller = world.gate.run(lambda: identity.identify(secret.encode()))
    token = world.gate.run(lambda: identity.issue(caller))
    if kind == "expired":
        record = keys.get(caller.key_id)
        keys._keys[caller.key_id] = type(record)(**{**vars(record), "expires_at": 1.0})
    else:
        world.gate.run(keys.revoke(caller.key_id))
    return token if kind.startswith("token") else secret
