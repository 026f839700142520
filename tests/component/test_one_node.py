"""The commands of docs/deploy-kubernetes.md that take the overlay `cpu-dev` to the demo."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.stacks import running

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy-kubernetes.md"
OVERLAY = Path("k8s/overlays/cpu-dev")
MOST_COMMANDS = 6


@pytest.fixture(scope="module")
def commands() -> list[str]:
    section = PAGE.read_text().partition("## Try it on one node\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    return block.splitlines()


@pytest.fixture
def recorded(tmp_path, monkeypatch) -> Path:
    """Programs that write their arguments into a file, and do nothing."""
    (tmp_path / "bin").mkdir()
    calls = tmp_path / "calls"
    for name in ("docker", "kind", "k3s", "sudo"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in ("REGISTRY", "TAG", "BUILD", "LOAD", "IMAGES", "DOCKER_ARGS", "MAKEFLAGS"):
        monkeypatch.delenv(name, raising=False)
    return calls


def run(*command: str, cwd: Path = ROOT, status: int = 0) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def images_of_overlay() -> set[str]:
    images = yaml.safe_load((ROOT / OVERLAY / "kustomization.yaml").read_text())["images"]
    lines = (ROOT / OVERLAY / "settings.env").read_text().splitlines()
    workers = [line.partition("=")[2] for line in lines if "_IMAGE=" in line]
    return {*(f"{image['newName']}:{image['newTag']}" for image in images), *workers}


def made(calls: Path, what: str) -> list[list[str]]:
    found = [shlex.split(line) for line in calls.read_text().splitlines()]
    return [each for each in found if each[: len(what.split())] == what.split()]


# --- The page -------------------------------------------------------------------------------------


def test_the_page_has_at_most_six_commands_whose_targets_and_paths_exist(commands):
    assert 0 < len(commands) <= MOST_COMMANDS
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands:
        program, *arguments = shlex.split(command)
        if program == "make":
            assert arguments[0] in targets, command
        else:
            assert program in ("kind", "kubectl"), command
        for each in arguments:
            assert "/" not in each or (ROOT / each).exists(), each
    assert commands[-1] == "make demo-cluster"


# --- Images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", ["kind", "k3s"])
def test_images_are_built_for_the_overlay_and_loaded_into_the_node(commands, recorded, node):
    (command,) = (each for each in commands if each.startswith("make images"))
    run(*command.replace("kind", node).split())
    built = made(recorded, "docker build")
    assert {each[each.index("--tag") + 1] for each in built} == images_of_overlay()
    for each in built:
        assert (ROOT / each[each.index("--file") + 1]).is_file()
        assert "TANDEM_BUILD=cpu" in each
    (loaded,) = made(recorded, "kind load docker-image" if node == "kind" else "docker save")
    assert images_of_overlay() <= set(loaded)
    assert node == "kind" or made(recorded, "sudo k3s ctr images import -")
    assert not made(recorded, "docker push")


def test_images_for_a_registry_are_pushed_with_their_tag(recorded):
    run("make", "images", "REGISTRY=registry.example.org", "TAG=0.1.0", "BUILD=gpu")
    names = {
        f"registry.example.org/tandem-{each}:0.1.0"
        for each in ("gateway", "trainer", "sampler", "client")
    }
    assert {each[2] for each in made(recorded, "docker push")} == names
    for each in made(recorded, "docker build"):
        assert {"TANDEM_BUILD=gpu", "TANDEM_VERSION=0.1.0"} <= set(each)
        assert each[each.index("--tag") + 1] in names


def test_images_for_an_unknown_node_are_refused_before_the_first_build(recorded):
    assert "LOAD is kind or k3s, not docker" in run("make", "images", "LOAD=docker", status=2)
    assert not recorded.exists()


# --- Secrets --------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of the manifests and scripts."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "k8s", folder / "k8s", ignore=shutil.ignore_patterns("secrets"))
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_secrets_of_the_overlay_are_whole_and_private_and_made_once(checkout):
    run("scripts/secrets.sh", cwd=checkout)
    secrets = checkout / OVERLAY / "secrets"
    assert all(
        not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        for path in (secrets, *secrets.rglob("*"))
    )
    files = {path: path.read_bytes() for path in secrets.rglob("*") if path.is_file()}
    assert (secrets / "database-password").read_text() in (secrets / "database-url").read_text()
    assert "kind: Deployment" in run("kubectl", "kustomize", str(OVERLAY), cwd=checkout)
    run("scripts/secrets.sh", cwd=checkout)
    assert {path: path.read_bytes() for path in files} == files


def test_an_overlay_with_a_database_of_its_own_asks_for_the_url(checkout, monkeypatch):
    monkeypatch.setenv("OVERLAY", "k8s/overlays/gpu-nfs")
    told = run("scripts/secrets.sh", cwd=checkout)
    assert "k8s/overlays/gpu-nfs/secrets/database-url" in told
    secrets = checkout / "k8s" / "overlays" / "gpu-nfs" / "secrets"
    assert {path.name for path in secrets.iterdir()} == {"first-key", "authority"}


# --- The demo -------------------------------------------------------------------------------------

KUBECTL = """#!{python}
import os, signal, subprocess, sys
namespace, call, arguments = sys.argv[1:3], sys.argv[3], sys.argv[4:]
assert namespace == ["--namespace", "tandem"], sys.argv
match call:
    case "rollout":
        print("rolled out", file=sys.stderr)
    case "get":
        print("pod/tandem-0")
    case "port-forward":
        assert arguments == ["service/tandem", ":8000"]
        print("Forwarding from 127.0.0.1:{port} -> 8000", flush=True)
        signal.pause()
    case "exec":
        command = arguments[arguments.index("--") + 1:]
        environment = {{**os.environ, "TANDEM_DATA_DIR": {data!r}}}
        sys.exit(subprocess.run(command, cwd={data!r}, env=environment).returncode)
"""


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_demo_of_a_cluster_reaches_its_last_step(tmp_path, monkeypatch):
    """`kubectl` is replaced: its commands act on a stack of this machine."""
    with running(tmp_path / "data", models={}) as stack:
        text = KUBECTL.format(
            python=sys.executable,
            port=stack.stack.endpoint.url.rpartition(":")[2],
            data=str(stack.data_dir),
        )
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "kubectl").write_text(text)
        (tmp_path / "bin" / "kubectl").chmod(0o755)
        programs = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}"
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        done = subprocess.run(
            ["scripts/demo_cluster.sh", "--out", str(tmp_path / "out")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=1100,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["reward_mean"] >= 0.995
