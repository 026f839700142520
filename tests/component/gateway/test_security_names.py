"""Hostile names are refused, with no access outside the data directory.

The requests come from the access table, so new routes are attacked, too."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from gateway.identifiers import check_model_name, check_name, parse_checkpoint_path
from tandem.agent.launcher import ProcessLauncher
from tandem.errors import UserError
from tandem.protocol.worker import WorkerSpec
from tandem.wire.v1 import tinker_pb2
from tests.support.files import tree
from tests.support.gateway.access_world import API, CALLS, OWN, Call, World, routes

SECRET = "content-that-nobody-may-see"
SLASHES = {
    "dots": "../../outside",
    "many dots": "../" * 40 + "etc/passwd",
    "absolute": "/etc/passwd",
    "backslashes": "..\\..\\outside",
    "encoded": "%2e%2e%2foutside",
    "twice encoded": "%252e%252e%252foutside",
    "overlong UTF-8": "%c0%ae%c0%ae%c0%afoutside",
    "fullwidth slash": "..\uff0f..\uff0foutside",
    "division slash": "..\u2215outside",
    "fraction slash": "..\u2044outside",
    "fullwidth dots": "\uff0e\uff0e/outside",
    "one dot leader": "\u2024\u2024/outside",
}
CHARACTERS = {
    "only dots": "..",
    "a dot": ".",
    "a hidden file": ".ssh",
    "a partial": ".partial-x",
    "nothing": "",
    "a blank": " ",
    "a line": "a\nb",
    "a carriage return": "a\r\nSet-Cookie: x",
    "NUL": "a\0b",
    "NUL in front of an end": "outside\0.json",
    "a combining mark": "a\u0301\u0301",
    "right to left": "\u202egnp.exe",
    "zero width": "a\u200bb",
    "a lone accent": "\u0301",
    "another digit": "\u0661",
    "a superscript": "\u00b2",
    "a ligature": "\ufb01le",
    "the Kelvin sign": "\u212a",
    "a byte order mark": "\ufeffa",
    "a tilde": "~root",
    "a variable": "$HOME",
    "a drive": "C:\\outside",
    "a stream": "a:b",
    "a share": "\\\\host\\share",
    "an address": "file:///etc/passwd",
    "SQL": "x' OR '1'='1",
    "a wildcard": "%",
    "long": "a" * 5000,
    "very long": "é" * 5_000,
}
HOSTILE = SLASHES | CHARACTERS
"""All go to the parsers."""
SENT = [
    "dots", "absolute", "encoded", "twice encoded", "fullwidth slash", "only dots", "a hidden file",
    "nothing", "a line", "NUL", "right to left", "an address", "a wildcard", "long",
]  # fmt: skip
"""One of each kind, sent in every place for a name."""

every_kind = pytest.mark.parametrize("bad", [HOSTILE[name] for name in SENT], ids=SENT)


@pytest.fixture(autouse=True)
def nothing_moves(world) -> Iterator[None]:
    """No new files beside the data directory, and no odd names in it."""
    (world.folder / "outside").write_text(SECRET)
    before = around(world.folder)
    yield
    assert around(world.folder) == before
    assert (world.folder / "outside").read_text() == SECRET
    for path in tree(world.gate.settings.data_dir):
        assert path.name.isascii(), path
        assert len(path.name) < 200, path
        assert not path.is_symlink(), path


def around(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if not p.name.startswith(("model-", "tiny"))}


def names_something(value: object, world: World) -> bool:
    return isinstance(value, str) and (world.session in value or value.startswith(("a-", "tinker")))


def variants(body: Any, bad: str, world: World) -> Iterator[Any]:
    """The body with each name replaced, wholly or in part."""
    if isinstance(body, dict):
        for key, value in body.items():
            for changed in variants(value, bad, world):
                yield {**body, key: changed}
    elif names_something(body, world):
        yield bad
        if body.startswith("tinker://"):
            run, kind, name = body.removeprefix("tinker://").split("/")
            yield f"tinker://{run}/{kind}/{bad}"
            yield f"tinker://{run}/{bad}/{name}"
            yield f"tinker://{bad}/{kind}/{name}"
            yield f"tinker://{run}/{kind}/{name}/{bad}"
        elif ":" in body:
            yield f"{body.rpartition(':')[0]}:{bad}"
            yield f"{body}:{bad}"


def outcome(world: World, answer: httpx.Response) -> httpx.Response:
    """The answer, or its operation's failure."""
    if answer.status_code != 200 or "request_id" not in answer.json():
        return answer
    failed = world.gate.retrieve(answer.json()["request_id"])
    assert failed.json().get("category") == "user", failed.text
    return httpx.Response(400, content=failed.content)


