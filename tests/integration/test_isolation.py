"""A running stack's listening addresses, services, and secrets."""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from tinker import TrainingClient

from tests.support.files import tree
from tests.support.sdk import SOON, sample
from tests.support.stacks import TIED, TestStack, running
from tests.support.waiting import wait_until

KEY = "tml-" + "isolation-test-Key_" * 2
ELSEWHERE = "hf_elsewhere0123456789"
RECORDER = """
import os, secrets
draw = secrets.token_urlsafe
def token_urlsafe(size=None):
    drawn = draw(size)
    with open(os.environ["TANDEM_TEST_DRAWN"], "a") as file:
        print(drawn, file=file)
    return drawn
secrets.token_urlsafe = token_urlsafe
"""
"""Records the stack's random secrets, for which the tests then look."""


@pytest.fixture(scope="module")
def isolated(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestStack]:
    """A separate stack, because a worker is killed. It has a user's key and two connected ranks."""
    folder = tmp_path_factory.mktemp("isolated") / "data"
    settings = {"trainer_ranks": "2"}
    (folder.parent / "sitecustomize.py").write_text(RECORDER)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_TOKEN", ELSEWHERE)
        patched.setenv("PYTHONPATH", str(folder.parent), prepend=os.pathsep)
        patched.setenv("TANDEM_TEST_DRAWN", str(folder.parent / "drawn"))
        with running(folder, models={TIED: models[TIED]}, settings=settings) as stack:
            yield stack


@pytest.fixture(scope="module")
def training(isolated: TestStack) -> Iterator[TrainingClient]:
    with isolated.service() as service:
        made = service.create_lora_training_client(f"{TIED}:full").result(timeout=240)
        sample(made.save_weights_and_get_sampling_client().result(timeout=240), [5, 6, 7])
        yield made


def ready(stack: TestStack) -> dict[str, dict]:
    found = {w["kind"]: w for w in stack.status()["workers"] if w["state"] == "ready"}
    assert set(found) == {"trainer", "sampler"}
    return found


def listening(pids: set[int]) -> set[tuple[int, str]]:
    """Process and address of each listening TCP socket."""
    sockets: dict[str, int] = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(fd.readlink())
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                sockets[target[8:-1]] = pid
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add((sockets[fields[9]], address_of(fields[1].partition(":")[0])))
    return found


def address_of(text: str) -> str:
    """From the kernel's form: words of four bytes in the machine's order."""
    words = bytes.fromhex(text)
    raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    address = ip_address(raw)
    return str(getattr(address, "ipv4_mapped", None) or address)


def test_every_process_listens_on_this_machine_alone(
    isolated: TestStack, training: TrainingClient
) -> None:
    pids = {process.pid for process in isolated.processes()}
    assert len(pids) >= 4, "gateway, sampler, trainer and its second rank"
    found = listening(pids)
    assert len({pid for pid, _ in found}) >= 3
    assert all(ip_address(address).is_loopback for _, address in found), found


def test_workers_serve_metrics_and_nothing_else_over_http(
    isolated: TestStack, training: TrainingClient
) -> None:
    """The engine is a library in the worker, without a server."""
    for worker in ready(isolated).values():
        base = f"http://127.0.0.1:{worker['metrics_port']}"
        metrics = httpx.get(f"{base}/metrics", timeout=SOON).text
        for path in ("v1/models", "health", "sleep", "collective_rpc", "load_lora_adapter", "x"):
            for method in ("GET", "POST"):
                answer = httpx.request(method, f"{base}/{path}", timeout=SOON)
                shown = answer.text if answer.is_success else ""
                assert not shown or shown.startswith("# HELP"), (path, shown[:200])
        assert isolated.stack.endpoint.api_key not in metrics


def test_secrets_are_in_no_argument_environment_log_status_or_crash(
    isolated: TestStack, training: TrainingClient
) -> None:
    key = isolated.stack.endpoint.api_key
    signing = (isolated.data_dir / "signing_key").read_text().strip()
    drawn = drawn_secrets(isolated)
    assert len(drawn) >= 3, "the key's, and one of each worker"
    secrets = {key, signing, *drawn}
    for url in (isolated.stack.endpoint.url,):
        for headers in ({"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
            answer = httpx.get(f"{url}/api/v1/sessions", headers=headers, timeout=SOON)
            assert answer.status_code == 401
        wrong = {"params": {"k": KEY}, "content": KEY}
        assert httpx.post(f"{url}/api/v1/auth/token", timeout=SOON, **wrong).is_error
    workers = ready(isolated)
    processes = isolated.processes()
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        arguments = (folder / "cmdline").read_bytes()
        environment = (folder / "environ").read_bytes()
        for secret in secrets:
            assert secret.encode() not in arguments + environment, process.command
        if process.pid != isolated.stack.process.pid:
            assert ELSEWHERE.encode() not in environment, process.command
        limits = (folder / "limits").read_text()
        core = re.search(r"Max core file size\s+(\S+)", limits)
        assert core is not None
        assert core[1] == "0", process.command

    os.kill(workers["sampler"]["pid"], signal.SIGABRT)
    with isolated.stack.client() as client:

        def told() -> bool:
            metrics = httpx.get(f"{isolated.stack.endpoint.url}/metrics", timeout=SOON).text
            return 'tandem_gateway_worker_exits_total{kind="sampler"} 1.0' in metrics

        wait_until(told, what="the gateway knows that the sampler died")
        seen = [client.get(path).text for path in ("status", "config", "version")]
    seen.append(httpx.get(f"{isolated.stack.endpoint.url}/metrics", timeout=SOON).text)
    seen += [path.read_text(errors="replace") for path in isolated.data_dir.glob("logs/*")]
    assert any("SIGABRT" in text for text in seen), "the crash is told"
    assert any("Fatal Python error: Aborted" in text for text in seen), "and where it was"
    for text in seen:
        for secret in {*secrets, KEY, ELSEWHERE}:
            assert secret not in text
    assert not [path for path in tree(isolated.data_dir) if path.name.startswith("core")]


def drawn_secrets(stack: TestStack) -> set[str]:
    """Random secrets for the gateway's key and workers."""
    return set((stack.data_dir.parent / "drawn").read_text().split())


def test_everything_in_the_data_directory_is_for_its_owner_alone(
    isolated: TestStack, training: TrainingClient
) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(isolated.data_dir) == 0o700
    training.save_state("private").result(timeout=240)
    for path in tree(isolated.data_dir):
        if path.suffix != ".safetensors":  # its library sets the mode, in closed folders
            with suppress(FileNotFoundError):  # removed meanwhile
                assert mode(path) & 0o077 == 0, path
