"""Runs a Harbor recipe of tinker-cookbook in sandboxes of local processes, in place of Modal's.

The first argument is the recipe's module. The others are the recipe's own."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import chz
from tinker_cookbook.sandbox import SandboxResult

TASKS = 4
GRADE = "echo $((RANDOM % 2)) > /logs/verifier/reward.txt\n"
"""A task's test. Rewards differ, so that there is something to train."""


class LocalSandbox:
    """A temporary folder. The absolute paths of Harbor's protocol lead into it."""

    def __init__(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="sandbox-"))

    @property
    def sandbox_id(self) -> str:
        return self._root.name

    async def send_heartbeat(self, timeout: int = 30) -> None: ...

    async def run_command(
        self,
        command: str,
        workdir: str | None = None,
        timeout: int = 60,
        max_output_bytes: int | None = None,
    ) -> SandboxResult:
        return await self._run(command, timeout=timeout)

    async def read_file(
        self, path: str, max_bytes: int | None = None, timeout: int = 60
    ) -> SandboxResult:
        return await self._run(f"cat {path}", timeout=timeout)

    async def write_file(
        self, path: str, content: str, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        return await self._run(f"cat > {path}", given=content, timeout=timeout)

    async def cleanup(self) -> None:
        shutil.rmtree(self._root)

    async def _run(self, command: str, *, given: str = "", timeout: int) -> SandboxResult:
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-c", self._inside(command)],
            input=self._inside(given),
            cwd=self._root,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return SandboxResult(stdout=done.stdout, stderr=done.stderr, exit_code=done.returncode)

    def _inside(self, text: str) -> str:
        for folder in ("/tests", "/logs"):
            text = text.replace(folder, f"{self._root}{folder}")
        return text


async def local_sandbox(_environment: Path, _timeout: int) -> LocalSandbox:
    return LocalSandbox()


def main(module: str, arguments: list[str]) -> None:
    sys.modules["modal"] = ModuleType("modal")  # imported, also where its sandboxes are not used
    recipe = importlib.import_module(module)
    harbor = importlib.import_module("tinker_cookbook.recipes.harbor_rl.harbor_env")
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tests"
        tests.mkdir()
        (tests / "test.sh").write_text(GRADE)
        tasks = [harbor.HarborTask(f"task-{n}", f"Write {n}.", Path(folder)) for n in range(TASKS)]
        config = chz.entrypoint(recipe.CLIConfig, argv=arguments)
        takes = inspect.signature(recipe.cli_main).parameters
        # One recipe takes it beside its configuration, the other in it.
        beside = {"sandbox_factory": local_sandbox} if "sandbox_factory" in takes else {}
        asyncio.run(recipe.cli_main(config, tasks, **beside))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