def refused(answer: httpx.Response, what: object) -> None:
    assert 400 <= answer.status_code < 500, (what, answer.status_code, answer.text[:300])
    assert answer.status_code not in (401, 409), (what, answer.status_code)
    assert SECRET not in answer.text
    assert "root:x:" not in answer.text
    assert "Traceback" not in answer.text
    assert "set-cookie" not in answer.headers


@every_kind
def test_every_name_in_a_body_is_refused(world, bad):
    asked = 0
    for route, method in routes():
        if route in ("create_custom_loss", "forward_backward") or method == "DELETE":
            continue  # others have no JSON body
        call = CALLS[route](world)
        if call.json is None:
            continue
        for index in range(len(list(variants(call.json, bad, world)))):
            call = CALLS[route](world)  # the number in the log is free again
            body = list(variants(call.json, bad, world))[index]
            if bad == "" and body.get("model_path") == "":
                continue  # as if absent
            asked += 1
            answer = world.ask(method, replace(call, json=body), key=world.keys["member"])
            refused(outcome(world, answer), (route, body))
    assert asked > 20


@every_kind
def test_every_name_in_a_path_is_refused(world, bad):
    """Encoded once and twice."""
    run, session, sampler = world.run, world.session, world.sampler
    good = f"training_runs/{run}/checkpoints/weights/{world.state.rpartition('/')[2]}"
    if bad in ("", "."):
        pytest.skip("a client leaves it out of the path")
    with world.client(world.keys["member"]) as client:
        for encoded in (quote(bad, safe=""), quote(quote(bad, safe=""), safe="")):
            for method, path in (
                ("GET", f"training_runs/{encoded}"),
                ("GET", f"training_runs/{run}{encoded}/checkpoints"),
                ("GET", f"training_runs/{run}/checkpoints/external_weights/{encoded}/"
                        "external_weights_urls"),
                ("DELETE", f"training_runs/{run}/checkpoints/weights/{encoded}"),
                ("DELETE", f"training_runs/{run}/checkpoints/{encoded}/x"),
                ("DELETE", f"training_runs/{encoded}/checkpoints/weights/x"),
                ("POST", f"{good}/publish{encoded}"),
                ("PUT", f"training_runs/{run}/checkpoints/weights/{encoded}/ttl"),
                ("GET", f"samplers/{encoded}"),
                ("GET", f"samplers/{sampler}{encoded}"),
                ("GET", f"sessions/{encoded}"),
                ("GET", f"sessions/{session}{encoded}/trace_export"),
                ("PUT", f"sessions/{encoded}/project"),
                ("POST", f"sessions/{encoded}/finish"),
                ("GET", f"downloads/{run}/external_weights/x/{encoded}"),
                ("GET", f"downloads/{run}/external_weights/{encoded}/config.json"),
                ("GET", f"trace_files/{encoded}"),
            ):  # fmt: skip
                body = {"json": {"ttl_seconds": 7200}} if method == "PUT" else {}
                answer = client.request(method, f"{API}/{path}", **body)
                if answer.status_code in (307, 308):
                    assert answer.headers["location"].startswith(world.gate.url)
                    continue
                refused(answer, (method, path))
            answer = client.get(f"{OWN}/checkpoints/files", params={"path": bad})
            refused(answer, ("files", bad))


def test_paths_that_a_client_library_would_tidy_are_refused_as_they_are(world):
    """Raw bytes, so that no library resolves the dots."""
    host, port = world.gate.server.servers[0].sockets[0].getsockname()[:2]
    for target in (
        "/api/v1/downloads/../../../../etc/passwd",
        "/api/v1/trace_files/../api_key",
        "/api/v1/trace_files/..%2fapi_key",
        "/api/v1/trace_files/%2e%2e%2fapi_key",
        "//etc/passwd",
        "/api/v1/healthz/../../tandem/v1/config",
        "/api/v1/downloads/../tandem/v1/config",
        "/api/v1/trace_files/../../tandem/v1/config",
        "/api/v1/downloads/%2e%2e/%2e%2e/tandem/v1/config",
        "/metrics/../api/tandem/v1/config",
    ):
        with socket.create_connection((host, port), timeout=60) as connection:
            connection.sendall(
                f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
            )
            answer = b""
            while part := connection.recv(65536):
                answer += part
        status = int(answer.split()[1])
        assert status in (400, 401, 403, 404), (target, answer[:300])
        assert b"root:x:" not in answer
        assert b"tml-" not in answer
        assert b"data_dir" not in answer


