from __future__ import annotations

import errno
import json
import logging
import os
from io import StringIO

import pytest

from tandem import __version__
from tandem.protocol.worker import own_version
from tandem.telemetry import append_line, configure_logging, get_log, log_context
from tests.support.telemetry import logging_restored


@pytest.fixture(autouse=True)
def restored():
    with logging_restored():
        yield


def write_some_lines() -> None:
    with log_context(run_id="s-1:train:0"):
        get_log().info("published", step=3)
        try:
            raise OSError("no such thing")
        except OSError:
            get_log().exception("failed")
    get_log().debug("unseen")
    logging.getLogger("library").warning("old %s", "call")
    logging.getLogger("library").info("unseen")


def test_every_log_line_is_one_object_with_its_ids():
    stream = StringIO()
    configure_logging(service="trainer", stream=stream)
    write_some_lines()
    published, failed, library = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert published["event"] == "published"
    assert published["service"] == "trainer"
    assert published["run_id"] == "s-1:train:0"
    assert published["step"] == 3
    assert "OSError: no such thing" in failed["exception"]
    assert (library["event"], library["level"]) == ("old call", "warning")
    assert "run_id" not in library


def test_a_log_line_of_a_container_says_of_which_image_it_is(monkeypatch):
    monkeypatch.setenv("TANDEM_IMAGE_VERSION", "0.1.0")
    stream = StringIO()
    configure_logging(service="trainer", stream=stream)
    write_some_lines()
    assert {json.loads(line)["image"] for line in stream.getvalue().splitlines()} == {"0.1.0"}


class FullDisk(StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_log_lines_and_nothing_else(capsys):
    configure_logging(service="trainer", stream=FullDisk())
    write_some_lines()
    assert "Logging error" not in capsys.readouterr().err


def test_a_line_begins_a_new_one_after_what_another_process_has_left(tmp_path):
    path = tmp_path / "worker.log"
    path.write_bytes(b"whole\nkilled in the mid")
    with path.open("ab") as log:
        append_line(log.fileno(), b"next\n")
        append_line(log.fileno(), b"last\n")
        path.unlink()
        path.write_bytes(b"another file")
        append_line(log.fileno(), b"of a removed log\n")
        assert os.fstat(log.fileno()).st_size == len(
            b"whole\nkilled in the mid\nnext\nlast\nof a removed log\n"
        )


def test_the_end_of_an_own_line_counts_until_another_process_writes(tmp_path):
    with (tmp_path / "worker.log").open("ab") as log:
        end = append_line(log.fileno(), b"mine\n")
        end = append_line(log.fileno(), b"mine, too\n", known_end=end)
        log.write(b"cut")
        log.flush()
        append_line(log.fileno(), b"mine again\n", known_end=end)
    lines = (tmp_path / "worker.log").read_bytes()
    assert lines == b"mine\nmine, too\ncut\nmine again\n"


def test_a_line_for_a_pipe_is_written_as_it_is():
    reader, writer = os.pipe()
    append_line(writer, b"line\n")
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"line\n"


def test_the_tag_of_an_image_is_said_where_it_is_not_its_version(monkeypatch):
    monkeypatch.delenv("TANDEM_IMAGE_VERSION", raising=False)
    assert own_version() == __version__
    monkeypatch.setenv("TANDEM_IMAGE_VERSION", __version__)
    assert own_version() == __version__
    monkeypatch.setenv("TANDEM_IMAGE_VERSION", "nightly")
    assert own_version() == f"{__version__} (image nightly)"
