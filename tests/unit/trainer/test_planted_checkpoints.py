"""Planted files are refused with a reason, before memory is taken for them."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.errors import CheckpointDamaged
from tandem.weights import checksum_file
from tests.support.local_trainer import load, make_rank, save, train
from trainer_service.checkpoints import shards
from trainer_service.checkpoints.shards import read_layout
from trainer_service.service.operations import Operations

Json = dict[str, object]
FILE = "rank-0-0.safetensors"
NORM = "model.model.norm.weight"
REFUSED = ("checkpoint_damaged", "checkpoint_mismatch")


@pytest.fixture(scope="module")
def operations(model) -> Operations:
    made = Operations(make_rank(model))
    train(made, 1)
    return made


@pytest.fixture(scope="module")
def original(operations, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("original") / "saved"
    save(operations, path)
    return path


@pytest.fixture
def saved(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


def split(file: Path) -> tuple[Json, bytes]:
    """Return a file's header and the rest."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(file: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def recorded(path: Path) -> None:
    """Write the files' checksums into the record, as a careful attacker would."""
    record = json.loads((path / "checkpoint.json").read_text())
    record["files"] = [checksum_file(path / e["name"]).model_dump() for e in record["files"]]
    (path / "checkpoint.json").write_text(json.dumps(record))


def refused(operations: Operations, path: Path) -> str:
    failure = load(operations, path).failure
    assert failure.type == CheckpointDamaged.type, failure
    return failure.message


def test_a_checkpoint_consists_of_safetensors_and_json(operations, saved):
    assert {file.name for file in saved.iterdir()} == {FILE, "checkpoint.json"}
    tensors = load_file(saved / FILE)
    parameters = operations.trainer.backend.parameters()
    assert all(torch.equal(tensors[f"model.{name}"], each) for name, each in parameters.items())
    layout = read_layout(saved, files=[FILE])
    assert layout.keys() == tensors.keys()
    assert any(name.startswith("optimizer.") for name in layout)
    assert not load(operations, saved).HasField("failure")


def test_a_layout_of_torchs_own_is_not_even_opened(operations, saved):
    """It is a pickle, which may call any function. A FIFO would never end."""
    os.mkfifo(saved / ".metadata")
    assert not load(operations, saved).HasField("failure")


HUGE = 2**60


def edit(name: str, **fields: object) -> Callable[[Json], object]:
    def change(header: Json) -> Json:
        header[name] = {**header[name], **fields}  # type: ignore[dict-item]
        return header

    return change


def without(name: str) -> Callable[[Json], object]:
    return lambda header: {key: entry for key, entry in header.items() if key != name}


def renamed(new: str) -> Callable[[Json], object]:
    return lambda header: {new if key == NORM else key: entry for key, entry in header.items()}


@pytest.mark.parametrize(
    "change",
    [
        edit(NORM, shape=[HUGE]),
        edit(NORM, shape=[HUGE, 0]),
        edit(NORM, shape=[-64]),
        edit(NORM, shape=[-8, -8]),
        edit(NORM, shape=[float("nan")]),
        edit(NORM, shape=[64.0]),
        edit(NORM, shape=["64"]),
        edit(NORM, shape=[True] * 64),
        edit(NORM, shape=[1] * 100_000),
        edit(NORM, shape=None),
        edit(NORM, dtype="F8_E4M3"),
        edit(NORM, dtype="O"),
        edit(NORM, dtype=["F32"]),
        edit(NORM, data_offsets=[0, HUGE]),
        edit(NORM, data_offsets=[-256, 0]),
        edit(NORM, data_offsets=[0, 256]),
        edit(NORM, data_offsets=[0]),
        edit(NORM, data_offsets=[0, float("inf")]),
        edit(NORM, data_offsets=[10**30, 10**30 + 256]),
        without(NORM),
        renamed("model.other"),
        renamed("other"),
        renamed(""),
        renamed("@0"),
        renamed(f"{NORM}@64"),
        renamed(f"{NORM}@-1"),
        renamed(f"{NORM}@0,0"),
        renamed(f"{NORM}@{10**30}"),
        lambda header: [],
        lambda header: None,
        lambda header: b"{",
        lambda header: b"",
        lambda header: b"\xff" * 64,
        lambda header: b"[" * 100_000,
        lambda header: b"9" * 10_000,
        lambda header: b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        lambda header: json.dumps(header).encode()[:-1] + b', "a": {}, "a": {}}',
    ],
)
def test_a_header_that_cannot_be_is_refused(operations, saved, change):
    header, data = split(saved / FILE)
    join(saved / FILE, change(header), data)
    assert "is damaged" in refused(operations, saved), "by its checksum"
    recorded(saved)
    refused(operations, saved)


