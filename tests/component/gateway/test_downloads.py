"""External weights: exports, and downloads by signed address."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
import pyrage
import pytest
import tinker

from gateway.owners.auth.signing import sign
from tandem.settings.gateway import GatewaySettings
from tandem.weights import Manifest
from tests.support.gateway.checkpoints import error_of, expire, listed, place, step
from tests.support.gateway.running import running_gateway
from tests.support.waiting import wait_until


def get(url: str, **headers: str) -> httpx.Response:
    return httpx.get(url, headers=headers, timeout=20)


def altered(url: str, *, path: str | None = None, **query: str) -> str:
    parts = urlsplit(url)
    fields = dict(parse_qsl(parts.query)) | query
    return parts._replace(path=path or parts.path, query=urlencode(fields)).geturl()


def pinned(gate, folder: Path) -> bool:
    relative = str(folder.relative_to(gate.settings.data_dir))
    return relative in gate.gateway.checkpoints.pins.folders()


def refused(url: str, status: int, type_: str, **headers: str) -> str:
    answer = get(url, **headers)
    assert (answer.status_code, answer.json()["type"]) == (status, type_), answer.text
    assert answer.json()["category"] == "user"
    return answer.json()["error"]


def test_exported_weights_are_those_of_that_moment_and_download_whole(gate, training, rest):
    step(training, 3)
    exporting = training.save_weights_external("final")
    step(training)
    path = exporting.result().path
    assert path == f"tinker://{training.model_id}/external_weights/final"
    signed = rest.get_external_weights_urls(path).result()
    assert set(signed.urls) == {"model.safetensors", "config.json"}, "no manifest, no more"
    lifetime = signed.expires - dt.datetime.now(dt.UTC)
    assert dt.timedelta(minutes=50) < lifetime <= dt.timedelta(hours=1)
    answer = get(signed.urls["model.safetensors"])
    assert answer.content == b"weights of step 3"
    assert answer.headers["content-length"] == "17"
    size = sum(len(get(url).content) for url in signed.urls.values())
    assert listed(rest, training.model_id)[path].size_bytes == size


def test_the_answer_to_an_export_says_its_size(gate, training):
    with gate.http() as client:
        body = {"model_id": training.model_id, "seq_id": 1, "path": "sized"}
        promise = client.post("/api/v1/save_weights_external", json=body).json()
        answer = gate.retrieve(promise["request_id"]).json()
    assert answer["path"].endswith("/external_weights/sized")
    assert answer["size_bytes"] == len(b"weights of step 0") + len('{"fake": true}')


def test_parts_of_a_file_are_served(training, rest):
    path = training.save_weights_external("parts").result().path
    url = rest.get_external_weights_urls(path).result().urls["model.safetensors"]
    whole = b"weights of step 0"
    for asked, status, content in (
        ("bytes=0-6", 206, whole[:7]),
        ("bytes=8-", 206, whole[8:]),
        ("bytes=-4", 206, whole[-4:]),
        ("bytes=3-99", 206, whole[3:]),
    ):
        answer = get(url, Range=asked)
        assert (answer.status_code, answer.content) == (status, content)
    assert get(url, Range="bytes=0-6").headers["content-range"] == "bytes 0-6/17"
    assert get(url, Range="bytes=99-").status_code == 416


def test_a_signature_of_ours_does_not_lead_out_either(gate, training, rest):
    """Even the signing key opens only files in the manifest."""
    path = training.save_weights_external("listed").result().path
    url = rest.get_external_weights_urls(path).result().urls["config.json"]
    query = dict(parse_qsl(urlsplit(url).query))
    for file in ("manifest.json", "..", "none.bin"):
        parts = (training.model_id, "external_weights", "listed", query["folder"], file)
        signature = sign(gate.gateway.signing_key, "download", "GET", *parts, query["expires"])
        where = urlsplit(url).path.replace("config.json", file.replace("..", "%2e%2e"))
        answer = get(altered(url, path=where, signature=signature))
        assert answer.status_code == 404


def test_addresses_of_what_is_gone_or_was_made_anew_lead_nowhere(gate, training, rest):
    path = training.save_weights_external("name").result().path
    url = rest.get_external_weights_urls(path).result().urls["model.safetensors"]
    rest.delete_checkpoint_from_tinker_path(path).result()
    refused(url, 404, "unknown_weights")
    step(training)
    training.save_weights_external("name").result()
    refused(url, 404, "unknown_weights")
    second = rest.get_external_weights_urls(path).result().urls["model.safetensors"]
    assert get(second).content == b"weights of step 1"
    expire(gate, path)
    refused(second, 404, "unknown_weights")


def test_a_download_under_way_is_finished_after_its_checkpoint_is_gone(gate, training, rest):
    path = training.save_weights_external("large").result().path
    training.save_weights_external("newer").result()
    url = rest.get_external_weights_urls(path).result().urls["model.safetensors"]
    folder = min(place(gate, training.model_id, "weights"))
    size = 64 * 2**20
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    with httpx.stream("GET", url, timeout=20) as answer:
        blocks = answer.iter_bytes(2**16)
        received = len(next(blocks))
        rest.delete_checkpoint_from_tinker_path(path).result()
        gate.run(gate.gateway.collect(training.model_id))
        assert folder.is_dir()
        received += sum(len(block) for block in blocks)
    assert received == size
    wait_until(lambda: not pinned(gate, folder))
    gate.run(gate.gateway.collect(training.model_id))
    assert not folder.is_dir()


def test_a_download_that_is_broken_off_gives_its_files_back(gate, training, rest):
    path = training.save_weights_external("large").result().path
    training.save_weights_external("newer").result()  # the run pins the newest
    url = rest.get_external_weights_urls(path).result().urls["model.safetensors"]
    folder = min(place(gate, training.model_id, "weights"))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(256 * 2**20)
    with httpx.stream("GET", url, timeout=20) as answer:
        assert answer.status_code == 200, answer.read()
        chunks = answer.iter_bytes(2**16)  # its end closes the connection
        next(chunks)
        assert pinned(gate, folder)
    wait_until(lambda: not pinned(gate, folder))


def test_only_external_weights_have_addresses(gate, training, rest):
    path = training.save_state("state").result().path
    with gate.http() as client:  # the SDK asks only for external weights
        named = f"/api/v1/training_runs/{training.model_id}/checkpoints/weights/state"
        answer = client.get(f"{named}/external_weights_urls")
        assert (answer.status_code, answer.json()["type"]) == (400, "invalid_request")
        assert "save_weights_external" in answer.json()["error"]
    with pytest.raises(tinker.NotFoundError):
        rest.get_external_weights_urls(path.replace("/weights/", "/external_weights/")).result()


def test_every_file_is_encrypted_to_every_recipient(gate, training, rest):
    step(training, 2)
    keys = [pyrage.x25519.Identity.generate() for _ in range(2)]
    path = (
        training.save_weights_external(
            "secret", age_encryption_recipients=[str(key.to_public()) for key in keys]
        )
        .result()
        .path
    )
    urls = rest.get_external_weights_urls(path).result().urls
    assert set(urls) == {"model.safetensors.age", "config.json.age"}
    sealed = get(urls["model.safetensors.age"]).content
    for key in keys:
        assert pyrage.decrypt(sealed, [key]) == b"weights of step 2"
    wait_until(lambda: len(place(gate, training.model_id, "weights")) == 1)
    (folder,) = place(gate, training.model_id, "weights")
    assert not (folder / "model.safetensors").exists(), "the plain files are gone"
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    assert manifest.canary is None
    assert listed(rest, training.model_id)[path].size_bytes == manifest.bytes


def test_an_encryption_that_fails_leaves_neither_plain_nor_sealed_files(
    gate, training, monkeypatch
):
    monkeypatch.setattr("sys.executable", "/bin/false")
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    future = training.save_weights_external("secret", age_encryption_recipients=[recipient])
    assert "the weights could not be encrypted" in error_of(future)
    wait_until(lambda: place(gate, training.model_id, "weights") == [])


@pytest.mark.parametrize("recipient", ["age1nonsense", "ssh-rsa AAAA", "", "AGE-SECRET-KEY-1"])
def test_what_is_no_recipient_is_refused_before_anything_is_written(gate, training, recipient):
    future = training.save_weights_external("secret", age_encryption_recipients=[recipient])
    assert "is no age recipient" in error_of(future)
    assert place(gate, training.model_id, "weights") == []


def test_addresses_begin_with_the_public_url_if_there_is_one(tmp_path):
    assert GatewaySettings(data_dir=tmp_path).public_url == ""
    changes = {"session_ttl": 600, "public_url": "https://tandem.example/base/"}
    with running_gateway(tmp_path, **changes) as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        path = training.save_weights_external("final").result().path
        rest = tinker.RestClient(base_url=gate.url, api_key=gate.settings.api_key)
        for url in rest.get_external_weights_urls(path).result().urls.values():
            assert url.startswith("https://tandem.example/base/api/v1/downloads/")
