"""Loads any Hugging Face causal language model and describes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tandem.errors import InvalidRequest, WorkerStartFailed, describe
from tandem.telemetry import get_log
from tandem.weights.model_config import why_untrained

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel


_CAUSAL_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Allowed difference of equal logits, by their type."""


@dataclass(frozen=True)
class ModelFacts:
    """`max_length` is in tokens, 0 if the model states no limit. `parameters` counts the base
    model's."""

    architecture: str
    parameters: int
    vocabulary: int
    max_length: int
    trainable_parameters: int


def check_trainable(path: Path) -> None:
    """Raise `WorkerStartFailed` for a model that cannot be trained, by its configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = _config(path)
    reason = why_untrained(config.to_dict())
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not reason and getattr(kind, "_is_stateful", False):
        reason = (
            "cannot be trained: its layers keep a state that goes from token to token, and only "
            "attention is known to hold sequences apart"
        )
    if reason:
        raise WorkerStartFailed(f"the model {path.name} ({config.model_type}) {reason}")


def load_model(
    path: Path,
    *,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    on_host: bool = False,
) -> nn.Module:
    """Load any model that AutoModelForCausalLM accepts, in float32 on the CPU, fully trainable.

    `prepare` gets the model while its parameters have no memory yet, and may shard them or change
    their types. Then only this rank's part is read. Raises `WorkerStartFailed`.

    The model stays in eval mode, because dropout would make the trainer's logprobs differ from the
    sampler's."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # logs are JSON lines
    plain = type(empty_model(path))
    # Torch's own attention, the default, ignores a softcap.
    capped = getattr(_config(path).get_text_config(), "attn_logit_softcapping", None)
    names: set[str] = set()

    def load(model: nn.Module, *given: object) -> object:
        model.__class__ = plain  # libraries keep classes for ever, and the hook refers to the model
        model.tie_weights(recompute_mapping=False)
        names.update(name for name, _ in model.named_parameters())
        prepare(model)
        return plain._load_pretrained_model(model, *given)

    hook = {"_load_pretrained_model": staticmethod(load), "__module__": plain.__module__}
    hooked: type[PreTrainedModel] = type(plain.__name__, (plain,), hook)
    # No device: transformers would reserve memory for the whole model there. Local files only: a
    # name that is not a local directory must not cause a download from the hub.
    with _shards_on_host() if on_host else nullcontext():
        model, found = hooked.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="eager" if capped else None,
            local_files_only=True,
            use_safetensors=True,  # never a pickled .bin
            trust_remote_code=False,  # never code from the model's folder
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    _check(found, path)
    if untied := {name for name, _ in model.named_parameters()} - names:
        raise WorkerStartFailed(
            f"the configuration of {path.name} ties weights that differ in its files, such as "
            f"{min(untied)}: set tie_word_embeddings to false in its config.json"
        )
    _copy_shards(model)
    model.eval()
    return model


@contextmanager
def _shards_on_host() -> Iterator[None]:
    """Make transformers leave each part on the host. torch would move it to the ranks' device."""
    from transformers import core_model_loading, modeling_utils

    modules = (core_model_loading, modeling_utils)
    before = core_model_loading._dtensor_from_local_like
    for module in modules:
        module._dtensor_from_local_like = _part_of
    try:
        yield
    finally:
        for module in modules:
            module._dtensor_from_local_like = before


def _part_of(part: Tensor, whole: DTensor) -> DTensor:
    """Wrap this rank's `part` as a tensor sharded like `whole`, wherever it lies."""
    return DTensor(part.contiguous(), whole._spec, requires_grad=False)


def _copy_shards(model: nn.Module) -> None:
    """Give each shard its own memory, because torch cannot copy parts of a mapped file."""
    own: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                if parameter not in own:
                    own[parameter] = _with_own_memory(parameter)
                setattr(module, name, own[parameter])


def _with_own_memory(parameter: nn.Parameter) -> nn.Parameter:
    whole = _part_of(parameter.to_local().detach().clone(), parameter)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _check(found: Mapping[str, Collection[object]], path: Path) -> None:
    """Raise `WorkerStartFailed` for missing tensors. Transformers only warns, and draws them at
    random."""
    for what in ("missing_keys", "mismatched_keys", "conversion_errors", "error_msgs"):
        if wrong := found.get(what):
            first = sorted(map(str, wrong))[0][:300]
            raise WorkerStartFailed(
                f"the files of the model {path.name} are not those of its configuration: "
                f"{len(wrong)} {what.replace('_', ' ')}, such as {first}"
            )