@every_kind
def test_names_in_protobuf_and_in_custom_losses_are_refused(world, bad):
    run = tinker_pb2.ForwardBackwardRequest(model_id=bad, seq_id=1, loss_fn="cross_entropy")
    with world.client(world.keys["member"]) as client:
        content, headers = run.SerializeToString(), {"Content-Type": "application/x-protobuf"}
        refused(client.post(f"{API}/forward_backward", content=content, headers=headers), bad)
        graph = json.loads(world.loss())
        for changed in variants(graph, bad, world):
            refused(client.post(f"{API}/create_custom_loss", content=json.dumps(changed)), bad)


@every_kind
def test_names_that_only_an_admin_chooses_are_refused(world, bad):
    good = str(world.folder / "tiny")
    with world.client(world.keys["admin"]) as client:
        refused(client.post(f"{OWN}/models", json={"name": bad, "path": good}), bad)
        refused(client.post(f"{OWN}/models", json={"name": "new", "path": bad}), bad)
        refused(client.delete(f"{OWN}/models/{quote(bad, safe='')}"), bad)
        refused(client.delete(f"{OWN}/keys/{quote(bad, safe='') or 'x'}"), bad)
        refused(client.post(f"{OWN}/keys", json={"owner": bad, "role": "member"}), bad)
        refused(client.post(f"{OWN}/keys", json={"owner": "eve", "role": bad}), bad)


@pytest.mark.parametrize("form", [
    "{}", "tinker://s-1:train:0/weights/{}", "tinker://{}/weights/a",
    "tinker://{}:train:0/weights/a", "tinker://s-1:train:{}/weights/a", "tinker://s-1:train:0/{}/a",
])  # fmt: skip
def test_the_parsers_let_nothing_through(form):
    for bad in HOSTILE.values():
        with pytest.raises(UserError):
            parse_checkpoint_path(form.format(bad))
        for check in (check_name, check_model_name):
            with pytest.raises(UserError):
                check(bad)


@pytest.mark.parametrize("name", [
    "evil/../../x", "a/..", "../a", "a/./b", "a//b", "/a", "a/", "a/.hidden/b", "a/b/c/d", "a/b\n",
    "a/" + "b" * 129, "a" * 100 + "/" + "b" * 100,
])  # fmt: skip
def test_each_part_of_a_models_name_is_a_name(name, world):
    with pytest.raises(UserError):
        check_model_name(name)
    with world.client(world.keys["admin"]) as client:
        answer = client.post(f"{OWN}/models", json={"name": name, "path": str(world.folder)})
        refused(answer, name)
        assert "model name" in answer.json()["error"]


def test_names_of_models_with_up_to_three_parts_are_good():
    for name in ("tiny", "org/tiny", "org/tiny/variant", "_a/-b/c.d-e_f", "a..b", "a" * 128):
        check_model_name(name)


@pytest.mark.parametrize("label", ["a\nb", "a\x1b[2Jb", "a\u202eb", "a\u2028b", "a\u200bb", "\x85"])
def test_labels_have_nothing_that_hides_or_turns_round_text(label, world):
    with world.client(world.keys["admin"]) as client:
        new = {"owner": "eve", "role": "member", "name": label}
        refused(client.post(f"{OWN}/keys", json=new), label)
        project = {"project_id": label}
        refused(client.put(f"{API}/sessions/{world.session}/project", json=project), label)
        refused(client.post(f"{API}/create_session", json={"tags": [], **project}), label)


async def test_a_worker_id_that_is_no_name_starts_nothing(tmp_path):
    launcher = ProcessLauncher(data_dir=tmp_path)
    spec = WorkerSpec(
        worker_id="../evil", kind="trainer", secret="s", model_name="m", model_path="/m",
        session_id="s-1",
    )  # fmt: skip
    with pytest.raises(AssertionError):
        await launcher.start(spec)
    assert list(tmp_path.iterdir()) == []


def test_the_calls_of_the_table_are_good_when_nobody_tampers(world):
    """Otherwise the refusals above prove nothing."""
    call: Call = CALLS["save_weights"](world)
    assert world.ask("POST", call, key=world.keys["member"]).status_code == 200
    assert world.ask("POST", CALLS["weights_info"](world), key=world.keys["member"]).is_success
