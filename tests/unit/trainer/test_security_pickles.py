"""No pickle is loaded, no code is evaluated, no archive is unpacked."""

from __future__ import annotations

import ast
import os
import pickle
from pathlib import Path

import pytest

from tandem.errors import LoadFailed
from tandem.weights import Manifest, PartialVersion, checksum_file, open_version
from trainer_service.models.huggingface import load_model

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


class Evil:
    """Unpickling it calls a function of the attacker's choice."""

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
    # A loop hands its user's own reward to its own processes.
    assert found == {"tandem/rl/rewards.py": {"pickle"}}


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
