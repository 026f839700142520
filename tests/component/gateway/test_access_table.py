"""Every route × {no key, foreign owner, reader, member, admin}.

Routes come from the application. A route without a row fails."""

from __future__ import annotations

import re

import pytest

from gateway.api.routing import OPEN_ROLES
from tests.support.gateway.access_world import CALLERS, CALLS, OPERATIONS, Call, World, routes

OPEN = (200, 200, 200, 200, 200)
SIGN_IN = (303, 303, 303, 303, 303)
EVERYBODY = (401, 200, 200, 200, 200)
OWN_LOOK = (401, 404, 200, 200, 200)
OWN_CHANGE = (401, 404, 403, 200, 200)
OWN_CHANGE_EMPTY = (401, 404, 403, 204, 204)
CHANGE = (401, 200, 403, 200, 200)
ADMIN = (401, 403, 403, 403, 200)

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
    "begin_oidc": (404, 404, 404, 404, 404),  # no provider is set
    "finish_oidc": (404, 404, 404, 404, 404),
    "sign_out": (401, 303, 303, 303, 303),
    "runs_page": EVERYBODY,
    "live_runs": EVERYBODY,
    "run_page": OWN_LOOK,
    "run_curves": OWN_LOOK,
    "live_run": OWN_LOOK,
    "compare_page": OWN_LOOK,
    "stop_run_form": (401, 404, 403, 303, 303),
    "run_logs": OWN_LOOK,
    "checkpoint_page": OWN_LOOK,
    "devices_page": EVERYBODY,
    "rollouts_page": OWN_LOOK,
    "rollout_page": (401, 404, 400, 400, 400),  # the run has none
    "chat_page": EVERYBODY,
    "chat": CHANGE,
    "chat_stream": (401, 400, 403, 400, 400),  # the form names no model
    "client_config": EVERYBODY,
    "dynamic_config": EVERYBODY,
    "capabilities": EVERYBODY,
    "telemetry": EVERYBODY,
    "get_version": EVERYBODY,
    "status": EVERYBODY,
    "usage_summary": EVERYBODY,
    "list_models": EVERYBODY,
    "list_groups": EVERYBODY,
    "list_backends": EVERYBODY,
    "list_runs": EVERYBODY,
    "run_steps": OWN_LOOK,
    "list_run_events": OWN_LOOK,
    "run_usage": OWN_LOOK,
    "log_files": EVERYBODY,
    "log_lines": OWN_LOOK,
    "create_job": CHANGE,
    "list_jobs": EVERYBODY,
    "get_job": OWN_LOOK,
    "get_playground": EVERYBODY,
    "change_playground": ADMIN,
    "start_trial": CHANGE,
    "list_trials": EVERYBODY,
    "get_trial": OWN_LOOK,
    "end_trial": OWN_CHANGE,
    "claim_trial": ADMIN,
    "keep_claim": ADMIN,
    "end_claim": ADMIN,
    "stop_run": OWN_CHANGE,
    "get_run": OWN_LOOK,
    "change_run": OWN_CHANGE,
    "add_metrics": OWN_CHANGE,
    "run_metrics": OWN_LOOK,
    "add_rollouts": OWN_CHANGE,
    "run_rollouts": OWN_LOOK,
    "score_sequences": OWN_CHANGE,
    "sampled_versions": OWN_LOOK,
    "many_sampled_versions": EVERYBODY,
    "create_trace": CHANGE,
    "get_trace": OWN_LOOK,
    "delete_trace": OWN_CHANGE_EMPTY,
    "trace_chat_completions": (401, 404, 403, 400, 400),  # the model has no tokenizer
    "trace_messages": (401, 404, 403, 400, 400),
    "anthropic_messages": (401, 404, 403, 400, 400),
    "exchange_token": EVERYBODY,
    "own_key": EVERYBODY,
    "delete_own_key": (401, 204, 204, 204, 204),
    "retrieve_future": OWN_LOOK,
    "retrieve_futures": OWN_CHANGE,
    "cancel_future": OWN_CHANGE_EMPTY,
    "create_session": CHANGE,
    "session_heartbeat": OWN_CHANGE,
    "finish_session": OWN_CHANGE_EMPTY,
    "list_sessions": EVERYBODY,
    "get_session": OWN_LOOK,
    "search_sessions": EVERYBODY,
    "assign_session_project": OWN_CHANGE_EMPTY,
    "trace_export": OWN_LOOK,
    "create_model": OWN_CHANGE,
    "get_info": OWN_LOOK,
    "forward_backward": OWN_CHANGE,
    "forward_of_old_sdk": (401, 400, 403, 400, 400),
    "optim_step": OWN_CHANGE,
    "save_weights": OWN_CHANGE,
    "save_weights_for_sampler": OWN_CHANGE,
    "save_weights_external": OWN_CHANGE,
    "load_weights": OWN_CHANGE,
    "create_custom_loss": OWN_CHANGE,
    "create_sampling_session": OWN_CHANGE,
    "join_sampling_session": OWN_CHANGE,
    "get_sampler": OWN_LOOK,
    "asample": OWN_CHANGE,
    "training_runs": EVERYBODY,
    "training_run": OWN_LOOK,
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
    "remove_model": (401, 403, 403, 403, 204),
    "sampler_state": OWN_LOOK,
    "scale_sampler": OWN_CHANGE,
    "change_sampling_session": OWN_CHANGE,
    "drain_group": ADMIN,
    "undrain_group": ADMIN,
    "config": ADMIN,
    "metrics_targets": ADMIN,
    "list_owners": EVERYBODY,
    "get_owner": OWN_LOOK,
    "change_owner": ADMIN,
    "list_keys": ADMIN,
    "create_key": ADMIN,
    "revoke_key": ADMIN,
    "openai_models": EVERYBODY,
    "openai_model": OWN_LOOK,
    # This test's model has no tokenizer. Only its owner is told.
    "openai_completions": (401, 404, 403, 400, 400),
    "openai_chat_completions": (401, 404, 403, 400, 400),
}

