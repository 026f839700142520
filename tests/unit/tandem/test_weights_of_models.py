from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

from tandem.errors import InvalidRequest
from tandem.weights.model_config import INDEX_NAME
from tandem.weights.model_files import check_weights
from tests.support.model_files import tensor_file

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def index(*places: object) -> bytes:
    return json.dumps({"weight_map": dict(zip("abcdef", places, strict=False))}).encode()


PARTS = {
    "model-1.safetensors": tensor_file("a", "b"),
    "model-2.safetensors": tensor_file("c"),
    INDEX_NAME: index("model-1.safetensors", "model-1.safetensors", "model-2.safetensors"),
}
WHOLE = {"model.safetensors": tensor_file("a")}
HALF = WHOLE["model.safetensors"][:128]


@pytest.mark.parametrize(
    "files",
    [
        WHOLE,
        PARTS,
        PARTS | {"consolidated.safetensors": HALF, "pytorch_model.bin": b"", "notes.txt": b""},
        WHOLE | {"tokenizer.json": b"{}"},
    ],
)
def test_a_whole_model_is_taken_whatever_else_lies_in_its_folder(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    check_weights(tmp_path)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "the folder has no weights"),
        ({"pytorch_model.bin": b"x"}, "but pytorch_model.bin: only safetensors are read"),
        ({"model.gguf": b"x"}, "but model.gguf: only safetensors are read"),
        ({"model-1.safetensors": WHOLE["model.safetensors"]}, "model-1.safetensors alone do not"),
        ({"model.safetensors": b""}, "model.safetensors is empty"),
        (
            {"model.safetensors": HALF},
            "at byte 256, and the file at byte 128. Where its download",
        ),
        (
            {"model.safetensors": WHOLE["model.safetensors"] + b"x"},
            "and the file at byte 257",
        ),
        ({"model.safetensors": WHOLE["model.safetensors"][:30]}, "is not a safetensors file"),
        ({"model.safetensors": b"\x80\x04 a pickle"}, "is not a safetensors file"),
        ({"model.safetensors": b"\2\0\0\0\0\0\0\0{}"}, "model.safetensors holds no tensor"),
        ({"model.safetensors": POINTER}, "model.safetensors is a pointer of Git LFS"),
        (WHOLE | {"tokenizer.json": POINTER}, "tokenizer.json is a pointer of Git LFS"),
        (WHOLE | {"tokenizer.model": b""}, "tokenizer.model is empty"),
        (PARTS | {"model-2.safetensors": None}, "model-2.safetensors of 2 files of model.safet"),
        (
            PARTS | {"model-2.safetensors": HALF},
            "model-2.safetensors is not a safetensors file",
        ),
        (PARTS | {"model-2.safetensors": tensor_file("d")}, "model-2.safetensors lacks c, which"),
        (WHOLE | {INDEX_NAME: b"{"}, f"{INDEX_NAME} cannot be read: {INDEX_NAME} is not JSON"),
        (WHOLE | {INDEX_NAME: b"{}"}, "names no file"),
        (WHOLE | {INDEX_NAME: b"[]"}, "names no file"),
        (WHOLE | {INDEX_NAME: index("pytorch_model.bin")}, "names 'pytorch_model.bin'"),
        (WHOLE | {INDEX_NAME: index("../model.safetensors")}, "names '../model.safetensors'"),
        (WHOLE | {INDEX_NAME: index(7)}, "names 7, which is no safetensors file"),
    ],
)
def test_what_is_missing_or_broken_is_named(tmp_path, files, sentence):
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        check_weights(tmp_path)


def test_a_link_to_a_file_that_is_gone_is_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(InvalidRequest, match=r"model.safetensors cannot be read: No such file"):
        check_weights(tmp_path)


def test_only_headers_are_read_so_that_size_costs_nothing(tmp_path):
    """A sparse file of a terabyte."""
    entry = {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}
    header = json.dumps({"a": entry}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**40)
    check_weights(tmp_path)


@pytest.mark.parametrize("fault", [errno.ESTALE, errno.ENOENT])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_a_network_volume_shows_late_is_opened_again(
    tmp_path, monkeypatch, fault, name
):
    for each, content in (WHOLE | {"tokenizer.json": b"{}"}).items():
        (tmp_path / each).write_bytes(content)
    really, left = Path.open, [OSError(fault, "not seen yet")]

    def once_unseen(path, *arguments, **named):
        if path.name == name and left:
            raise left.pop()
        return really(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", once_unseen)
    check_weights(tmp_path)
    assert not left
