"""A running gateway refuses foreign and malformed tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.support.gateway.access_world import World


def claims(world: World, owner: str = "member", **changes: object) -> dict[str, object]:
    identity = world.gate.gateway.identity
    caller = world.gate.run(lambda: identity.identify(world.keys[owner].encode()))
    token = world.gate.run(lambda: identity.issue(caller))
    found = jwt.decode(token, options={"verify_signature": False}) | changes
    return {name: value for name, value in found.items() if value is not None}


def part(content: object) -> bytes:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=")


def signed(header: dict[str, object], body: dict[str, object], key: bytes) -> str:
    """Sign tokens that a library refuses to make."""
    raw = part(header) + b"." + part(body)
    signature = base64.urlsafe_b64encode(hmac.digest(key, raw, hashlib.sha256)).rstrip(b"=")
    return (raw + b"." + signature).decode()


def status(world: World, token: str | bytes) -> set[int]:
    """Statuses for every way to present the token."""
    raw = token if isinstance(token, bytes) else token.encode()
    url = f"{world.gate.url}/api/v1/training_runs"
    ways = [{b"X-API-Key": raw}, {b"Authorization": b"Bearer " + raw}]
    return {httpx.get(url, headers=way, timeout=30, verify=False).status_code for way in ways}


def test_a_token_of_this_gateway_is_good(world):
    key = world.gate.gateway.signing_key
    assert status(world, jwt.encode(claims(world), key)) == {200}


def test_no_signature_and_other_algorithms_are_refused(world):
    key, body = world.gate.gateway.signing_key, claims(world)
    unsigned = (part({"alg": "none", "typ": "JWT"}) + b"." + part(body) + b".").decode()
    assert status(world, unsigned) == {401}
    for algorithm in ("none", "None", "NONE", "nOnE", "", None, "HS384", "RS256", "ES256", "HS0"):
        assert status(world, signed({"alg": algorithm, "typ": "JWT"}, body, key)) == {401}
        _, rest = unsigned.split(".", 1)
        assert status(world, f"{part({'alg': algorithm}).decode()}.{rest}") == {401}
    assert status(world, signed({"typ": "JWT"}, body, key)) == {401}
    assert status(world, jwt.encode(body, key, algorithm="HS512")) == {401}


def test_a_public_key_is_no_shared_secret(world):
    """RS256 as HS256: the attacker signs with the public key."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    body = claims(world)
    assert status(world, jwt.encode(body, private, algorithm="RS256")) == {401}
    assert status(world, signed({"alg": "HS256"}, body, public)) == {401}


def test_keys_that_a_header_names_or_brings_are_not_used(world):
    body, mine = claims(world), b"a key of the attacker's own, 32 b"
    jwk = {"kty": "oct", "k": base64.urlsafe_b64encode(mine).decode().rstrip("=")}
    for more in (
        {"jwk": jwk},
        {"kid": "../../../../dev/null"},
        {"kid": "signing_key' UNION SELECT 'x"},
        {"jku": f"{world.gate.url}/keys.json"},
        {"x5u": "http://127.0.0.1:1/x.pem"},
        {"crit": ["exp"]},
    ):
        assert status(world, signed({"alg": "HS256", **more}, body, mine)) == {401}
    for other in (b"", bytes(32), b"x" * 32, b"secret", b"tandem-gateway"):
        assert status(world, signed({"alg": "HS256"}, body, other)) == {401}


def test_claims_that_are_not_ours_are_refused_even_when_signed(world):
    later = int(time.time()) + 10**6
    for changes in (
        {"exp": 1},
        {"exp": None},
        {"exp": "never"},
        {"exp": [10**12]},
        {"iat": None},
        {"iat": later},
        {"iat": "now"},
        {"nbf": later},
        {"iss": "tandem"},
        {"iss": None},
        {"iss": ["tandem-gateway"]},
        {"sub": None},
        {"sub": 7},
        {"key": None},
        {"key": "k-000000000000"},
        {"key": ["x"]},
        {"key": {"a": 1}},
        {"role": None},
        {"aud": "somebody else"},
    ):
        assert status(world, jwt_of(world, changes)) == {401}, changes


def jwt_of(world: World, changes: dict[str, object]) -> str:
    return signed({"alg": "HS256"}, claims(world, **changes), world.gate.gateway.signing_key)


def test_every_changed_character_of_a_token_is_noticed(world):
    token = jwt.encode(claims(world), world.gate.gateway.signing_key)
    identity = world.gate.gateway.identity
    last = len(token) - 1  # base64 ignores its lowest bits if they are padding
    for index in range(0, last, 3):
        if token[index] == ".":
            continue
        changed = token[:index] + ("A" if token[index] != "A" else "B") + token[index + 1 :]
        with pytest.raises(Exception, match=r"token|key"):
            world.gate.run(lambda changed=changed: identity.identify(changed.encode()))
    for changed in (token + ".", "." + token, token[:-4], token.rpartition(".")[0], token * 2):
        assert status(world, changed) == {401}


def test_what_only_looks_like_a_token_is_refused(world):
    for raw in (b"", b".", b"..", b"\xff\xfe", b"hbGciOiJub25lIn0", b"A" * 30_000):
        assert status(world, b"eyJ" + raw) <= {401, 431, 400}