ROUTES = routes()
NOWHERE = "s-000000000000"


def key_of(world: World, route: str, caller: str) -> str:
    """The caller's key, or a copy if the route deletes it."""
    if route != "delete_own_key" or caller == "nobody":
        return world.keys[caller]
    owner = {"foreign": "ben", "admin": "eve"}.get(caller, "ann")
    return world.new_key(owner, caller if caller in ("reader", "admin") else "member")


def test_every_route_has_a_row():
    names = {name for name, _ in ROUTES}
    assert names - EXPECTED.keys() == set()
    assert names - CALLS.keys() == set()
    assert all(len(row) == len(CALLERS) for row in EXPECTED.values())


def test_each_row_has_the_role_that_its_route_states():
    for name, operation in OPERATIONS.items():
        nobody, _, reader, member, _ = EXPECTED[name]
        if operation.role in OPEN_ROLES:
            found = operation.role
        else:
            assert nobody == 401, name
            found = "admin" if member == 403 else "member" if reader == 403 else "reader"
        # Of this table's callers, only an admin may do the same as other keys.
        admins = operation.role in ("metrics", "maintainer")
        assert found == ("admin" if admins else operation.role), name


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
        if caller == "foreign" and answer.status_code == 200 and EXPECTED[route] != OPEN:
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


def test_a_maintainer_drains_groups_and_is_refused_at_the_routes_of_admins(world):
    key = world.new_key("max", "maintainer")
    restricted = {
        (route, method): world.ask(method, CALLS[route](world), key=key).status_code
        for route, method in ROUTES
        if OPERATIONS[route].role in ("maintainer", "admin")
    }
    allowed = {route for (route, _), status in restricted.items() if status != 403}
    assert allowed == {"drain_group", "undrain_group"}


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
