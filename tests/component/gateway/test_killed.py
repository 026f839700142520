"""A gateway is repeatedly killed while it copies and deletes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
import pytest
import tinker

from tandem.stack import Stack
from tandem.weights import open_version
from tests.support.gateway.running import KEY, running_gateway

ROUNDS = 2
ACTIONS_BEFORE_THE_KILL = 25


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A data directory with one checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("killed")
    with running_gateway(folder, session_ttl=600) as gate, gate.service() as service:
        training = service.create_lora_training_client("tiny:full").result()
        paths = [
            training.save_state("kept").result().path,
            training.save_weights_for_sampler("kept").result().path,
            training.save_weights_external("kept").result().path,
        ]
    return gate.settings.data_dir, paths


def work(stack: Stack, paths: list[str], done: threading.Semaphore) -> None:
    """Copies checkpoints and deletes the copies until the gateway is gone."""
    headers = {"X-API-Key": KEY}
    base = f"{stack.endpoint.url}/api/v1"
    with httpx.Client(headers=headers, timeout=20) as client:
        try:
            while True:
                for path in paths:
                    body = {"source_path": path, "destination_project_id": "p"}
                    copy = client.post(f"{base}/copy_weights", json=body).json()["tinker_path"]
                    done.release()
                    run_id, kind, name = copy.removeprefix("tinker://").split("/")
                    url = f"{base}/training_runs/{run_id}/checkpoints/{kind}/{name}"
                    if run_id[-9] in "01234567":  # for about half of them
                        client.delete(url)
        except httpx.HTTPError:
            return


def on_the_disk(data_dir: Path) -> set[str]:
    """Runs with files, once all partial files should be gone."""
    folders = [*data_dir.glob("weights/s-*"), *data_dir.glob("checkpoints/s-*")]
    for folder in folders:
        assert not [child for child in folder.iterdir() if child.name.startswith(".")]
    return {folder.name for folder in folders}


def test_after_every_kill_all_that_is_listed_is_whole_and_no_part_of_a_copy_is_left(saved):
    data_dir, paths = saved
    for _ in range(ROUNDS):
        with Stack(data_dir=data_dir, settings={"port": "0", "api_key": KEY}) as stack:
            done = threading.Semaphore(0)
            workers = [
                threading.Thread(target=work, args=(stack, paths, done), daemon=True)
                for _ in range(4)
            ]
            for worker in workers:
                worker.start()
            for _ in range(ACTIONS_BEFORE_THE_KILL):
                assert done.acquire(timeout=30), "the gateway did not copy"
            stack.process.kill()
            for worker in workers:
                worker.join(30)
        with Stack(data_dir=data_dir, settings={"port": "0", "api_key": KEY}) as stack:
            rest = tinker.RestClient(base_url=stack.endpoint.url, api_key=KEY)
            listed = rest.list_user_checkpoints(limit=1000).result().checkpoints
            found = {checkpoint.tinker_path for checkpoint in listed}
            assert set(paths) <= found
            runs = {path.removeprefix("tinker://").partition("/")[0] for path in found}
            known = {run.replace(":", "_") for run in runs}
            assert on_the_disk(data_dir) >= known
            for unnamed in on_the_disk(data_dir) - known:  # killed before it wrote their rows
                (folder,) = [*data_dir.glob(f"*/{unnamed}/*")]
                assert {"checkpoint.json", "manifest.json"} & {f.name for f in folder.iterdir()}
            for path in found:
                check_whole(data_dir, path)


def check_whole(data_dir: Path, path: str) -> None:
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    root = "checkpoints" if kind == "weights" else "weights"
    folders = list((data_dir / root / run_id.replace(":", "_")).iterdir())
    assert folders, path
    if kind == "weights":
        (folder,) = folders
        assert folder.name.startswith(f"{name}-")
        record = json.loads((folder / "checkpoint.json").read_text())
        for entry in record["files"]:
            assert (folder / entry["name"]).stat().st_size == entry["bytes"]
    else:
        for folder in folders:
            open_version(folder, name=f"{run_id}/{folder.name}")
