"""`tandem up` cannot start a gateway, or its gateway ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.stack import Stack
from tests.support.processes import marked
from tests.support.waiting import wait_until

TANDEM = str(Path(sys.executable).parent / "tandem")

READ_ONLY = """
import errno, os
from pathlib import Path
from tandem.cli.main import main

def read_only(self, **_):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

Path.mkdir = read_only
main()
"""
"""The command on a read-only file system, because root can write everywhere."""

HEEDING_SIGNALS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Becomes a command that heeds signals which background jobs and nohup ignore."""


def refused(*command: str, **variables: str) -> str:
    """The one sentence with which a command ends.

    It runs in its own process, because other tests' threads write to this one's output."""
    kept = {
        key: text
        for key, text in os.environ.items()
        if not key.startswith("TANDEM_") or key.startswith("TANDEM_POOL_")  # starts no worker ahead
    }
    done = subprocess.run(
        command, env=kept | variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("error: ")
    assert "Traceback" not in sentence
    assert "{" not in sentence
    return sentence


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A command that ends with the block."""

    with subprocess.Popen(
        [sys.executable, "-c", HEEDING_SIGNALS, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def up(data_dir: Path, *, port: int = 0) -> tuple[str, ...]:
    return ("up", "--port", str(port), "--data-dir", str(data_dir))


def test_a_file_in_the_place_of_the_data_directory_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for data_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        said = refused(TANDEM, *up(data_dir))
        assert f"the data directory {data_dir} cannot be used" in said
        assert "a file in the place of a directory" in said
        assert "--data-dir" in said


def test_a_read_only_data_directory_is_a_sentence(tmp_path):
    said = refused(sys.executable, "-c", READ_ONLY, *up(tmp_path / "data"))
    assert "Read-only file system" in said
    assert "--data-dir" in said


def test_what_only_the_gateway_cannot_open_is_a_sentence_too(tmp_path):
    (tmp_path / "gateway.lock").mkdir()
    assert "gateway.lock: Is a directory" in refused(TANDEM, *up(tmp_path))
    (tmp_path / "gateway.lock").rmdir()
    (tmp_path / "tandem.db").mkdir()
    assert "unable to open database file" in refused(TANDEM, *up(tmp_path))


def test_a_port_that_another_program_uses_is_a_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused(TANDEM, *up(tmp_path, port=port))
    assert f"cannot listen on 127.0.0.1:{port}: another program listens there" in said
    assert "--port" in said


def test_the_environment_says_where_up_listens(tmp_path):
    command = [TANDEM, "up", "--data-dir", str(tmp_path)]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused(*command, TANDEM_PORT=str(port))
    assert f"cannot listen on 127.0.0.1:{port}: another program listens there" in said
    assert "TANDEM_PORT is 'web'" in refused(*command, TANDEM_PORT="web")
    said = refused(*command, "--port", "0", TANDEM_HOST="192.0.2.1")
    assert "the gateway would listen on 192.0.2.1, where others reach it" in said


def test_a_setting_that_is_wrong_is_a_sentence_that_names_its_variable(tmp_path):
    wrong = "TANDEM_TRAINER_RANKS is '0': Input should be greater than or equal to 1"
    assert wrong in refused(TANDEM, *up(tmp_path), TANDEM_TRAINER_RANKS="0")
    assert refused(TANDEM, "config", TANDEM_TRAINER_RANKS="0").startswith(f"error: {wrong}")
    for name in ("TANDEM_STOP_TIMEOUT", "TANDEM_WORKER_UNRESPONSIVE_TIMEOUT"):
        assert f"{name} is 'soon'" in refused(TANDEM, *up(tmp_path), **{name: "soon"})


def test_up_says_that_a_gateway_that_was_killed_is_started_again(tmp_path):
    with started(TANDEM, *up(tmp_path), "--json") as command:
        assert command.stderr is not None
        os.kill(printed(command)["pid"], signal.SIGKILL)
        said = command.stderr.readline()
        command.terminate()
        command.communicate(timeout=240)
    assert command.returncode == 0
    assert said.startswith("warning: the gateway ended by itself and is started again: ")
    assert "it was killed by SIGKILL" in said
    assert str(tmp_path / "logs" / "gateway.log") in said


def printed(command: subprocess.Popen[str]) -> dict:
    """The output of `tandem up --json` once it is up."""
    assert command.stdout is not None
    text = ""
    while not text.rstrip().endswith("}"):
        line = command.stdout.readline()
        assert line, f"it ended after {text!r}"
        text += line
    return json.loads(text)


def test_a_second_one_says_where_the_first_is_up_whatever_port_it_asks_for(tmp_path):
    with started(TANDEM, *up(tmp_path), "--json") as command:
        first = printed(command)
        own = int(first["url"].rpartition(":")[2])
        for port in (0, own, own + 1):
            said = refused(TANDEM, *up(tmp_path, port=port))
            assert f"Tandem is up at {first['url']} already" in said
            assert f"(process {first['pid']})" in said and "--data-dir" in said
        demo = ("demo", "--data-dir", str(tmp_path), "--out", str(tmp_path / "run"))
        with subprocess.Popen([TANDEM, *demo], stderr=subprocess.PIPE, text=True) as other:
            assert f"is up at {first['url']} already" in other.communicate(timeout=120)[1]
            assert other.returncode == 1
        command.terminate()
        command.communicate(timeout=240)


def test_leftovers_of_one_that_was_killed_are_in_nobodys_way(tmp_path):
    with started(TANDEM, *up(tmp_path), "--json") as command:
        first = printed(command)
        command.kill()
        command.communicate(timeout=240)
    left = json.loads((tmp_path / "gateway.json").read_text())
    assert left["url"] == first["url"]
    wait_until(lambda: not Path(f"/proc/{first['pid']}/exe").exists(), what="it has ended")
    with started(TANDEM, *up(tmp_path), "--json") as command:
        assert printed(command)["api_key"] == first["api_key"]
        command.terminate()
        command.communicate(timeout=240)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_gateway_and_agent_however_up_ends(tmp_path, monkeypatch, number):
    mark = f"test-{uuid.uuid4().hex}"
    monkeypatch.setenv("TANDEM_TEST_MARK", mark)
    with started(TANDEM, *up(tmp_path), "--json") as command:
        printed(command)
        commands = [process.command for process in marked(mark)]
        for part in ("-m gateway", "-m tandem.agent"):
            assert any(part in each for each in commands), commands
        command.send_signal(number)
        command.communicate(timeout=240)
        wait_until(lambda: not marked(mark), what="every process of it has ended")


def test_up_warns_of_folders_that_the_database_does_not_know(tmp_path):
    folder = tmp_path / "weights" / "s-1_train_0" / "v000001-11111111"
    folder.mkdir(parents=True)
    with started(TANDEM, *up(tmp_path)) as command:
        assert command.stderr is not None
        said = command.stderr.readline()
        command.terminate()
        command.communicate(timeout=240)
    assert said.startswith("warning: weights/s-1_train_0: the database does not know these folders")
    assert folder.is_dir()


def test_a_sentence_of_an_earlier_gateway_is_not_taken_for_this_ones(tmp_path):
    log = tmp_path / "logs" / "gateway.log"
    log.parent.mkdir()
    log.write_text("tandem gateway: an old story\n")
    said: list[str] = []
    with Stack(data_dir=tmp_path, settings={"port": "0"}, tell=said.append) as stack:
        stack.process.kill()
        wait_until(lambda: said, what="the stack has said that the gateway ended")
    assert "an old story" not in said[0]
    assert "SIGKILL" in said[0]
