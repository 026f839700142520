"""`python -m tests.compose` exits with status 1 if the stack of docker-compose.yaml fails."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.rerun import SCRIPT
from tandem.demo.tiny_model import write_tiny_model
from tests.compose.demo import Demo, checksums
from tests.compose.engine import (
    PORT,
    PROMETHEUS_PORT,
    build_images,
    compose,
    container,
    inside,
    left,
    output,
    state,
)
from tests.compose.manual import blocks, carry_out

DEMO = (
    str(Path(sys.executable).with_name("tandem")),
    *("demo", "--base-url", f"http://127.0.0.1:{PORT}"),
)
SERVICES = ("trainer", "sampler", "gateway", "postgres", "prometheus")
STOPS_WITHIN = 30.0
_DEADLINE = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument("--no-build", action="store_true", help="Use the images that are there.")
    arguments = parser.parse_args()
    if not arguments.no_build:
        with timed("images"):
            build_images()
    folder = Path(tempfile.mkdtemp(prefix="compose-"))
    try:
        run(folder)
    except BaseException:
        print(compose("logs", "--tail=60", "--no-color"), flush=True)
        raise
    finally:
        remove()
        shutil.rmtree(folder)
    print("nothing is left")
    return 0


def run(folder: Path) -> None:
    with timed("start"):
        start()
    write_tiny_model(folder / "my-model", seed=0)
    carry_out(blocks("Models")[-1], folder)
    created = inside("gateway", "tandem", "keys", "create", "--owner", "demo", "--json")
    key = json.loads(created)["key"]
    with timed("a script in the client's container"):
        run_script(folder, key)
    backup, restore = blocks("Backup")

    with demo(folder, "undisturbed", command=("scripts/demo_compose.sh",)) as undisturbed:
        path = undisturbed.finish()
    expected = undisturbed.results(), checksums(path, copy="/tmp/undisturbed")
    assert expected[0][-1][0] >= 0.995, expected

    with demo(folder, "disturbed", key=key) as disturbed:
        wait_until(lambda: disturbed.reached(1))
        with timed("backup"):
            carry_out(backup, folder)
        kill_each(disturbed)
        path = disturbed.finish()
    assert (disturbed.results(), checksums(path, copy="/tmp/disturbed")) == expected

    remove()
    with timed("restore"):
        carry_out(restore, folder)
        wait_until(is_healthy)
    path = undisturbed.finish()
    assert checksums(path, copy="/tmp/restored") == expected[1]
    with demo(folder, "restored", key=key) as restored:
        wait_until(lambda: restored.reached(2))
        stop()
        with timed("second start"):
            start()
        path = restored.finish()
    assert (restored.results(), checksums(path, copy="/tmp/again")) == expected


def run_script(folder: Path, key: str) -> None:
    folder.chmod(0o755)  # for the container's user
    (folder / "my_loop.py").write_text(SCRIPT.format(letter="1", model="my/model"))
    (block,) = blocks("Scripts in a container")
    carry_out(f"export TINKER_API_KEY={key}\n{block}", folder)


def start() -> None:
    compose("up", "--detach", "--no-build")
    wait_until(is_healthy)


def stop() -> None:
    with timed("stop") as seconds:
        compose("stop", "--timeout=60")
        assert seconds() < STOPS_WITHIN
    codes = {name: state(name)["ExitCode"] for name in SERVICES}
    assert set(codes.values()) == {0}, codes


def remove() -> None:
    compose("down", "--volumes", "--timeout=60")
    assert not left(), left()


@contextmanager
def demo(
    folder: Path, name: str, *, command: tuple[str, ...] = DEMO, key: str = ""
) -> Iterator[Demo]:
    begun = Demo(folder, name, command=command, key=key)
    try:
        with timed(f"the demo, {name}"):
            yield begun
    finally:
        begun.kill()


def kill_each(disturbed: Demo) -> None:
    """Kill one container in each step, and start it again. At last, crash the gateway, which must
    come back by itself."""
    for name in ("prometheus", *SERVICES[:-1]):
        kill(name)
        done = len(disturbed.steps())
        print(f"killed {name} after step {done}", flush=True)
        if name == "prometheus":
            wait_until(is_scraped)
        wait_until(lambda after=done + 1: disturbed.reached(after))
    assert disturbed.runs(), "it had ended before every container was killed"
    inside_gateway = ("docker", "exec", container("gateway"))
    subprocess.run([*inside_gateway, "sh", "-c", "kill -KILL -1"], check=False)


def kill(name: str) -> None:
    """Kill a container, and start it again."""
    killed = container(name)
    output("docker", "kill", killed)
    output("docker", "start", killed)


def is_healthy() -> bool:
    return all(state(name)["Health"]["Status"] == "healthy" for name in SERVICES)


def is_scraped() -> bool:
    """Whether Prometheus has the gateway, a trainer and a sampler as targets, which all answer.

    Targets of an earlier Prometheus do not count."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/targets?state=active")
        found = answer.raise_for_status().json()["data"]["activeTargets"]
    except httpx.HTTPError:  # it is starting
        return False
    kinds = {each["labels"].get("kind", each["labels"]["job"]) for each in found}
    wanted = {"tandem-gateway", "trainer", "sampler"}
    return wanted <= kinds and all(each["health"] == "up" for each in found)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.2)


@contextmanager
def timed(what: str) -> Iterator[Callable[[], float]]:
    began = time.monotonic()
    yield lambda: time.monotonic() - began
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
