"""The client of the record at the end of a program, after a fork, and with exporters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import pytest
import wandb

from tandem.errors import UserError
from tandem.tracking.exporters import (
    TensorBoardExporter,
    TrackedIdentity,
    WandbExporter,
    make_exporters,
)
from tandem.tracking.outbox import MetricRow
from tandem.tracking.run import TrackedRun

IDENTITY = TrackedIdentity("s-0123456789ab:train:0", "addition: α/β", ["a"], {"rate": 0.1})
ROWS = [
    MetricRow(step=5, at=50.0, values={"reward": 0.5}),
    MetricRow(step=9, at=51.0, values={"tandem/loss": 2.0}, source="tandem"),
    MetricRow(step=4, at=52.0, values={"reward": float("nan"), "length": 3.0}),
]


def run_program(*lines: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_tandem_loads_no_other_package():
    heavy = "{'httpx', 'numpy', 'grpc', 'pydantic', 'wandb'}"
    assert run_program(f"import sys, tandem; print({heavy} & set(sys.modules))") == "set()\n"


def test_a_program_without_an_end_sends_its_rows_when_it_exits():
    told = run_program(
        "import httpx, tandem.tracking.run as t",
        "def answer(request):",
        "    print(request.content.decode(), flush=True)",
        "    return httpx.Response(200, json={})",
        "def connect():",
        "    return httpx.Client(base_url='http://x/', transport=httpx.MockTransport(answer))",
        "t.TrackedRun('r', url='http://x', connect=connect).log(1, {'reward': 0.5})",
    )
    assert '"reward":0.5' in told


def test_after_a_fork_the_child_sends_and_warns_of_only_its_own_rows(caplog):
    dead, steps = True, []

    def answer(request: httpx.Request) -> httpx.Response:
        if dead:
            raise httpx.ConnectError("connection refused")
        steps.extend(row["step"] for row in orjson.loads(request.content)["rows"])
        return httpx.Response(200, json={})

    def connect() -> httpx.Client:
        return httpx.Client(base_url="http://x/", transport=httpx.MockTransport(answer))

    run = TrackedRun("r", url="http://x", connect=connect)
    run.log(1, {"parent": 1.0, "note": "a text"})
    reading, writing = os.pipe()
    child = os.fork()
    dead = False
    if not child:
        try:
            run.log(2, {"child": 1.0})
            before = len(caplog.records)
            run.log(2, {"note": "a text"})
            run.flush()
            os.write(writing, bytes([*steps, len(caplog.records) - before]))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert [*pipe.read()] == [2, 1]
    run.finish()
    assert steps == [1]


# --- Exporters -------------------------------------------------------------------------------


def wandb_records(path: Path) -> Iterator[object]:
    """Yield the messages of an offline run's file, which is a LevelDB log of 32 KiB blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(parts)
            parts = b""


def test_wandb_gets_all_rows_in_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"MODE": "offline", "SILENT": "true", "PROJECT": "sums"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    exporter = WandbExporter(IDENTITY)
    for row in ROWS:
        exporter.export_row(row)
    exporter.close()
    wandb.teardown()  # its service ends, and has written everything
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = [*wandb_records(file)]
    (run, *_) = (each.run for each in records if each.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name, [*run.tags]) == ("sums", IDENTITY.name, ["a"])
    assert {each.key: each.value_json for each in run.config.update}["rate"] == "0.1"
    history = []
    for each in records:
        if each.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: item for item in each.history.item}
            history.append(
                {name: item.value_json for name, item in items.items() if name[0] != "_"}
            )
    assert history == [
        {"step": "5", "reward": "0.5"},
        {"tandem/step": "9", "tandem/loss": "2"},
        {"step": "4", "reward": "NaN", "length": "3"},
    ]
    axes = {
        each.metric.name: each.metric.step_metric
        for each in records
        if each.WhichOneof("record_type") == "metric" and each.metric.step_metric
    }
    assert axes == {"reward": "step", "length": "step", "tandem/loss": "tandem/step"}


def test_tensorboard_reads_all_rows_with_their_steps_and_times(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    exporter = TensorBoardExporter(IDENTITY)
    for row in ROWS:
        exporter.export_row(row)
    exporter.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "addition- α-β"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward", "length", "tandem/loss"}
    first, second = events.Scalars("reward")
    assert (first.step, first.wall_time, first.value) == (5, 50.0, 0.5)
    assert second.step == 4 and second.value != second.value
    assert events.Scalars("tandem/loss")[0].step == 9


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for package in ("wandb", "tensorboard"):
        for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=rf"pip install tandem\[{package}\]"):
            make_exporters([package], IDENTITY)
    with pytest.raises(UserError, match="no exporter 'mlflow'; known: wandb, tensorboard"):
        make_exporters(["mlflow"], IDENTITY)
