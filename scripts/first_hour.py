"""The first hour of a new user, timed, in a fresh clone of this checkout's last commit.

It follows README.md, in its order. It then runs the `tandem` commands of docs/training.md, some of
docs/operations.md, the completion of docs/first-experiment.md, the resuming script of
docs/training.md with a Ctrl-C, and a download. It needs only git, make and Python, and reads
commands and scripts from the pages. A command that fails, prints a traceback or leaves a process
ends it with status 1. `PYTHON` names the interpreter of the set-up. `--fresh` downloads everything,
as on a new machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BAD = ("Traceback", "FutureWarning")
RESUMED_STEPS = 30  # enough for a Ctrl-C before the end
OPERATIONS = (
    "tandem keys create --owner ann ",
    "tandem keys list",
    "tandem models add my-model ",
    "tandem models list",
    "tandem models remove ",
)
"""The beginnings of the commands of docs/operations.md that need no download and stop nothing."""
DEADLINE = 7200.0  # seconds of a command, such as a download or the gateway
BATCH = """\
from tinker import types
data = [
    types.Datum(
        model_input=types.ModelInput.from_ints([10, 11]),
        loss_fn_inputs={"target_tokens": [11, 12], "weights": [1.0, 1.0]},
    )
]
"""


class Failed(Exception):
    """A failure that would stop a new user."""


def blocks(page: str, language: str = "") -> list[str]:
    """Return the code blocks of a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    return [text for kind, text in found if kind == language]


def commands() -> list[str]:
    """Return the `.venv/bin/tandem` commands of README and training.md, without their comments."""
    lines = "\n".join([*blocks("README.md"), *blocks("docs/training.md")]).splitlines()
    return [shlex.join(shlex.split(line, comments=True)) for line in lines if "bin/tandem " in line]


def operations(model: str) -> list[str]:
    """Return `tandem config` and the `OPERATIONS`, with the base model in the folder `model`."""
    lines = "\n".join(blocks("docs/operations.md")).splitlines()
    words = [shlex.split(line, comments=True) for line in lines if line.startswith(OPERATIONS)]
    names = {"/srv/my-model": model, "Qwen/Qwen3-8B": "my-model"}
    filled = [shlex.join(names.get(word, word) for word in each) for each in words]
    return [f".venv/bin/{command}" for command in ("tandem config", *filled)]


def filled_in(path: str, *, worker: str) -> dict[str, str]:
    """Return the values of the commands' placeholders: `path` is that of the first example."""
    return {"RUN": path.split("/")[2], "WORKER": worker, "PATH": path}


def first_example() -> str:
    return blocks("README.md", "python")[0]


def openai_example() -> str:
    """Return the completion of docs/first-experiment.md: the demo's model has no chat template."""
    _, chat, completion = blocks("docs/first-experiment.md", "python")
    client, _ = chat.split("answer = ")
    return client + completion


def resuming_script() -> str:
    """Return docs/training.md's script with a batch, and with enough steps for a Ctrl-C."""
    script = next(each for each in blocks("docs/training.md", "python") if "newest_state" in each)
    longer = re.sub(r'"addition", \d+,', f'"addition", {RESUMED_STEPS},', script)
    assert longer != script
    return BATCH + longer


class Hour:
    """A clone, and the seconds of each step in it."""

    def __init__(self, folder: Path, *, port: int, fresh: bool) -> None:
        self.clone, self.port = folder / "tandem", port
        self.steps: list[tuple[str, float]] = []
        self.started: list[subprocess.Popen[str]] = []
        kept = ("TANDEM_BUILD",)
        prefixes = ("TANDEM_", "TINKER_", "PYTHONPATH", "VIRTUAL_ENV", "MAKE", "MFLAGS", "ARGS")
        self.env = {k: v for k, v in os.environ.items() if k in kept or not k.startswith(prefixes)}
        if fresh:
            self.env |= {"UV_CACHE_DIR": f"{folder}/uv", "PIP_CACHE_DIR": f"{folder}/pip"}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        print(f"\n=== {name}", flush=True)
        began = time.monotonic()
        yield
        self.steps.append((name, time.monotonic() - began))
        print(f"=== {self.steps[-1][1]:.1f} s", flush=True)

    def start(self, command: str) -> subprocess.Popen[str]:
        print(f"$ {command}", flush=True)
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.clone,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started.append(process)
        deadline = threading.Timer(DEADLINE, end, [process])
        deadline.daemon = True
        deadline.start()
        return process

    def close(self) -> None:
        """Stop running commands, such as after a Ctrl-C of this script."""
        for process in self.started:
            if process.poll() is None:
                interrupt(process)

    def run(self, command: str, *, name: str = "") -> str:
        """Run a command as its own step. Return its output."""
        with self.step(name or command):
            process = self.start(command)
            text = read(process)
            if process.wait() or any(word in text for word in BAD):
                raise Failed(f"`{command}` failed with status {process.returncode}")
        return text

    def left(self) -> list[str]:
        """Return the processes of the clone's programs that still run."""
        listed = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
        return [line for line in listed.splitlines() if f"{self.clone}/" in line]

    def nothing_is_left(self) -> None:
        if left := self.left():
            raise Failed("these still run:\n" + "\n".join(left))


