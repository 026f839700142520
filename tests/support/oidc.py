"""A provider of OpenID Connect on loopback, which can also answer wrongly."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

import flask
import httpx
import werkzeug.serving
from joserfc import jwt
from joserfc.jwk import RSAKey

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it uses deprecated parts of Authlib
    import oidc_provider_mock

Forger = Callable[[dict, object], str]


class Provider:
    """`forge` makes the ID token from its true claims and the provider's key. `token` replaces
    other parts of that answer, and `discovery` parts of the provider's description. `paths` are the
    paths of all requests, and `forms` the requests for tokens."""

    def __init__(self, port: int = 0) -> None:
        self.forge: Forger | None = None
        self.discovery: dict[str, object] = {}
        self.token: dict[str, object] = {}
        self.paths: list[str] = []
        self.forms: list[dict[str, str]] = []
        self.storage = None
        app = oidc_provider_mock.app(require_nonce=True)
        app.before_request(self._note)
        app.after_request(self._change)
        self._server = werkzeug.serving.make_server("localhost", port, app, threaded=True)
        self.port = self._server.server_port
        self.url = f"http://localhost:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    def know(self, sub: str, **claims: object) -> None:
        url = f"{self.url}/users/{sub}"
        assert httpx.put(url, json=claims, verify=False).status_code == 204

    def approve(self, address: str, sub: str) -> str:
        """Answer the provider's form as a person, and return the address to go back to."""
        answer = httpx.post(address, data={"sub": sub}, verify=False)
        assert answer.status_code == 302, answer.text
        return answer.headers["location"]

    def change_key(self) -> None:
        self.storage.jwk = type(self.storage.jwk).generate_key(is_private=True)

    def _note(self) -> None:
        self.storage = flask.g.oidc_provider_mock_storage
        self.paths.append(flask.request.path)
        if flask.request.path == "/oauth2/token":
            self.forms.append(flask.request.form.to_dict())

    def _change(self, response: flask.Response) -> flask.Response:
        said = response.get_json(silent=True)
        if flask.request.path == "/oauth2/token" and self.forge and "id_token" in said:
            key = RSAKey.import_key(self.storage.jwk.as_dict(is_private=True))
            key.ensure_kid()
            claims = jwt.decode(said["id_token"], key, algorithms=["RS256"]).claims
            response.set_data(
                flask.json.dumps({**said, "id_token": self.forge(claims, key)} | self.token)
            )
        elif "openid-configuration" in flask.request.path and self.discovery:
            response.set_data(flask.json.dumps({**said, **self.discovery}))
        return response


@contextmanager
def running_provider(port: int = 0) -> Iterator[Provider]:
    provider = Provider(port)
    try:
        yield provider
    finally:
        provider.close()


def query_of(address: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
