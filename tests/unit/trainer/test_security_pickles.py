"""No pickle is loaded, no code is evaluated, no archive is unpacked."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import pickle
import sys
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from tandem.errors import CheckpointDamaged, LoadFailed
from tandem.weights import Manifest, PartialVersion, checksum_file, open_version
from tests.support.local_trainer import load, make_rank, save, train
from trainer_service.checkpoints.restricted_reader import CheckpointReader, read_layout
from trainer_service.models.huggingface import load_model
from trainer_service.service.operations import Operations

ROOT = Path(__file__).parents[3]
PRODUCT = ("gateway", "tandem", "trainer_service", "sampler_service")
LOADERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNPACKERS = {"zipfile", "tarfile"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("np", "load"),
    ("numpy", "load"),
    ("pd", "read_pickle"),
    ("shutil", "unpack_archive"),
    ("dist", "broadcast_object_list"),
    ("dist", "gather_object"),
}
THE_ONE_PLACE = "trainer_service/checkpoints/restricted_reader.py"
"""Which has the restricted unpickler that is tested below."""


class Evil:
    """What an attacker writes: unpickling it calls a function of their choice."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def offences(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] in LOADERS | UNPACKERS}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in LOADERS | UNPACKERS:
                found.add(node.module)
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in CALLS:
                found.add(called.id)
            elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                found |= {f"{a}.{b}" for a, b in METHODS & {(called.value.id, called.attr)}}
            for argument in node.keywords:
                trusted = isinstance(argument.value, ast.Constant) and argument.value.value is False
                if argument.arg == "trust_remote_code" and not trusted:
                    found.add("trust_remote_code")
                if argument.arg in ("weights_only", "use_safetensors") and trusted:
                    found.add(f"{argument.arg}=False")
                if argument.arg == "shell" and not trusted:
                    found.add("shell")
    return found


def test_the_product_names_no_loader_of_pickles_no_evaluator_and_no_unpacker():
    files = [file for part in PRODUCT for file in (ROOT / part).rglob("*.py")]
    assert len(files) > 100
    found = {
        str(file.relative_to(ROOT)): names
        for file in files
        if (names := offences(ast.parse(file.read_text(encoding="utf-8"))))
    }
    assert found == {THE_ONE_PLACE: {"pickle"}}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "torch.load(x)",
        "yaml.load(x)",
        "eval(x)",
        "import zipfile",
        "shutil.unpack_archive(x)",
        "f(trust_remote_code=True)",
        "f(use_safetensors=False)",
        "run(x, shell=True)",
    ],
)
def test_the_walk_sees_what_it_is_for(code):
    assert offences(ast.parse(code))


# --- A trainer's state ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def operations(model) -> Operations:
    made = Operations(make_rank(model))
    train(made, 1)
    return made


@pytest.fixture
def saved(operations, tmp_path) -> Path:
    path = tmp_path / "saved"
    save(operations, path)
    return path


def recorded(path: Path) -> None:
    """Makes the record's checksums those of the files, as a careful attacker would."""
    record = json.loads((path / "checkpoint.json").read_text())
    record["files"] = [checksum_file(path / e["name"]).model_dump() for e in record["files"]]
    (path / "checkpoint.json").write_text(json.dumps(record))


def refused(operations: Operations, path: Path) -> str:
    failure = load(operations, path).failure
    assert failure.type == CheckpointDamaged.type, failure
    return failure.message


def test_a_checkpoint_of_ours_is_read_by_the_careful_reader(operations, saved):
    names = {file.name for file in saved.iterdir()} - {"checkpoint.json"}
    layout = read_layout(saved, files=names)
    assert any(name.startswith("optimizer.") for name in layout.state_dict_metadata)
    assert not load(operations, saved).HasField("failure")


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_checkpoint_is_read_whichever_python_wrote_it(operations, saved, monkeypatch, module):
    layout = read_layout(saved, files={file.name for file in saved.iterdir()})
    with monkeypatch.context() as python:
        python.setitem(sys.modules, module, pathlib)
        for kind in (pathlib.Path, pathlib.PosixPath):
            python.setattr(kind, "__module__", module)
        written = pickle.dumps(layout)
    assert module.encode() in written
    (saved / ".metadata").write_bytes(written)
    recorded(saved)
    assert not load(operations, saved).HasField("failure")