@pytest.mark.parametrize("length", [0, 7, 2**31, 2**63, 2**64 - 1])
def test_the_length_of_a_header_is_no_promise(operations, saved, length):
    content = (saved / FILE).read_bytes()
    (saved / FILE).write_bytes(struct.pack("<Q", length) + content[8:])
    recorded(saved)
    assert "is not a safetensors file" in refused(operations, saved)


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 4096])
def test_bytes_that_belong_to_no_tensor_are_refused(operations, saved, extra):
    with (saved / FILE).open("ab") as file:
        file.write(extra)
    recorded(saved)
    assert "end at byte" in refused(operations, saved)


def test_a_file_with_more_state_than_a_run_has_is_refused_unread(operations, saved):
    """A sparse file takes no space, and hours to read."""
    header, data = split(saved / FILE)
    end, large = len(data), 2**40
    for number in range(4):
        where = [end + number * large, end + (number + 1) * large]
        entry = {"dtype": "F32", "shape": [large // 4], "data_offsets": where}
        header[f"optimizer.model.norm.weight.more{number}"] = entry
    join(saved / FILE, header, data)
    with (saved / FILE).open("r+b") as file:
        file.truncate(file.seek(0, 2) + 4 * large)
    assert "is no part of its state" in refused(operations, saved)


def test_an_optimizer_of_which_a_part_is_missing_is_refused_and_changes_nothing(operations, saved):
    header, data = split(saved / FILE)
    name = "optimizer.model.norm.weight.exp_avg"
    assert name in header
    header["optimizer.model.norm.weight.exp_other"] = header.pop(name)
    join(saved / FILE, header, data)
    recorded(saved)
    before = {n: t.clone() for n, t in operations.trainer.backend.parameters().items()}
    assert f"{name} must have the shape" in refused(operations, saved)
    now = operations.trainer.backend.parameters()
    assert all(torch.equal(tensor, before[n]) for n, tensor in now.items())


# --- Parts ---------------------------------------------------------------------------------------


def cut(saved: Path, boxes: list[tuple[slice, slice]]) -> None:
    """Replace the checkpoint's matrix of 4 rows and 6 columns by these parts."""
    whole = torch.arange(24.0).reshape(4, 6)
    header: Json = {}
    data = b""
    for rows, columns in boxes:
        piece = whole[rows, columns].contiguous()
        content = piece.numpy().tobytes()
        header[f"a@{rows.start},{columns.start}"] = {
            "dtype": "F32",
            "shape": list(piece.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    join(saved / FILE, header, data)


def test_parts_in_a_grid_are_a_tensor(saved):
    cut(saved, [(slice(r, r + 2), slice(c, c + 3)) for r in (0, 2) for c in (0, 3)])
    (tensor,) = read_layout(saved, files=[FILE]).values()
    assert tensor.shape == (4, 6) and len(tensor.shards) == 4


@pytest.mark.parametrize(
    "boxes",
    [
        [(slice(2, 4), slice(0, 6))],
        [(slice(0, 2), slice(0, 6)), (slice(3, 4), slice(0, 6))],
        [(slice(0, 3), slice(0, 6)), (slice(2, 4), slice(0, 6))],
        [(slice(0, 2), slice(0, 3)), (slice(2, 4), slice(3, 6))],
        [(slice(0, 2), slice(0, 3)), (slice(0, 2), slice(3, 6)), (slice(2, 4), slice(0, 3))],
    ],
)
def test_parts_with_a_gap_or_an_overlap_are_refused(saved, boxes):
    cut(saved, boxes)
    with pytest.raises(CheckpointDamaged):
        read_layout(saved, files=[FILE])


def test_a_part_that_is_in_two_files_is_refused(saved):
    shutil.copy(saved / FILE, saved / "rank-1-0.safetensors")
    with pytest.raises(CheckpointDamaged):
        read_layout(saved, files=[FILE, "rank-1-0.safetensors"])


# --- The record ----------------------------------------------------------------------------------


def test_a_record_that_lists_a_file_elsewhere_or_a_link_is_refused(operations, saved, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    good = (saved / "checkpoint.json").read_text()
    for name in ("../outside", str(outside), "..", ""):
        record = json.loads(good)
        record["files"].append({"name": name, "bytes": 6, "checksum": "0" * 32})
        (saved / "checkpoint.json").write_text(json.dumps(record))
        assert "is not the name of a file" in refused(operations, saved)
    (saved / "checkpoint.json").write_text(good)
    (saved / FILE).rename(tmp_path / "moved")
    (saved / FILE).symlink_to(tmp_path / "moved")
    assert "not a plain file" in refused(operations, saved), "the same bytes, through a link"


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 2**63},
        {"step": -1},
        {"last_seq_id": 10**30},
        {"micro_batch_tokens": -1},
        {"files": None},
        {"parameters": [1]},
    ],
)
def test_a_record_with_impossible_numbers_is_refused(operations, saved, fields):
    record = json.loads((saved / "checkpoint.json").read_text()) | fields
    (saved / "checkpoint.json").write_text(json.dumps(record))
    assert "the record of checkpoint saved is damaged" in refused(operations, saved)


def test_a_record_that_names_a_file_twice_is_refused(operations, saved):
    record = json.loads((saved / "checkpoint.json").read_text())
    record["files"] *= 2
    (saved / "checkpoint.json").write_text(json.dumps(record))
    refused(operations, saved)


@pytest.mark.parametrize("kind", ["link", "fifo", "large"])
def test_a_record_that_is_no_record_is_refused(operations, saved, tmp_path, kind):
    file = saved / "checkpoint.json"
    file.rename(tmp_path / "moved.json")
    if kind == "link":
        file.symlink_to(tmp_path / "moved.json")
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        with file.open("wb") as stream:
            stream.truncate(2**40)
    refused(operations, saved)


# --- Anything ------------------------------------------------------------------------------------

INTERESTING = (0, 1, -1, 64, 2**31, 2**40, 2**63, 2**64, 10**30, 1e308, float("nan"), None, True)


def mutated(value: object, draw: random.Random) -> object:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        rest = {name: entry for name, entry in value.items() if name != key}
        kind = draw.random()
        if kind < 0.1:
            return rest
        if kind < 0.2:
            return {**rest, key + draw.choice(("@1", "@0", "x", "\0")): value[key]}
        return {**value, key: mutated(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        return [*value[:place], mutated(value[place], draw), *value[place + draw.randrange(2) :]]
    if type(value) is int and draw.random() < 0.5:
        return value + draw.choice((-1, 1, 4, -256, 2**20))
    return draw.choice((*INTERESTING, "", "F64", "I8", [], {}, [[]], value))


@pytest.fixture
def little_memory():
    """An allocation of half a gigabyte fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**29, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_changed_in_a_header_or_a_record_is_refused_or_makes_no_difference(
    operations, saved, little_memory, seed
):
    draw = random.Random(seed)
    header, data = split(saved / FILE)
    record = json.loads((saved / "checkpoint.json").read_text())
    for _ in range(40):
        if draw.random() < 0.7:
            join(saved / FILE, mutated(header, draw), data)
            recorded_as = {**record, "files": [checksum_file(saved / FILE).model_dump()]}
        else:
            join(saved / FILE, header, data)
            recorded_as = mutated(record, draw)  # type: ignore[assignment]
        (saved / "checkpoint.json").write_text(json.dumps(recorded_as))
        reply = load(operations, saved)
        assert not reply.HasField("failure") or reply.failure.type in REFUSED, reply.failure


@pytest.mark.parametrize("seed", range(4))
def test_whatever_bytes_are_changed_is_refused_or_makes_no_difference(
    operations, saved, little_memory, seed
):
    draw = random.Random(seed)
    good = (saved / FILE).read_bytes()
    for _ in range(40):
        content = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            content[draw.choice((draw.randrange(8), draw.randrange(4096)))] = draw.randrange(256)
        (saved / FILE).write_bytes(content[: draw.choice((len(content), draw.randrange(9000)))])
        recorded(saved)
        reply = load(operations, saved)
        assert not reply.HasField("failure") or reply.failure.type in REFUSED, reply.failure


def test_files_have_a_bounded_number_of_tensors(operations, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_FILE_TENSORS", 7)
    save(operations, tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert not load(operations, tmp_path / "many").HasField("failure")
