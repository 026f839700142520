"""A gateway with two owners, and a request for each of its routes.

`CALLS` has an entry per route, about an object of `ann`. Ids begin with her session's id. With
another session's id, the request is about a missing object."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import httpx

from gateway.api.pages.templates import static_files
from gateway.app import create_app, path_operations
from gateway.owners.auth.keys import NewKey, Role
from tests.support.custom_losses import request_body, traced
from tests.support.gateway.running import (
    KEY,
    Gate,
    forward_backward_bytes,
    make_model,
    settings_for,
)
from tests.support.waiting import wait_until

API = "/api/v1"
OWN = "/api/tandem/v1"
PROTO = {"Content-Type": "application/x-protobuf"}
GROUPS = [
    {
        "name": "all",
        "devices": ["cpu:0-2"],
        "roles": ["trainer", "sampler"],
        "awake": 0,
        "workers": 1000,
    },
    {"name": "spare", "devices": ["cpu:3"], "roles": ["trainer"], "awake": 0},
]
"""Nothing depends on the group `spare`."""
CALLERS = ("nobody", "foreign", "reader", "ci", "member", "maintainer", "admin")
BLUEPRINT = {"tandem.blueprint": "sft-chat", "tandem.deadline": "3600"}


@dataclass(frozen=True)
class Call:
    path: str
    json: Mapping[str, object] | None = None
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def about(self, old: str, new: str) -> Call:
        """Return the request about another session's objects. Both ids have equal length."""
        body = json.loads(json.dumps(self.json).replace(old, new))
        content = self.content.replace(old.encode(), new.encode()) if self.content else None
        return Call(self.path.replace(old, new), body, content, self.headers)