def test_a_checkpoint_of_an_early_python_3_11_is_read_which_names_members_of_enumerations(
    operations, saved, monkeypatch
):
    layout = read_layout(saved, files={file.name for file in saved.iterdir()})

    def as_written_by_3_11_2(member: Enum, _protocol: int) -> tuple[object, ...]:
        return getattr, (type(member), member.name)

    with monkeypatch.context() as python:
        python.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", as_written_by_3_11_2)
        written = pickle.dumps(layout)
    assert b"getattr" in written
    (saved / ".metadata").write_bytes(written)
    recorded(saved)
    assert not load(operations, saved).HasField("failure")


def test_a_layout_that_calls_a_function_is_refused_and_the_function_not_called(
    operations, saved, tmp_path
):
    mark = tmp_path / "called"
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    assert "damaged" in refused(operations, saved), "by its checksum"
    recorded(saved)
    assert "is not allowed in a checkpoint's layout" in refused(operations, saved)
    assert not mark.exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cbuiltins\ngetattr\n(S'1'\nS'a'\ntR.",
        b"cbuiltins\ngetattr\n(cpathlib\nPath\nS'home'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.serialization\nload\n(S'x'\ntR.",
        b"\x80\x04\x8c\x05torch\x94\x8c\x0chub.load_state\x94\x93.",
        b"\x80\x04\x8c\x05torch\x94\x8c\x0eSize.__class__\x94\x93.",
        b"N.",
        b"",
        b"\xff" * 64,
    ],
)
def test_every_other_global_and_every_other_pickle_is_refused(saved, payload):
    (saved / ".metadata").write_bytes(payload)
    with pytest.raises(CheckpointDamaged):
        read_layout(saved, files={"__0_0.distcp"})
    with pytest.raises(CheckpointDamaged):
        CheckpointReader(saved, files={"__0_0.distcp"}).read_metadata()


def test_a_pickle_in_place_of_the_tensors_is_refused_and_not_called(tmp_path):
    """What torch itself reads with `weights_only`; a checkpoint's checksums come before."""
    folder, mark = tmp_path / "state", tmp_path / "called"
    state = {"model.a": torch.arange(4.0)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    evil = pickle.dumps(Evil(mark))
    whole = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(evil + bytes(len(whole) - len(evil)))
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        dcp.load(
            state, storage_reader=CheckpointReader(folder, files={"__0_0.distcp"}), no_dist=True
        )
    assert not mark.exists()


@pytest.mark.parametrize("place", ["../outside.distcp", "/etc/hostname", "__9_9.distcp"])
def test_a_layout_that_points_at_another_file_is_refused(operations, saved, place):
    names = {file.name for file in saved.iterdir()} - {"checkpoint.json"}
    layout = read_layout(saved, files=names)
    for entry in layout.storage_data.values():
        entry.relative_path = place
    (saved / ".metadata").write_bytes(pickle.dumps(layout))
    recorded(saved)
    assert "points at" in refused(operations, saved)


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
    file = next(saved.glob("*.distcp"))
    file.rename(tmp_path / "moved.distcp")
    file.symlink_to(tmp_path / "moved.distcp")
    assert "not a plain file" in refused(operations, saved), "the same bytes, through a link"


# --- Weights -------------------------------------------------------------------------------------


def version(folder: Path, name: str) -> Path:
    partial = PartialVersion(folder / "v1")
    partial.create()
    (partial.path / "model.safetensors").write_bytes(b"0" * 8)
    entry = checksum_file(partial.path / "model.safetensors")
    manifest = Manifest(
        version="r/v1",
        run_id="r",
        step=0,
        dtype="float32",
        tensors=1,
        created="",
        files=[entry.model_copy(update={"name": name})],
    )
    partial.commit(manifest)
    return partial.final


def test_a_version_that_lists_a_file_elsewhere_or_a_link_is_not_opened(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"0" * 8)
    for number, name in enumerate(("../../outside", str(outside), "..", "a\0b", "link")):
        path = version(tmp_path / str(number), name)
        if name == "link":
            (path / "link").symlink_to(outside)
        with pytest.raises(LoadFailed):
            open_version(path)
    linked = tmp_path / "linked"
    linked.symlink_to(version(tmp_path / "good", "model.safetensors"))
    open_version(tmp_path / "good" / "v1")
    with pytest.raises(LoadFailed):
        open_version(linked)


def test_a_base_model_with_pickled_weights_alone_is_refused(model, tmp_path):
    folder, mark = tmp_path / "pickled", tmp_path / "called"
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(OSError, match="safetensors"):
        load_model(folder)
    assert not mark.exists()


def test_the_evil_object_would_have_done_harm(tmp_path):
    """Else the tests above prove nothing."""
    mark = tmp_path / "called"
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists()
