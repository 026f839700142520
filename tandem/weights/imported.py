"""The result of another framework becomes a weight version and a trainer's saved state.

A result is a PEFT adapter, or a whole model in the Hugging Face layout. Its tensors must have the
names and shapes of the base model's, or of an adapter on all linear layers of a kind. Tensors are
copied as bytes, without torch. Both folders get their names by a rename at the end. A repeated
import of one result finds them and changes nothing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tandem.errors import (
    CheckpointDamaged,
    InvalidRequest,
    LoadFailed,
    describe,
    without_paths,
)
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.weights.adapter_files import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterConfig,
    key_of,
    modules_of,
    read_scale,
)
from tandem.weights.card import CARD_NAME, adapter_card
from tandem.weights.layout import BaseModelFiles, TensorWriter, copy_small_files
from tandem.weights.manifest import FileEntry, Manifest, checksum_file
from tandem.weights.model_config import INDEX_NAME, model_files, text_config
from tandem.weights.model_files import SINGLE_NAME, ties_head
from tandem.weights.model_store import read_record
from tandem.weights.state_record import RECORD_NAME, CheckpointRecord
from tandem.weights.store import (
    PartialVersion,
    check_own_file,
    fsync_path,
    give_name,
    make_folder,
    open_version,
    write_synced,
)
from tandem.weights.tensors import STORED_TYPES, StoredTensor, read_header

_DTYPES = {stored: name.removeprefix("torch.") for name, stored in STORED_TYPES.items()}
_TRAINED = ("F32", "BF16", "F16")
_STATE_FILE = "rank-0-0.safetensors"
_HEADS = ("lm_head.weight", "embed_out.weight")
_MODULES = {"embed_out.weight": "lm_head.weight"}
"""Names of parameters, by another name in files."""
_BUFFERS = (".inv_freq", ".masked_bias", ".attn.bias")
"""Endings of tensors that older files hold beside the parameters."""
_IN_BLOCK = re.compile(r"\.\d+\.(?P<inside>.+)\.weight")
_CHOOSERS = ("gate", "router")
"""Endings of modules that choose experts. They have no adapters."""

Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class ImportTargets:
    """The new version and its folder, and the folder of the saved state. `step` is the last."""

    run_id: str
    step: int
    version: str
    version_path: Path
    state_path: Path


@dataclass(frozen=True)
class Imported:
    training: TrainingSpec
    version_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class _Result:
    """The tensors of a result by their names in a version, and by parameters' names in a state.
    `write_others` writes the version's other files."""

    training: TrainingSpec
    dtype: str
    files: Mapping[str, Tensors]
    parameters: Tensors
    write_others: Callable[[Path], list[Path]]


def import_result(source: Path, base: Path, base_name: str, targets: ImportTargets) -> Imported:
    """Import the result in `source` of a training of the model `base`.

    Raises `CheckpointDamaged` for a result that does not fit the model, and `OSError`."""
    try:
        adapts = (source / CONFIG_NAME).exists()
        result = _adapter(source, base, base_name) if adapts else _whole_model(source, base)
    except (InvalidRequest, FileNotFoundError) as error:
        why = without_paths(describe(error))
        raise CheckpointDamaged(f"the result of the job is damaged: {why}") from error
    files = BaseModelFiles.of_run(base, result.training, name=base_name)
    version = _write_version(result, targets)
    state = _write_state(result, targets, files)
    return Imported(result.training, version.bytes, state.bytes)


# --- Reading --------------------------------------------------------------------------------------


def _adapter(source: Path, base: Path, base_name: str) -> _Result:
    scale = read_scale(source)
    tensors = read_header(_own(source, WEIGHTS_NAME))
    modules = modules_of(list(tensors), where="the adapter")
    layers, tied = _linear_layers(base), ties_head(base)
    ranks = {tensors[key_of(module, side="A")].shape[0] for module in modules}
    if len(ranks) != 1:
        raise InvalidRequest(f"the adapter has the ranks {sorted(ranks)}, and must have one")
    [rank] = ranks
    for module in modules:
        shape = layers.get(module, ("", ()))[1]
        pair = [tensors[key_of(module, side=side)] for side in "AB"]
        if not shape or [each.shape for each in pair] != [(rank, shape[1]), (shape[0], rank)]:
            raise InvalidRequest(f"its adapter of {module} does not fit the base model")
    kinds = {layers[module][0] for module in modules}
    if odd := sorted({each for each in layers if layers[each][0] in kinds} ^ set(modules)):
        raise InvalidRequest(
            f"its adapter is not on all linear layers of {', '.join(sorted(kinds))}: see {odd[0]}"
        )
    chosen = {kind: kind in kinds for kind in ("attention", "mlp", "unembedding")}
    lora = LoraSpec.model_validate({"rank": rank, "alpha": scale * rank, **chosen})
    record = read_record(base)
    targets = sorted({module.rpartition(".")[2] for module in modules})
    config = AdapterConfig(
        base_model=record.repository if record else base_name,
        revision=record.commit if record else None,
        rank=rank,
        alpha=lora.alpha,
        targets=targets,
    )

    def write_others(folder: Path) -> list[Path]:
        card = folder / CARD_NAME
        text = adapter_card(base=config.base_model, lora=lora, targets=targets, tied=tied)
        card.write_text(text)
        copies = copy_small_files(base, folder, adapter=True)
        return [*copies, config.write_config(folder), card]

    parameters = {
        f"{module}.lora_{side}": tensors[key_of(module, side=side)]
        for module in modules
        for side in "AB"
    }
    return _Result(
        training=TrainingSpec(lora=lora),
        dtype=_dtype_of(tensors),
        files={WEIGHTS_NAME: tensors},
        parameters=parameters,
        write_others=write_others,
    )


