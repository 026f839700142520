"""Commands against a gateway on another port, as on another machine, with the keys of an
administrator, a member and a reader."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gateway.owners.auth.keys import NewKey, Role
from tandem.errors import (
    PermissionDenied,
    ServerError,
    Unauthenticated,
    UnknownRun,
    UnknownSession,
    UserError,
)
from tandem.protocol.authority import Authority, write_certificate
from tests.support.gateway.running import KEY, make_model

Command = Callable[..., str]


@pytest.fixture
def key_of(gate) -> Callable[[str], str]:
    def key(role: Role, owner: str = "ann") -> str:
        return gate.run(gate.gateway.keys.create(NewKey(owner=owner, role=role)))[1]

    return lambda role: KEY if role == "admin" else key(role)


LISTS = [
    ("status",),
    ("top", "--once"),
    ("usage",),
    ("groups", "list"),
    ("models", "list"),
    ("runs", "list"),
    ("checkpoints", "list"),
    ("sessions", "list"),
    ("logs",),
    ("ping",),
]
ADMINS = [("keys", "list"), ("config",), ("config", "--changed")]


@pytest.mark.parametrize("role", ["admin", "member", "reader"])
@pytest.mark.parametrize("command", LISTS, ids=" ".join)
def test_each_list_works_from_elsewhere_for_everybody(tandem, key_of, command, role):
    key = key_of(role)
    assert tandem(*command, key=key)
    assert json.loads(tandem(*command, "--json", key=key))


@pytest.mark.parametrize("command", ADMINS, ids=" ".join)
def test_an_administrator_s_list_works_from_elsewhere_and_says_to_others_why_not(
    tandem, key_of, command
):
    assert json.loads(tandem(*command, "--json"))
    with pytest.raises(PermissionDenied, match="does not permit this: this needs a key with the"):
        tandem(*command, key=key_of("member"))


def test_an_experiment_is_managed_from_elsewhere(gate, tandem, key_of, training, tmp_path):
    run = training.model_id
    path = training.save_weights_for_sampler("final").result().path
    assert run in tandem("runs", "list")
    assert run in tandem("runs", "show", run)
    assert path in tandem("checkpoints", "list", "--run", run)
    tandem("checkpoints", "export", path, str(tmp_path / "final"))
    assert (tmp_path / "final" / "model.safetensors").is_file()
    assert "are there" in tandem("groups", "drain", "cpu")
    assert "takes workers again" in tandem("groups", "drain", "cpu", "--undo")
    tandem("checkpoints", "delete", path, "--yes")
    for command in (("runs", "show", run), ("checkpoints", "list", "--run", run)):
        with pytest.raises(UnknownRun, match="or it is another owner's"):
            tandem(*command, key=key_of("member"))


def test_sessions_are_listed_and_ended_by_their_owner(gate, tandem, key_of):
    key = key_of("member")
    session = gate.session_id(key, display_name="night shift")
    active = ("sessions", "list", "--state", "active")
    assert f"{session}  active" in tandem(*active, key=key)
    assert session in tandem(*active, "--all", "--name", "shift")
    assert "The newest 1 sessions (--limit, --all show more)" in tandem(
        "sessions", "list", "--limit", "1"
    )
    with pytest.raises(UnknownSession):
        tandem("sessions", "end", session, "--yes", key=stranger(gate))
    with pytest.raises(PermissionDenied):
        tandem("sessions", "end", session, "--yes", key=key_of("reader"))
    with pytest.raises(UserError, match="is not a session's id"):
        tandem("sessions", "end", session, f"tinker://{session}", "--yes", key=key)
    assert "has ended" in tandem("sessions", "end", session, "--yes", key=key)
    assert "finished (interrupted)" in tandem("sessions", "list", key=key)
    assert session not in tandem(*active, key=key)


def stranger(gate) -> str:
    return gate.run(gate.gateway.keys.create(NewKey(owner="ben", role="member")))[1]


def test_keys_and_models_are_managed_from_elsewhere(gate, tandem, tmp_path):
    made = json.loads(tandem("keys", "create", "--owner", "eve", "--json"))
    assert "0.2" in tandem("ping", key=made["key"])
    assert "is revoked" in tandem("keys", "revoke", made["id"])
    with pytest.raises(Unauthenticated, match=r"refuses TINKER_API_KEY: .* was revoked"):
        tandem("ping", key=made["key"])
    there = make_model(tmp_path / "far")
    assert "is registered" in tandem("models", "add", "far", str(there))
    tandem("models", "remove", "far")


def test_ping_says_owner_role_version_and_whether_there_is_tls(tandem, key_of, gate):
    said = json.loads(tandem("ping", "--json", key=key_of("reader")))
    assert (said["owner"], said["role"], said["tls"]) == ("ann", "reader", False)
    assert said["url"] == gate.url and 0 < said["seconds"] < 30
    assert "role reader" in tandem("ping", key=key_of("reader"))


def test_config_shows_the_running_gateway_s_settings_with_meanings_and_no_secret(tandem, gate):
    changed = tandem("config", "--changed")
    assert "TANDEM_SESSION_TTL=600" in changed and KEY not in changed
    assert "A session without a heartbeat ends after this time. Default: 60.0." in changed
    assert "TANDEM_HOST" not in changed
    assert "TANDEM_HOST=127.0.0.1" in tandem("config")


@contextmanager
def other_server(tls: ssl.SSLContext | None) -> Iterator[str]:
    """A web server that is no gateway."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_wrong_server_certificate_or_scheme_is_explained(tandem, tmp_path):
    Authority.create(tmp_path / "authority")
    certificate = Authority.read(tmp_path / "authority").issue("localhost")
    write_certificate(tmp_path / "server", certificate)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "server" / "tls.crt", tmp_path / "server" / "tls.key")
    with other_server(None) as plain, other_server(tls) as encrypted:
        for url, sentence in (
            (plain, "is not a Tandem gateway"),
            (encrypted, "its certificate is not trusted"),
            (plain.replace("http:", "https:"), "speaks plain HTTP; begin the URL with http://"),
            (encrypted.replace("https:", "http:"), "does not answer"),
        ):
            with pytest.raises(ServerError, match=sentence):
                tandem("--url", url, "runs", "list")
    with pytest.raises(ServerError, match="does not answer"):
        tandem("runs", "list", "--url", plain)


def test_a_key_without_a_url_acts_as_that_key_on_the_local_gateway(
    gate, tandem, key_of, monkeypatch
):
    monkeypatch.delenv("TINKER_BASE_URL")
    here = ("--data-dir", str(gate.settings.data_dir))
    assert "role reader" in tandem("ping", *here, key=key_of("reader"))
    assert "role admin" in tandem("ping", *here, key="")