class World:
    """`ann` has a session of a blueprint with a run, checkpoints, a sampler, a loss and samples.

    `ben` is another owner, and `max` a maintainer. The admin is the local one."""

    def __init__(self, gate: Gate, folder: Path) -> None:
        self.gate = gate
        self.folder = folder
        self._numbers = itertools.count(2)
        self._next_seq_id = 1
        self.run = "none yet"
        self._second_run = self._job = ""
        self.keys = {
            "nobody": "",
            "foreign": self.new_key("ben", "member"),
            "reader": self.new_key("ann", "reader"),
            "ci": self.new_key("ann", "ci"),
            "member": self.new_key("ann", "member"),
            "maintainer": self.new_key("max", "maintainer"),
            "admin": KEY,
        }
        self.session = self.new_session()
        self.run = f"{self.session}:train:0"
        self.done(self.post("create_model", **self.model(0)))
        self.state = self.save("save_weights", "weights")
        self.weights = self.save("save_weights_for_sampler", "sampler_weights")
        self.export = self.save("save_weights_external", "external_weights")
        self.request = f"{self.run}:1"
        sampler = self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=0,
            base_model="tiny",
        )
        self.sampler = sampler.json()["sampling_session_id"]
        self.sample = self.done(self.post("asample", **self.sample_body(0)))

    def new_key(self, owner: str, role: Role) -> str:
        keys = self.gate.gateway.keys
        return self.gate.run(keys.create(NewKey(owner=owner, role=role)))[1]

    def create_trace(self, key: str = "") -> dict[str, str]:
        call = Call(f"{OWN}/traces", {"model": "tiny"})
        return self.ask("POST", call, key=key or self.keys["member"]).json()

    def new_trace(self) -> str:
        return self.create_trace()["id"]

    def client(self, key: str) -> httpx.Client:
        return self.gate.http(key)

    def ask(self, method: str, call: Call, *, key: str) -> httpx.Response:
        headers = dict(call.headers) | ({"X-API-Key": key} if key else {})
        # Reading the system's certificates takes longer than the request.
        with httpx.Client(base_url=self.gate.url, timeout=30, verify=False) as client:
            request = client.build_request(
                method, call.path, json=call.json, content=call.content, headers=headers
            )
            answer = client.send(request, stream=True)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                first = next(answer.iter_raw(), b"")  # it has no end
                answer.close()
                return httpx.Response(answer.status_code, headers=answer.headers, content=first)
            answer.read()
        is_json = answer.headers.get("content-type") == "application/json"
        if answer.is_success and is_json and answer.content.startswith(b"{"):
            run_id, _, seq_id = str(answer.json().get("request_id", "")).rpartition(":")
            if run_id == self.run:  # only accepted requests take a place in the log
                self._next_seq_id = int(seq_id) + 1
        return answer

    def post(self, route: str, **body: object) -> httpx.Response:
        answer = self.ask("POST", Call(f"{API}/{route}", body), key=self.keys["member"])
        assert answer.is_success, answer.text
        return answer

    def done(self, answer: httpx.Response) -> str:
        """Wait for a future of ann's. Returns the request's id."""
        request_id = answer.json()["request_id"]
        ask = Call(f"{API}/retrieve_future", {"request_id": request_id})
        wait_until(lambda: self.ask("POST", ask, key=self.keys["member"]).status_code == 200)
        return request_id

    def second_run(self) -> str:
        if not self._second_run:
            self.done(self.post("create_model", **self.model(1)))
            self._second_run = f"{self.session}:train:1"
        return self._second_run

    def number(self) -> int:
        return next(self._numbers)

    def place(self) -> dict[str, object]:
        return {"model_id": self.run, "seq_id": self._next_seq_id}

    def model(self, number: int) -> dict[str, object]:
        return {"session_id": self.session, "model_seq_id": number, "base_model": "tiny:full"}

    def sample_body(self, seq_id: int) -> dict[str, object]:
        return {
            "sampling_session_id": self.sampler,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 2},
        }

    def new_session(self) -> str:
        body = {"tags": [], "sdk_version": "test", "user_metadata": BLUEPRINT}
        return self.post("create_session", **body).json()["session_id"]

    def save(self, route: str, kind: str) -> str:
        name = f"{kind}-{self.number()}"
        self.done(self.post(route, **self.place(), path=name))
        return f"tinker://{self.run}/{kind}/{name}"

    def copy(self) -> str:
        copied = self.post("copy_weights", source_path=self.state, destination_project_id="p")
        return copied.json()["tinker_path"]

    def loss(self) -> bytes:
        number = 1000 + self.number()
        graph = traced(_loss, logprobs=1)
        return request_body(graph, session_id=self.session, number=number)

    def new_model(self) -> str:
        name = f"model-{self.number()}"
        path = str(make_model(self.folder / name))
        self.gate.run(self.gate.gateway.models.add(name=name, path=path))
        return name

    def job(self) -> str:
        """Return the id of ann's job."""
        if not self._job:
            call = Call(f"{OWN}/jobs", job_body("tiny"))
            self._job = self.ask("POST", call, key=self.keys["member"]).json()["id"]
        return self._job

    def new_trial(self, *, running: bool = False) -> str:
        """Return the id of a trial of ann's. Others have none."""
        self.end_trials()
        body = {"blueprint": "grpo-arithmetic", "model": "tiny"}
        made = self.ask("POST", Call(f"{OWN}/playground/trials", body), key=self.keys["member"])
        if running:
            self.gate.run(self.gate.gateway.playground.claim_trial())
        return made.json()["id"]

    def end_trials(self) -> None:
        async def end() -> None:
            playground = self.gate.gateway.playground
            for trial in playground.all():
                await playground.end_trial(trial, "a test ends it")
            await playground.look_at_trials()

        self.gate.run(end())

    def new_run(self) -> str:
        """Return the id of a run in a new session of ann's."""
        session = self.session if self.run == "none yet" else self.new_session()
        model = {"session_id": session, "model_seq_id": 0, "base_model": "tiny:full"}
        created = self.post("create_model", **model)
        self.done(created)
        return str(created.json()["model_id"])

    def key_id(self) -> str:
        keys = self.gate.gateway.keys
        return self.gate.run(keys.create(NewKey(owner="eve", role="member")))[0].id

    def checkpoint(self, path: str) -> str:
        run_id, kind, name = path.removeprefix("tinker://").split("/")
        return f"{API}/training_runs/{run_id}/checkpoints/{kind}/{name}"

    def file(self) -> str:
        """Return a signed address without the host."""
        call = Call(f"{self.checkpoint(self.export)}/external_weights_urls")
        urls = self.ask("GET", call, key=self.keys["member"]).json()["urls"]
        return next(iter(urls.values())).removeprefix(self.gate.url)

    def trace(self) -> str:
        call = Call(f"{API}/sessions/{self.session}/trace_export")

        def url() -> str | None:
            return self.ask("GET", call, key=self.keys["member"]).json()["url"]

        wait_until(url)
        found = url()
        assert found is not None
        return found.removeprefix(self.gate.url)


