"""A full disk, and work after there is room again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.gateway.requests import asample, create_sampler, optim_step
from tests.support.gateway.running import forward_backward_bytes, running_gateway

PROTO = {"Content-Type": "application/x-protobuf"}


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a filesystem")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    filling = folder / "filling"
    with suppress(OSError), filling.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    yield
    filling.unlink()


def test_accepting_saving_and_new_samplers_are_refused_by_name_and_go_on_with_room(small_disk):
    with running_gateway(small_disk, session_ttl=600) as gate, gate.http() as client:
        session_id = gate.session_id()
        run_id = gate.run_id(session_id)
        sampler_id = create_sampler(client, session_id).json()["sampling_session_id"]

        def requests():
            batch = forward_backward_bytes(run_id, 1, tokens=20_000)
            save = {"model_id": run_id, "seq_id": 3, "path": "kept"}
            yield client.post("/api/v1/forward_backward", content=batch, headers=PROTO)
            yield optim_step(client, run_id, 2)
            yield client.post("/api/v1/save_weights_for_sampler", json=save)
            yield create_sampler(client, session_id, 1)

        with full(small_disk):
            for _ in range(2):
                for answer in requests():
                    assert (answer.status_code, answer.json()["type"]) == (507, "storage_full")
                    assert "has freed space" in answer.json()["error"]
                    assert answer.headers["retry-after"]
            for path in ("healthz", "readyz"):
                assert client.get(f"/api/v1/{path}").status_code == (200 if path[0] == "h" else 507)
            beat = client.post("/api/v1/session_heartbeat", json={"session_id": session_id})
            assert beat.status_code == 200
            sampled = asample(client, sampler_id, 1)
            assert gate.retrieve(sampled.json()["request_id"]).status_code == 200
        assert {answer.status_code for answer in requests()} == {200}
        for seq_id in (1, 2, 3):
            assert gate.retrieve(f"{run_id}:{seq_id}").status_code == 200
        assert client.get("/api/v1/readyz").status_code == 200
