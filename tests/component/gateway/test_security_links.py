"""Links planted in the data directory are not followed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from httpx import Client

from gateway.identifiers import parse_checkpoint_path
from tests.support.files import tree
from tests.support.gateway.access_world import API, World

SECRET = b"content-that-nobody-may-see"


@pytest.fixture
def ann(world) -> Iterator[Client]:
    with world.client(world.keys["member"]) as client:
        yield client


@pytest.fixture
def outside(world) -> Path:
    """A folder beside the data directory that looks like weights."""
    folder = world.folder / f"outside-{world.number()}"
    folder.mkdir()
    (folder / "secret").write_bytes(SECRET)
    return folder


def place(world: World, path: str) -> Path:
    found = world.gate.run(world.gate.gateway.checkpoints.find(parse_checkpoint_path(path)))
    return world.gate.settings.data_dir / found.relative_folder


def urls(world: World, client: Client, path: str) -> dict[str, str]:
    """The addresses. Damaged files have none, and are the server's fault."""
    answer = client.get(f"{world.checkpoint(path)}/external_weights_urls")
    assert answer.is_success or answer.json()["type"] == "checkpoint_damaged"
    assert str(world.folder) not in answer.json().get("error", "")
    return answer.json().get("urls", {})


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_download_does_not_follow_a_link(world, ann, outside, kind):
    path = world.save("save_weights_external", "external_weights")
    folder, good = place(world, path), urls(world, ann, path)
    if kind == "file":
        shutil.copy(outside / "secret", outside / "model.safetensors")
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(outside / "model.safetensors")
    else:
        shutil.copytree(folder, outside / "moved")
        (outside / "moved" / "model.safetensors").write_bytes(SECRET)
        shutil.rmtree(folder)
        folder.symlink_to(outside / "moved")
    answer = ann.get(good["model.safetensors"])
    assert answer.status_code != 200
    assert SECRET not in answer.content
    assert urls(world, ann, path) == {}


@pytest.mark.parametrize("route", ["save_weights", "save_weights_for_sampler"])
def test_a_copy_does_not_follow_a_link(world, ann, outside, route):
    kind = {"save_weights": "weights"}.get(route, "sampler_weights")
    path = world.save(route, kind)
    file = next(
        f for f in place(world, path).iterdir() if f.suffix in (".safetensors", ".safetensors")
    )
    file.unlink()
    file.symlink_to(outside / "secret")
    answer = ann.post(
        f"{API}/copy_weights", json={"source_path": path, "destination_project_id": "p"}
    )
    assert not answer.is_success
    for found in tree(world.gate.settings.data_dir):
        with suppress(FileNotFoundError):  # removed meanwhile
            assert found.is_symlink() or found.is_dir() or SECRET not in found.read_bytes(), found


def test_a_list_of_files_that_leads_elsewhere_gives_no_address(world, ann):
    path = world.save("save_weights_external", "external_weights")
    manifest = place(world, path) / "manifest.json"
    for name in ("../../../signing_key", "/etc/passwd", "..", "a/../b"):
        manifest.write_text(
            manifest.read_text().replace('"model.safetensors"', f'"{name}"')
            if name == "../../../signing_key"
            else manifest.read_text().replace('"../../../signing_key"', f'"{name}"')
        )
        assert urls(world, ann, path) == {}


def test_the_collector_removes_a_link_and_not_what_is_behind_it(world, ann, outside):
    path = world.save("save_weights", "weights")
    folder = place(world, path)
    (outside / "kept").mkdir()
    link = folder.parent / "planted-00000000"
    link.symlink_to(outside)
    inside = folder / "link"
    inside.symlink_to(outside)
    run_link = folder.parent.parent / "s-000000000000_train_0"
    run_link.symlink_to(outside)
    trash = folder.parent.parent / ".trash"
    if not trash.exists():
        trash.symlink_to(outside)
    assert ann.delete(world.checkpoint(path)).status_code == 204
    world.gate.run(world.gate.gateway.collector.collect_all())
    assert (outside / "secret").read_bytes() == SECRET
    assert (outside / "kept").is_dir()
    for planted in (run_link, trash):
        if planted.is_symlink():
            planted.unlink()
