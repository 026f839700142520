"""What `tandem up` says when it cannot start a gateway, or when its gateway ends."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.stack import Stack

TANDEM = str(Path(sys.executable).parent / "tandem")


def refused(data_dir: Path, *arguments: str, capsys, monkeypatch) -> str:
    """The one sentence with which `tandem up` ends; nothing else is printed."""
    line = ["tandem", "up", "--port", "0", "--data-dir", str(data_dir), *arguments]
    monkeypatch.setattr(sys, "argv", line)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stopped:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    (sentence,) = said.err.splitlines()
    assert sentence.startswith("error: ")
    assert "Traceback" not in sentence
    assert "{" not in sentence
    return sentence


def test_a_file_in_the_place_of_the_data_directory_is_a_sentence(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    for data_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        said = refused(data_dir, capsys=capsys, monkeypatch=monkeypatch)
        assert f"the data directory {data_dir} cannot be used" in said
        assert "a file in the place of a directory" in said
        assert "--data-dir" in said


def test_a_read_only_data_directory_is_a_sentence(tmp_path, capsys, monkeypatch):
    def read_only(self: Path, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)  # the tests may run as root, who may write all
    said = refused(tmp_path / "data", capsys=capsys, monkeypatch=monkeypatch)
    assert "Read-only file system" in said
    assert "--data-dir" in said


def test_what_only_the_gateway_cannot_open_is_a_sentence_too(tmp_path, capsys, monkeypatch):
    (tmp_path / "gateway.lock").mkdir()
    said = refused(tmp_path, capsys=capsys, monkeypatch=monkeypatch)
    assert "gateway.lock: Is a directory" in said
    (tmp_path / "gateway.lock").rmdir()
    (tmp_path / "tandem.db").mkdir()
    said = refused(tmp_path, capsys=capsys, monkeypatch=monkeypatch)
    assert "unable to open database file" in said


def test_a_port_that_another_program_uses_is_a_sentence(tmp_path, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        said = refused(tmp_path, "--port", port, capsys=capsys, monkeypatch=monkeypatch)
    assert f"cannot listen on 127.0.0.1:{port}: another program listens there" in said
    assert "--port" in said


def test_a_setting_that_is_wrong_is_a_sentence_that_names_its_variable(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("TANDEM_TRAINER_RANKS", "0")
    said = refused(tmp_path, capsys=capsys, monkeypatch=monkeypatch)
    assert "TANDEM_TRAINER_RANKS is '0': Input should be greater than or equal to 1" in said
    monkeypatch.setattr(sys, "argv", ["tandem", "config"])
    with pytest.raises(SystemExit):
        main()
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: TANDEM_TRAINER_RANKS is '0'")


def test_up_says_how_its_gateway_ended(tmp_path):
    arguments = ("up", "--json", "--port", "0", "--data-dir", str(tmp_path))
    with subprocess.Popen(
        [TANDEM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as up:
        assert up.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            text += up.stdout.readline()
        os.kill(json.loads(text)["pid"], signal.SIGKILL)
        _, said = up.communicate(timeout=60)
    assert up.returncode == 1
    assert "the gateway ended by itself: it was killed by SIGKILL" in said
    assert str(tmp_path / "logs" / "gateway.log") in said


def test_up_warns_of_a_database_that_was_lost(tmp_path):
    (tmp_path / "weights" / "s-1_train_0" / "v000001-11111111").mkdir(parents=True)
    (tmp_path / "data_id").write_text("of the database that was lost")
    arguments = ("up", "--port", "0", "--data-dir", str(tmp_path))
    with subprocess.Popen([TANDEM, *arguments], stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None
        said = up.stderr.readline()
        up.terminate()
        up.communicate(timeout=60)
    assert said.startswith("warning: the database does not belong to this data directory")
    assert "`tandem checkpoints adopt`" in said


def test_a_sentence_of_an_earlier_gateway_is_not_taken_for_this_ones(tmp_path):
    log = tmp_path / "logs" / "gateway.log"
    log.parent.mkdir()
    log.write_text("tandem gateway: an old story\n")
    with Stack(data_dir=tmp_path, settings={"port": "0"}) as stack:
        stack.process.kill()
        assert "an old story" not in stack.why_ended()
        assert "SIGKILL" in stack.why_ended()