def job_body(model: str) -> dict[str, object]:
    return {
        "backend": "trl",
        "model": model,
        "configuration": {"method": "sft"},
        "data": {"train": '{"prompt": "1", "completion": "2"}'},
    }


def _loss(logprobs):
    return logprobs.sum(), {}


OPERATIONS = {
    route.name: route for route in path_operations(create_app(settings_for(Path("/nonexistent"))))
}


def routes() -> list[tuple[str, str]]:
    """Return (function name, method) of every route."""
    return sorted((name, route.method) for name, route in OPERATIONS.items())


def _get(path: str) -> Callable[[World], Call]:
    return lambda world: Call(path)


def _api(name: str, **body: object) -> Callable[[World], Call]:
    return lambda world: Call(f"{API}/{name}", body)


def _own(name: str, about: Callable[[World], dict[str, object]]) -> Callable[[World], Call]:
    return lambda world: Call(f"{API}/{name}", about(world))


def _sign_in(world: World) -> Call:
    """A form with the key of ann, as her browser sends it."""
    page = world.ask("GET", Call("/sign-in"), key="")
    cookie = page.headers["set-cookie"].partition(";")[0]
    token = re.search(r'name="form_token" value="(\w+)"', page.text)
    form = {"form_token": token[1], "key": world.keys["reader"]}
    return _form("/sign-in", form, {"Cookie": cookie})


def _form(path: str, form: Mapping[str, str], headers: Mapping[str, str]) -> Call:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    return Call(path, content=urlencode(form).encode(), headers=kind | headers)


_HOURS = "starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z"

