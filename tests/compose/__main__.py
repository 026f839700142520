"""`python -m tests.compose`: exit status 1 where the stack of docker-compose.yaml fails."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.compose.engine import ROOT, build_images, compose, container, left, output, state

PORT, PROMETHEUS_PORT = 18400, 18401
URL = f"http://127.0.0.1:{PORT}"
MODEL = "/var/lib/tandem/models/tiny-addition-0"
SERVICES = ("trainer", "sampler", "gateway", "postgres")
STOPS_WITHIN = 30.0
_DEADLINE = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument("--no-build", action="store_true", help="Use the images that are there.")
    arguments = parser.parse_args()
    os.environ["TANDEM_PORT"] = f"127.0.0.1:{PORT}"
    os.environ["PROMETHEUS_PORT"] = f"127.0.0.1:{PROMETHEUS_PORT}"
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
        compose("down", "--volumes", "--timeout=60")
        shutil.rmtree(folder)
    assert not left(), left()
    print("nothing is left")
    return 0


def run(folder: Path) -> None:
    with timed("start"):
        start()
    inside("trainer", "python", "-m", "tandem.demo.tiny_model", MODEL)
    inside("gateway", "tandem", "models", "add", "tandem/tiny-addition-0", MODEL)
    made = inside("gateway", "tandem", "keys", "create", "--owner", "ann", "--json")
    os.environ["TINKER_API_KEY"] = json.loads(made)["key"]
    with timed("the demo, undisturbed"):
        expected = finish(start_demo(folder, "undisturbed"), folder / "undisturbed")
    assert expected[-1]["reward_mean"] >= 0.995, expected[-1]
    with timed("the demo, with each container killed"):
        got = disturbed(folder)
    for name in ("reward_mean", "loss"):
        assert [each[name] for each in got] == [each[name] for each in expected], (got, expected)
    wait_until(is_scraped)
    with timed("stop") as seconds:
        compose("stop", "--timeout=60")
    assert seconds() < STOPS_WITHIN
    codes = {name: state(name)["ExitCode"] for name in SERVICES}
    assert set(codes.values()) == {0}, codes
    with timed("second start"):
        start()
    assert "tandem/tiny-addition-0" in inside("gateway", "tandem", "models", "list")


def start() -> None:
    compose("up", "--detach", "--no-build")
    wait_until(lambda: all(state(name)["Health"]["Status"] == "healthy" for name in SERVICES))


def start_demo(folder: Path, name: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("tandem")), "demo", "--base-url", URL]
    command += ["--out", str(folder / name), "--data-dir", str(folder / "data")]
    return subprocess.Popen(command, cwd=ROOT, stdout=(folder / f"{name}.log").open("wb"))


def finish(demo: subprocess.Popen[bytes], out: Path) -> list[dict[str, float]]:
    """Return the steps of a demo that has to succeed."""
    status = demo.wait(timeout=_DEADLINE)
    assert status == 0, out.with_suffix(".log").read_text()
    return steps(out)


def steps(out: Path) -> list[dict[str, float]]:
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def disturbed(folder: Path) -> list[dict[str, float]]:
    """Run the demo; after every second step kill a container, and start it again. At last the
    gateway crashes, and is to come back by itself."""
    out = folder / "disturbed"
    demo = start_demo(folder, "disturbed")
    for number, name in enumerate(SERVICES):
        wait_until(
            lambda reached=2 * number + 1: demo.poll() is not None or len(steps(out)) >= reached
        )
        kill(name)
        print(f"killed {name} after step {len(steps(out))}", flush=True)
    wait_until(lambda: demo.poll() is not None or len(steps(out)) >= 9)
    subprocess.run(
        ["docker", "exec", container("gateway"), "sh", "-c", "kill -KILL -1"], check=False
    )
    kill("prometheus")  # asked afterwards for what it has scraped
    return finish(demo, out)


def kill(name: str) -> None:
    """Kill a container, and start it again."""
    killed = container(name)
    output("docker", "kill", killed)
    output("docker", "start", killed)


def inside(service: str, *command: str) -> str:
    return compose("exec", "-T", service, *command)


def is_scraped() -> bool:
    """Whether Prometheus has had metrics of the gateway, of a trainer and of a sampler."""
    query = {"query": "max by (job, kind) (max_over_time(up[1h])) == 1"}
    url = f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/query"
    found = httpx.get(url, params=query, verify=False).json()["data"]["result"]
    return {"", "trainer", "sampler"} <= {each["metric"].get("kind", "") for each in found}


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.2)


@contextmanager
def timed(what: str) -> Iterator[Callable[[], float]]:
    began = time.monotonic()
    yield lambda: time.monotonic() - began
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