def check_causal(model: nn.Module) -> None:
    """Raise `WorkerStartFailed` unless tokens are independent of later ones, such as padding."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = torch.tensor(
        [[1, 2, 3, 4, 5], [1, 2, 3, 7, 8]], device=next(model.parameters()).device
    )
    with torch.no_grad():
        logits = model(input_ids=tokens % vocabulary, use_cache=False).logits[:, :3]
    tolerance = _CAUSAL_TOLERANCE[logits.dtype] * max(1.0, float(logits.abs().max()))
    if float((logits[0] - logits[1]).abs().max()) > tolerance:
        raise WorkerStartFailed(
            f"{type(model).__name__} cannot be trained: its output for a token depends on later "
            "tokens, so log-probabilities would be of tokens that it has already seen"
        )


def facts_of(model: nn.Module) -> ModelFacts:
    config = model.config.get_text_config()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelFacts(
        architecture=type(model).__name__,
        parameters=parameters,
        vocabulary=int(config.vocab_size),
        max_length=int(getattr(config, "max_position_embeddings", 0) or 0),
        trainable_parameters=parameters,
    )


def empty_model(path: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(_config(path))
    return model


def _config(path: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


UNFIT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of libraries for a configuration that they cannot build or compute."""


def small_model(path: Path, *, times: int = 1) -> PreTrainedModel | None:
    """Build a small random model of the same code, for tests while the real weights are sharded.

    It has `times` as many heads and columns as needed. None if the configuration does not allow it.
    """
    from transformers import AutoModelForCausalLM

    config = _config(path)
    try:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            _make_small(config.get_text_config(), times=times)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.eval()
            for parameter in model.parameters():
                if parameter.ndim > 1:  # larger than transformers' draws, so that differences show
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
            model(input_ids=torch.arange(5)[None], use_cache=False)
    except UNFIT as error:
        get_log().warning("no_small_model", error=describe(error, typed=True)[:300])
        return None
    return model


def _make_small(config: PreTrainedConfig, *, times: int) -> None:
    layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    shared = heads // int(getattr(config, "num_key_value_heads", None) or heads)
    kinds = list(getattr(config, "layer_types", None) or [])
    few = min(layers, max([4, *(kinds.index(kind) + 1 for kind in kinds)]))
    small: dict[str, object] = {
        name: value[:few]
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == layers
    }
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    small |= {
        "num_hidden_layers": few,
        "num_attention_heads": shared * times,
        "vocab_size": 64 * times,
        "hidden_size": width * shared * times,
    }
    if getattr(config, "num_key_value_heads", None):
        small["num_key_value_heads"] = times
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(config, name, None):
            small[name] = 16 * times
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        small[name] = None  # the vocabulary may not have them
    for name, value in small.items():
        setattr(config, name, value)


def name_in_files(model: nn.Module, name: str) -> str:
    """The name of a parameter in the model's files. Raises `InvalidRequest` if it is not one tensor
    there."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        parameter = model.get_parameter(name)
    except AttributeError as error:
        raise InvalidRequest(
            f"the model has no {name}: the adapter belongs to another base model"
        ) from error
    found = list(revert_weight_conversion(model, {name: parameter.detach()}))
    if len(found) != 1:
        raise InvalidRequest(f"{name} is not a tensor of its own in the model's files")
    return str(found[0])


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks in order: the `ModuleList` with the most parameters."""
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module):
            size = sum(parameter.numel() for parameter in module.parameters())
            if size > most:
                best, most = list(module), size
    return best


def group_blocks(blocks: Sequence[nn.Module], *, minimum: int) -> list[list[nn.Module]]:
    """Group consecutive blocks so that each group has at least `minimum` parameters.

    The rest stays in the root group, because one large collective is faster than many small ones.
    """
    groups: list[list[nn.Module]] = []
    current: list[nn.Module] = []
    size = 0
    for block in blocks:
        current.append(block)
        size += sum(parameter.numel() for parameter in block.parameters())
        if size >= minimum:
            groups.append(current)
            current, size = [], 0
    return groups


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