CALLS: Mapping[str, Callable[[World], Call]] = {
    "static_file": lambda w: Call(f"/static/{next(iter(static_files()))}"),
    "sign_in_page": _get("/sign-in"),
    "sign_in": _sign_in,
    "begin_oidc": _get("/sign-in/oidc"),
    "finish_oidc": _get("/sign-in/oidc/callback"),
    "sign_out": lambda w: _form("/sign-out", {}, {}),
    "runs_page": _get("/"),
    "live_runs": lambda w: Call(f"/live/runs?run={w.run}"),
    "run_page": lambda w: Call(f"/runs/{w.run}"),
    "run_curves": lambda w: Call(f"/runs/{w.run}/curves?name=reward"),
    "live_run": lambda w: Call(f"/runs/{w.run}/live"),
    "compare_page": lambda w: Call(f"/compare?run={w.run}&run={w.second_run()}"),
    "stop_run_form": lambda w: _form(f"/runs/{w.second_run()}/stop", {}, {}),
    "run_logs": lambda w: Call(f"/runs/{w.run}/logs"),
    "checkpoint_page": lambda w: Call(
        w.state.replace("tinker://", "/runs/").replace("/weights/", "/files/weights/")
    ),
    "devices_page": _get("/devices"),
    "rollouts_page": lambda w: Call(f"/runs/{w.run}/rollouts"),
    "rollout_page": lambda w: Call(f"/runs/{w.run}/rollouts/0/0"),
    "chat_page": _get("/chat"),
    "chat": lambda w: _form("/chat", {}, {}),
    "chat_stream": lambda w: _form("/chat/stream", {}, {}),
    "playground_page": _get("/playground"),
    "live_playground": _get("/playground/live"),
    "switch_playground": lambda w: _form("/playground/switch", {"open": "yes"}, {}),
    "start_trial_form": lambda w: (
        w.end_trials()
        or _form("/playground/trials", {"blueprint": "grpo-arithmetic", "model": "tiny"}, {})
    ),
    "trial_page": lambda w: Call(f"/playground/trials/{w.new_trial()}"),
    "live_trial": lambda w: Call(f"/playground/trials/{w.new_trial()}/live"),
    "end_trial_form": lambda w: _form(f"/playground/trials/{w.new_trial()}/end", {}, {}),
    "healthz": _get(f"{API}/healthz"),
    "readyz": _get(f"{API}/readyz"),
    "metrics": _get("/metrics"),
    "openapi": _get("/openapi.json"),
    "docs": _get("/docs"),
    "docs_file": _get("/docs/swagger-ui.css"),
    "download": lambda w: Call(w.file()),
    "trace_file": lambda w: Call(w.trace()),
    "client_config": _api("client/config", sdk_version="0.38.0"),
    "dynamic_config": _api("client/dynamic_config"),
    "capabilities": _get(f"{API}/get_server_capabilities"),
    "telemetry": _api("telemetry", events=[]),
    "get_version": _get(f"{OWN}/version"),
    "status": _get(f"{OWN}/status"),
    "list_models": _get(f"{OWN}/models"),
    "list_groups": _get(f"{OWN}/groups"),
    "list_backends": _get(f"{OWN}/backends"),
    "metrics_targets": _get(f"{OWN}/metrics/targets"),
    "sampler_state": lambda w: Call(f"{OWN}/samplers/{w.run}"),
    "scale_sampler": lambda w: Call(f"{OWN}/samplers/{w.run}/replicas", {"replicas": 1}),
    "change_sampling_session": lambda w: Call(f"{OWN}/sampling_sessions/{w.sampler}", {}),
    "drain_group": _get(f"{OWN}/groups/spare/drain"),
    "undrain_group": _get(f"{OWN}/groups/spare/drain"),
    "list_runs": _get(f"{OWN}/runs"),
    "create_job": lambda w: Call(f"{OWN}/jobs", job_body("tiny")),
    "list_jobs": _get(f"{OWN}/jobs"),
    "get_job": lambda w: Call(f"{OWN}/jobs/{w.job()}"),
    "get_playground": _get(f"{OWN}/playground"),
    "change_playground": lambda w: Call(f"{OWN}/playground", {"open": True}),
    "start_trial": lambda w: (
        w.end_trials()
        or Call(f"{OWN}/playground/trials", {"blueprint": "grpo-arithmetic", "model": "tiny"})
    ),
    "list_trials": _get(f"{OWN}/playground/trials"),
    "get_trial": lambda w: Call(f"{OWN}/playground/trials/{w.new_trial()}"),
    "end_trial": lambda w: Call(f"{OWN}/playground/trials/{w.new_trial()}/end"),
    "claim_trial": lambda w: Call(f"{OWN}/playground/claims"),
    "keep_claim": lambda w: Call(
        f"{OWN}/playground/claims/{w.new_trial(running=True)}", {"attempt": 1}
    ),
    "end_claim": lambda w: Call(
        f"{OWN}/playground/claims/{w.new_trial(running=True)}/end", {"attempt": 1, "error": "no"}
    ),
    "stop_run": lambda w: Call(f"{OWN}/runs/{w.new_run()}/stop", {"discard": True}),
    "get_run": lambda w: Call(f"{OWN}/runs/{w.run}"),
    "change_run": lambda w: Call(f"{OWN}/runs/{w.run}", {"tags": ["a"]}),
    "add_metrics": lambda w: Call(
        f"{OWN}/runs/{w.run}/metrics", {"rows": [{"step": 1, "values": {"reward": 0.5}}]}
    ),
    "run_metrics": lambda w: Call(f"{OWN}/runs/{w.run}/metrics"),
    "add_rollouts": lambda w: Call(
        f"{OWN}/runs/{w.run}/rollouts",
        {"batch": "a", "step": 1, "rollouts": [{"prompt": "p", "answer": "a", "reward": 1}]},
    ),
    "run_rollouts": lambda w: Call(f"{OWN}/runs/{w.run}/rollouts"),
    "run_steps": lambda w: Call(f"{OWN}/runs/{w.run}/steps"),
    "list_run_events": lambda w: Call(f"{OWN}/runs/{w.run}/events"),
    "log_files": _get(f"{OWN}/logs/files"),
    "log_lines": lambda w: Call(f"{OWN}/logs?run={w.run}"),
    "many_sampled_versions": _get(f"{OWN}/samples/versions?ids=s-000000000000:sample:0:0"),
    "score_sequences": lambda w: Call(
        f"{OWN}/logprobs", {"sampling_session_id": w.sampler, "sequences": [[1, 2]]}
    ),
    "sampled_versions": lambda w: Call(f"{OWN}/samples/{w.sample}/versions"),
    "create_trace": lambda w: Call(f"{OWN}/traces", {"model": "tiny"}),
    "get_trace": lambda w: Call(f"{OWN}/traces/{w.new_trace()}"),
    "delete_trace": lambda w: Call(f"{OWN}/traces/{w.new_trace()}"),
    "trace_chat_completions": lambda w: Call(
        f"/traces/{w.new_trace()}/v1/chat/completions",
        {"model": "any", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    ),
    "trace_messages": lambda w: Call(
        f"/traces/{w.new_trace()}/v1/messages",
        {"model": "any", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    ),
    "anthropic_messages": lambda w: Call(
        "/v1/messages",
        {"model": w.weights, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    ),
    "exchange_token": _api("auth/token"),
    "own_key": _get(f"{API}/auth/apikey/me"),
    "delete_own_key": _get(f"{API}/auth/apikey/me"),
    "retrieve_future": _own("retrieve_future", lambda w: {"request_id": w.request}),
    "retrieve_futures": _own(
        "retrieve_futures",
        lambda w: {
            "target": {"type": "sampling_session", "sampling_session_id": w.sampler},
            "timeout": 0,
        },
    ),
    "cancel_future": _own("cancel_future", lambda w: {"request_id": w.sample}),
    "create_session": _api("create_session", tags=[], sdk_version="test"),
    "session_heartbeat": _own("session_heartbeat", lambda w: {"session_id": w.session}),
    "finish_session": lambda w: Call(
        f"{API}/sessions/{w.new_session()}/finish", {"reason": {"type": "success"}}
    ),
    "list_sessions": _get(f"{API}/sessions?access_scope=accessible"),
    "get_session": lambda w: Call(f"{API}/sessions/{w.session}?access_scope=accessible"),
    "search_sessions": _own("sessions/search", lambda w: {"owner": {"type": "accessible"}}),
    "assign_session_project": lambda w: Call(
        f"{API}/sessions/{w.session}/project", {"project_id": "p"}
    ),
    "trace_export": lambda w: Call(f"{API}/sessions/{w.session}/trace_export"),
    "create_model": _own("create_model", lambda w: w.model(w.number())),
    "get_info": _own("get_info", lambda w: {"model_id": w.run}),
    "forward_backward": lambda w: Call(
        f"{API}/forward_backward",
        content=forward_backward_bytes(w.run, int(str(w.place()["seq_id"]))),
        headers=PROTO,
    ),
    "forward_of_old_sdk": _api("forward"),
    "optim_step": _own("optim_step", lambda w: w.place() | {"adam_params": {}}),
    "save_weights": _own("save_weights", lambda w: w.place() | {"path": f"a-{w.number()}"}),
    "save_weights_for_sampler": _own(
        "save_weights_for_sampler", lambda w: w.place() | {"path": f"a-{w.number()}"}
    ),
    "save_weights_external": _own(
        "save_weights_external", lambda w: w.place() | {"path": f"a-{w.number()}"}
    ),
    "load_weights": _own("load_weights", lambda w: w.place() | {"path": w.state}),
    "create_custom_loss": lambda w: Call(f"{API}/create_custom_loss", content=w.loss()),
    "create_sampling_session": _own(
        "create_sampling_session",
        lambda w: {
            "session_id": w.session,
            "sampling_session_seq_id": 1000 + w.number(),
            "model_path": w.weights,
        },
    ),
    "join_sampling_session": _own(
        "join_sampling_session", lambda w: {"sampling_session_id": w.sampler}
    ),
    "get_sampler": lambda w: Call(f"{API}/samplers/{w.sampler}"),
    "asample": _own("asample", lambda w: w.sample_body(w.number())),
    "training_runs": _get(f"{API}/training_runs?access_scope=accessible"),
    "training_run": lambda w: Call(f"{API}/training_runs/{w.run}?access_scope=accessible"),
    "run_checkpoints": lambda w: Call(f"{API}/training_runs/{w.run}/checkpoints"),
    "user_checkpoints": _get(f"{API}/checkpoints"),
    "weights_info": _own("weights_info", lambda w: {"tinker_path": w.state}),
    "copy_weights": _own(
        "copy_weights", lambda w: {"source_path": w.state, "destination_project_id": "p"}
    ),
    "delete_checkpoint": lambda w: Call(w.checkpoint(w.save("save_weights", "weights"))),
    # Of a separate run: a published checkpoint makes its run visible.
    "publish_checkpoint": lambda w: Call(f"{w.checkpoint(w.copy())}/publish"),
    "unpublish_checkpoint": lambda w: Call(f"{w.checkpoint(w.state)}/publish"),
    "set_checkpoint_ttl": lambda w: Call(f"{w.checkpoint(w.state)}/ttl", {"ttl_seconds": None}),
    "external_weights_urls": lambda w: Call(f"{w.checkpoint(w.export)}/external_weights_urls"),
    "checkpoint_files": lambda w: Call(f"{OWN}/checkpoints/files?path={w.state}"),
    "usage_events": _get(f"{API}/billing/usage/events?{_HOURS}"),
    "usage_summary": _get(f"{OWN}/usage"),
    "blueprint_usage": _get(f"{OWN}/usage/blueprints"),
    "run_usage": lambda w: Call(f"{OWN}/runs/{w.run}/usage"),
    "checkpoint_storage": _get(f"{API}/billing/usage/checkpoints/current"),
    "audit_log": _get(f"{API}/audit"),
    "add_model": lambda w: Call(
        f"{OWN}/models", {"name": "tiny", "path": str(make_model(w.folder / "tiny"))}
    ),
    "remove_model": lambda w: Call(f"{OWN}/models/{w.new_model()}"),
    "config": _get(f"{OWN}/config"),
    "list_owners": _get(f"{OWN}/owners"),
    "get_owner": _get(f"{OWN}/owners/ann"),
    "change_owner": lambda w: Call(f"{OWN}/owners/ann", {"runs": 100}),
    "list_keys": _get(f"{OWN}/keys"),
    "create_key": lambda w: Call(f"{OWN}/keys", {"owner": "eve", "role": "member"}),
    "revoke_key": lambda w: Call(f"{OWN}/keys/{w.key_id()}"),
    "openai_models": _get("/v1/models"),
    "openai_model": lambda w: Call(f"/v1/models/{w.weights}"),
    "openai_completions": lambda w: Call(
        "/v1/completions", {"model": w.weights, "prompt": [1, 2], "max_tokens": 2}
    ),
    "openai_chat_completions": lambda w: Call(
        "/v1/chat/completions",
        {"model": w.weights, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    ),
}