def end(process: subprocess.Popen[str]) -> None:
    """Kill a command, with its children, that still runs."""
    if process.poll() is None:
        print(f"=== killed after {DEADLINE} s", flush=True)
        os.killpg(process.pid, signal.SIGKILL)


def read(process: subprocess.Popen[str], until: str = "") -> str:
    """Print a process's output. Return it, up to the line with `until`."""
    text = ""
    for line in process.stdout or ():
        print(line, end="", flush=True)
        text += line
        if until and until in line:
            return text
    if until:
        raise Failed(f"the command ended without {until!r}")
    return text


def interrupt(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C. Return the rest of the command's output."""
    os.killpg(process.pid, signal.SIGINT)
    text = read(process)
    process.wait()
    return text


def set_up(hour: Hour) -> None:
    hour.run("make setup")
    hour.run("make demo")
    hour.nothing_is_left()


def use(hour: Hour) -> None:
    """Start Tandem, and run the commands and scripts of the pages."""
    up, *others = commands()
    model = up.split("=")[1].split()[0]
    if hour.port != 8000:
        up += f" --port {hour.port}"
    with hour.step(up):
        gateway = hour.start(up)
        printed = read(gateway, until="Ctrl-C")
    if not hour.left():
        raise Failed("the gateway is not among the processes that are looked at")
    exports = dict(re.findall(r"export (\w+)=(\S+)", printed))
    hour.env |= exports
    try:
        (hour.clone / "first.py").write_text(first_example())
        said = hour.run(".venv/bin/python first.py", name="README's first example")
        (path,) = re.findall(r"tinker://\S+", said)
        logs = hour.run(".venv/bin/tandem logs --json", name="tandem logs --json")
        worker = next(log["log"] for log in json.loads(logs)["logs"] if log["run"])
        given = filled_in(path, worker=worker)
        for command in others:
            hour.run(" ".join(given.get(word, word) for word in command.split()), name=command)
        for command in operations(model):
            hour.run(command)
        example = openai_example().replace("tinker://RUN/sampler_weights/NAME", path)
        (hour.clone / "openai_example.py").write_text(f"{example}\n")
        hour.run(".venv/bin/python openai_example.py", name="the example for OpenAI's client")
        resume(hour)
        listed = hour.run(".venv/bin/tandem checkpoints list --json")
        state = re.findall(r'tinker://[^"]+/weights/newest', listed)[0]
        hour.run(f".venv/bin/tinker checkpoint download {state}", name="tinker checkpoint download")
    finally:
        with hour.step("Ctrl-C of tandem up"):
            interrupt(gateway)
    hour.nothing_is_left()
    with socket.socket() as connection:
        if not connection.connect_ex(("127.0.0.1", int(exports["TINKER_BASE_URL"].split(":")[2]))):
            raise Failed("the gateway's port is still open")


def resume(hour: Hour) -> None:
    """Press Ctrl-C in the resuming script after a save, and start it again."""
    (hour.clone / "resuming.py").write_text(resuming_script())
    with hour.step("docs/training.md's resuming script, until a Ctrl-C after its first save"):
        script = hour.start(".venv/bin/python resuming.py")
        read(script, until="step 3 of")
        interrupt(script)
    said = hour.run(".venv/bin/python resuming.py", name="the same again: it resumes")
    first = int(re.findall(r"step (\d+) of", said)[0])
    if first < 3:
        raise Failed(f"the script began again with step {first}")


def report(hour: Hour, load: tuple[float, ...]) -> dict[str, Any]:
    """Print the table. Return it with the machine."""
    versions = subprocess.run(
        [".venv/bin/tandem", "version", "--json"], cwd=hour.clone, capture_output=True
    )
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": [round(load[0], 1), round(os.getloadavg()[0], 1)],
        "versions": json.loads(versions.stdout or "{}"),
        "steps": [{"step": name, "seconds": round(seconds, 1)} for name, seconds in hour.steps],
    }
    print("\n| step | seconds |\n|---|---|")
    for name, seconds in hour.steps:
        print(f"| `{name}` | {seconds:.1f} |")
    print(f"| all | {sum(seconds for _, seconds in hour.steps):.0f} |\n")
    print(", ".join(f"{name} {number}" for name, number in found["versions"].items()))
    print(f"{found['date']}, {found['machine']}, load before and after: {found['load']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--fresh", action="store_true", help="without pip's and uv's caches")
    parser.add_argument("--json", type=Path, help="write the table to this file, too")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        hour = Hour(Path(folder).resolve(), port=arguments.port, fresh=arguments.fresh)
        with hour.step("git clone"):
            subprocess.run(["git", "clone", "-q", ROOT, hour.clone], check=True)
        try:
            set_up(hour)
            use(hour)
        except Failed as failure:
            print(f"first_hour: {failure}", file=sys.stderr)
            return 1
        finally:
            hour.close()
        found = report(hour, load)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
