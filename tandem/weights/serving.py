"""Commands and a manifest that serve a checkpoint without Tandem: `vllm serve`, or KServe.

KServe's runtime for Hugging Face models takes the options of `vllm serve` as arguments. An adapter
beside a base model needs KServe 0.16."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from tandem.errors import InvalidField
from tandem.settings.chosen_names import is_name
from tandem.weights.model_store import ModelRecord

Manifest = dict[str, Any]
Precision = Literal["auto", "bfloat16", "float16", "float32"]

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's values of `--max-lora-rank`."""
_HUB = "hf://"
_CLAIM = "pvc://"
_URI = re.compile(r"(gs|hf|https|oci|pvc|s3)://[A-Za-z0-9][A-Za-z0-9._~/:@%+=-]*")
"""Without braces and dollar signs: KServe and Kubernetes would expand them in arguments."""
_MOUNT = "/mnt/models"
_RESOURCES = {"cpu": "4", "memory": "32Gi"}
_LONGEST_SERVICE = 32


@dataclass(frozen=True)
class ServedCheckpoint:
    """A checkpoint for sampling, with the facts that another server needs.

    `path` is the checkpoint's, `tinker://RUN/KIND/NAME`. `rank` is the adapter's, None for a whole
    model. `base` is an adapter's base model: `hf://ORG/NAME:REVISION`, another address of files
    (KServe only), or a folder (vLLM only). `merged`: the download merges the adapter. `name` is the
    clients' name for the model, by default the checkpoint's.

    Raises `InvalidField`."""

    path: str
    rank: int | None = None
    base: str = ""
    merged: bool = False
    name: str = ""
    dtype: Precision = "bfloat16"

    def __post_init__(self) -> None:
        kind = self.path.split("/")[-2:-1]
        if not self.path.startswith("tinker://") or not self.path.isprintable():
            raise InvalidField(f"{self.path[:200]!r} is no checkpoint's path", field="path")
        if kind == ["weights"]:
            raise InvalidField(
                f"{self.path} is a trainer's state; serve the result of save_weights_for_sampler",
                field="path",
            )
        if not is_name(self.model):
            raise InvalidField(
                f"{self.model[:140]!r} cannot name a model: use 1 to 128 of A-Z a-z 0-9 . _ -",
                field="name",
            )
        if self.merged and self.rank is None:
            raise InvalidField(f"{self.path} holds no LoRA adapter to merge", field="merged")
        if (self.adapter_rank or 0) > _RANKS[-1]:
            raise InvalidField(
                f"vLLM serves adapters up to rank {_RANKS[-1]}, not {self.rank}; merge the adapter",
                field="rank",
            )

    @property
    def model(self) -> str:
        return self.name or self.path.rpartition("/")[2]

    @property
    def adapter_rank(self) -> int | None:
        """None if the server loads a whole model."""
        return None if self.merged else self.rank


def hub_address(record: ModelRecord) -> str:
    """Return a downloaded base model as the `base` of a `ServedCheckpoint`."""
    return f"{_HUB}{record.repository}:{record.commit}"


def vllm_commands(served: ServedCheckpoint) -> list[list[str]]:
    """Return two commands, as words: the download, and the server on port 8000.

    Raises `InvalidField` without a usable base model."""
    folder = f"./{served.model}"
    download = ["tandem", "checkpoints", "export", served.path, folder]
    if served.merged:
        download.append("--merged")
    words = ["vllm", "serve"]
    if served.adapter_rank is not None:
        lora = _lora_options(served.adapter_rank, served.model, folder)
        words += [*_vllm_base(served.base), *lora]
    else:
        words += [folder, f"--served-model-name={served.model}"]
    return [download, [*words, f"--dtype={served.dtype}"]]


def vllm_script(served: ServedCheckpoint) -> str:
    """Return `vllm_commands` for a shell, one on a line."""
    return "".join(f"{shlex.join(words)}\n" for words in vllm_commands(served))


def inference_service(served: ServedCheckpoint, *, storage: str, gpus: int = 1) -> Manifest:
    """Return an `InferenceService` that reads the downloaded files at `storage`, such as
    `s3://BUCKET/FOLDER` or `pvc://CLAIM/FOLDER`. Raises `InvalidField`."""
    _check_address(storage, "storage", "the downloaded files")
    predictor: Manifest = {}
    model: Manifest = {"modelFormat": {"name": "huggingface"}}
    arguments = ["--backend=vllm", f"--dtype={served.dtype}"]
    if served.adapter_rank is not None:
        _check_address(served.base, "base", "the base model")
        base, adapter = _mounted("base", served.base), _mounted("adapter", storage)
        predictor["storageUris"] = [base[0], adapter[0]]
        lora = _lora_options(served.adapter_rank, served.model, adapter[1])
        arguments += [f"--model_dir={base[1]}", *lora]
    else:
        model["storageUri"] = storage
        arguments.append(f"--served-model-name={served.model}")
    amounts = {**_RESOURCES, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    model |= {"args": arguments, "resources": {"requests": amounts, "limits": dict(amounts)}}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": _service_name(served.model)},
        "spec": {"predictor": {**predictor, "model": model}},
    }


def inference_service_yaml(served: ServedCheckpoint, *, storage: str, gpus: int = 1) -> str:
    manifest = inference_service(served, storage=storage, gpus=gpus)
    return str(yaml.safe_dump(manifest, sort_keys=False, width=1000))


def _lora_options(rank: int, name: str, path: str) -> list[str]:
    most = next(each for each in _RANKS if each >= rank)
    module = json.dumps({"name": name, "path": path})
    # A base model of the adapter's name would answer in its place, as KServe's default name may be.
    own = f"--served-model-name={name}-base"
    return [own, "--enable-lora", f"--max-lora-rank={most}", "--lora-modules", module]


def _vllm_base(base: str) -> list[str]:
    if base.startswith(_HUB) and _URI.fullmatch(base):
        repository, _, revision = base.removeprefix(_HUB).partition(":")
        return [repository, *([f"--revision={revision}"] if revision else [])]
    if not base or "://" in base or not base.isprintable():
        raise InvalidField(
            f"the base model is {base[:200]!r}; name hf://ORG/NAME:REVISION or a folder",
            field="base",
        )
    return [base if base.startswith(("/", "./")) else f"./{base}"]  # vLLM must not ask a hub


def _check_address(address: str, field: str, what: str) -> None:
    hub = address.startswith(_HUB)
    parts = address.partition("://")[2].split("/")
    if not _URI.fullmatch(address) or ".." in parts or (hub and len(parts) != 2):
        raise InvalidField(
            f"{field} is {address[:200]!r}, and KServe reads {what} at hf://ORG/NAME:REVISION, "
            "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, pvc://CLAIM/FOLDER, oci:// or https://",
            field=field,
        )


def _mounted(part: str, address: str) -> tuple[Manifest, str]:
    """Return one of several sources, and its files' place in the pod. KServe mounts the whole
    claim of a pvc:// address there, without its folder."""
    mount, folder = f"{_MOUNT}/{part}", ""
    if address.startswith(_CLAIM):
        claim, _, folder = address.removeprefix(_CLAIM).partition("/")
        address = f"{_CLAIM}{claim}"
    place = posixpath.normpath(posixpath.join(mount, folder.strip("/")))
    return {"uri": address, "mountPath": mount}, place


def _service_name(model: str) -> str:
    """Return a name for Kubernetes: `Final_2` becomes `final-2`."""
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"model-{name}"
    return name[:_LONGEST_SERVICE].strip("-")