def _whole_model(source: Path, base: Path) -> _Result:
    names = sorted(file.name for file in source.glob("*.safetensors"))
    if SINGLE_NAME not in names and not (source / INDEX_NAME).is_file():
        raise InvalidRequest(f"there is neither {SINGLE_NAME} nor {INDEX_NAME}")
    files = {name: read_header(_own(source, name)) for name in names}
    tied = ties_head(base)
    found = {name: each for held in files.values() for name, each in held.items()}
    wanted = {name: each.shape for name, each in _tensors_in(base).items()}
    left_out = _BUFFERS + (_HEADS if tied else ())
    odd = sorted(
        name
        for name in {*found, *wanted}
        if not name.endswith(left_out)
        and (name not in found or found[name].shape != wanted.get(name))
    )
    if odd:
        raise InvalidRequest(
            f"{odd[0]} and {len(odd) - 1} other tensors have other names or shapes than those of "
            "the base model"
        )
    dtype = _dtype_of(found)

    def write_others(folder: Path) -> list[Path]:
        copies = copy_small_files(base, folder, dtype=dtype)
        if len(files) > 1:
            shutil.copyfile(_own(source, INDEX_NAME), folder / INDEX_NAME)
            copies.append(folder / INDEX_NAME)
        return copies

    return _Result(
        training=TrainingSpec(),
        dtype=dtype,
        files=files,
        parameters={
            _MODULES.get(name, name): each
            for name, each in found.items()
            if not name.endswith(left_out)
        },
        write_others=write_others,
    )


def _own(folder: Path, name: str) -> Path:
    try:
        return check_own_file(folder, name)
    except OSError as error:
        raise InvalidRequest(f"{name} is missing or no plain file") from error


def _tensors_in(model: Path) -> Tensors:
    return {name: each for file in model_files(model) for name, each in read_header(file).items()}


def _linear_layers(model: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the kind and the shape of each linear layer that can have an adapter, by its name."""
    tensors, layers = _tensors_in(model), dict[str, tuple[str, tuple[int, ...]]]()
    for name, tensor in tensors.items():
        match, module = _IN_BLOCK.search(name), name.removesuffix(".weight")
        if len(tensor.shape) != 2 or module == name:
            continue
        if name in _HEADS:
            layers[module] = ("unembedding", tensor.shape)
        elif match is not None and not _is_other(inside := match["inside"]):
            attends = "attn" in inside or "attention" in inside
            layers[module] = ("attention" if attends else "mlp", tensor.shape)
    return layers


def _is_other(inside: str) -> bool:
    return inside.endswith("norm") or any(each.endswith(_CHOOSERS) for each in inside.split("."))


def _dtype_of(tensors: Tensors) -> str:
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) != 1 or not kinds.issubset(_TRAINED):
        raise InvalidRequest(f"its tensors are of the types {', '.join(sorted(kinds))}")
    return _DTYPES[kinds.pop()]


# --- Writing --------------------------------------------------------------------------------------


def _write_version(result: _Result, targets: ImportTargets) -> Manifest:
    path = targets.version_path
    if path.exists():
        try:
            return open_version(path, name=targets.version)
        except LoadFailed as error:
            raise CheckpointDamaged(error.message) from error
    partial = PartialVersion(path)
    partial.discard()
    partial.create()
    try:
        entries = [
            _write_tensors(partial.path / name, tensors) for name, tensors in result.files.items()
        ]
        for file in result.write_others(partial.path):
            fsync_path(file)
            entries.append(checksum_file(file))
        manifest = Manifest(
            version=targets.version,
            run_id=targets.run_id,
            step=targets.step,
            adapter=result.training.lora is not None,
            dtype=result.dtype,
            tensors=sum(map(len, result.files.values())),
            created=datetime.now(UTC).isoformat(),
            files=entries,
        )
        partial.commit(manifest)
    except BaseException:
        partial.discard()
        raise
    return manifest


def _write_state(result: _Result, targets: ImportTargets, base: BaseModelFiles) -> CheckpointRecord:
    path = targets.state_path
    if path.exists():
        return CheckpointRecord.model_validate_json((path / RECORD_NAME).read_bytes())
    partial = path.parent / f".partial-{path.name}"
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    try:
        tensors = {f"model.{name}": each for name, each in result.parameters.items()}
        architectures = text_config(base.path).get("architectures")
        record = CheckpointRecord(
            run_id=targets.run_id,
            step=targets.step,
            last_seq_id=0,
            architecture=str(architectures[0]) if isinstance(architectures, list) else "",
            optimizer=False,
            training=result.training,
            base_model=base.name,
            base_fingerprint=base.fingerprint,
            parameters={name: list(each.shape) for name, each in result.parameters.items()},
            files=[_write_tensors(partial / _STATE_FILE, tensors)],
        )
        write_synced(partial / RECORD_NAME, record.model_dump_json(indent=1).encode())
        give_name(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return record


def _write_tensors(path: Path, tensors: Tensors) -> FileEntry:
    """Write a file with copies of tensors under these names, and sync it."""
    renamed = {name: replace(each, name=name) for name, each in tensors.items()}
    writer = TensorWriter(renamed)
    with path.open("xb") as file:
        file.write(writer.header)
        for name in writer.order:
            renamed[name].copy_to(file)
        file.flush()
        os.fsync(file.fileno())
    return checksum_file(path)
