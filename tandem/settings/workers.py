"""Settings of trainers and samplers, and of idle processes that wait to become one.

The gateway reads the environment, and gives each worker its settings (`WorkerSpec`). Nobody needs
to change the fields that only `TrainerSettings` or `SamplerSettings` has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

Source = PydanticBaseSettingsSource


class _NotOfEnvironment(BaseSettings):
    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: Source,
        env_settings: Source,
        dotenv_settings: Source,
        file_secret_settings: Source,
    ) -> tuple[Source, ...]:
        return (init_settings,)


class TrainerEnvironment(BaseSettings):
    """Settings of all trainers. Environment: `TANDEM_TRAINER_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_TRAINER_")

    ranks: int = Field(1, ge=1, description="The processes that train one run together.")
    backend: str = Field("fsdp2", description="The trainer backend of runs that name none.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="The device of trainers without declared groups (auto: GPUs if present).",
    )
    threads: int = Field(
        0, ge=0, description="The CPU threads of a rank (0: cores divided by ranks)."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="The dtype of a trainer's computation (auto: bfloat16 on a GPU, float32 "
        "on a CPU).",
    )
    micro_batch_tokens: int = Field(
        0,
        ge=0,
        description="The tokens of a forward pass (0: 2048 on a CPU, 16384 on a GPU).",
    )
    memory_bytes: int = Field(
        0,
        ge=0,
        description="The memory that a trainer may use of each GPU, or of the host for CPU "
        "ranks (0: nine tenths of the free memory).",
    )
    collective_timeout: float = Field(
        120.0,
        gt=0,
        description="Ranks that wait for each other for this many seconds end their trainer.",
    )
    interface: str = Field(
        "",
        description="The network interface between ranks on several nodes (default: the one "
        "with the route to node 0).",
    )


class TrainerSettings(_NotOfEnvironment, TrainerEnvironment):
    """Settings of one trainer. They come from the gateway, not from the environment."""

    @classmethod
    def of(cls, environment: TrainerEnvironment, **more: object) -> TrainerSettings:
        return cls.model_validate(environment.model_dump(exclude_unset=True) | more)

    operation_timeout: float = 1800.0
    parallel_micro_batches: int = Field(
        0,
        ge=0,
        description="Micro-batches that a single CPU rank computes in parallel, each with its own "
        "gradients; 0 = 2, or 1 with one thread.",
    )
    packing: Literal["on", "off"] = Field(
        "on",
        description="Concatenate sequences into rows instead of padding them, where the model and "
        "the device allow it, which is tried out.",
    )
    logits_bytes: int = Field(
        0,
        ge=0,
        description="Of the logits, in float32, that exist at once; 0 = 64 MiB on a CPU, else "
        "512 MiB. Some four tensors are of that size.",
    )
    unreduced_gradients_bytes: int = Field(
        0,
        ge=0,
        description="Several ranks add up gradients once for a call, and not with each of its "
        "micro-batches, if those of the whole model, in float32, are no more than this: each rank "
        "has them meanwhile. 0 = 256 MiB on a CPU, else 4 GiB.",
    )
    checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether blocks keep their input alone for the backward pass, and are computed "
        "again there. auto: where memory is too small otherwise.",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "off",
        description="Whether blocks are compiled when a trainer starts, for runs that do not say "
        "it. auto: on a GPU.",
    )
    shard_group_parameters: int = Field(
        16_000_000, ge=1, description="Blocks are gathered into FSDP groups of at least this size."
    )


class SamplerEnvironment(BaseSettings):
    """Settings of all samplers. Environment: `TANDEM_SAMPLER_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_SAMPLER_")

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="The device of samplers without declared groups (auto: GPUs if present).",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="The dtype of an engine's computation (auto: bfloat16 on a GPU, float32 "
        "on a CPU).",
    )
    ranks: int = Field(
        1,
        ge=1,
        le=64,
        description="The devices over which an engine splits its weights.",
    )
    engine_process: Literal["auto", "on", "off"] = Field(
        "auto",
        description="An engine has a process of its own beside its sampler's (auto: on a GPU).",
    )
    max_model_len: int = Field(
        0,
        ge=0,
        description="The longest sequence of prompt and sample (0: the model's limit, or "
        "the KV cache's).",
    )
    max_num_seqs: int = Field(
        256, ge=1, description="The samples that an engine computes at a time (more of them wait)."
    )
    kv_cache_bytes: int = Field(
        512 * 2**20, ge=2**20, description="The bytes of an engine's KV cache on a CPU."
    )
    gpu_memory_utilization: float = Field(
        0.45, gt=0, le=1, description="The share of a GPU's memory that an engine uses."
    )


class SamplerSettings(_NotOfEnvironment, SamplerEnvironment):
    """Settings of one sampler. They come from the gateway, not from the environment."""

    @classmethod
    def of(cls, environment: SamplerEnvironment, **more: object) -> SamplerSettings:
        return cls.model_validate(environment.model_dump(exclude_unset=True) | more)

    operation_timeout: float = 1800.0
    max_lora_rank: int = Field(
        0, ge=0, le=512, description="Largest rank of the adapters served; 0: no adapters."
    )
    model_runner: Literal["auto", "v1", "v2"] = Field(
        "auto",
        description="Which of vLLM's two model runners computes. auto: the one that vLLM chooses; "
        "on a CPU the first, since the second needs Triton.",
    )
    gpu_memory_bytes: int = Field(
        0, ge=0, description="Of the GPU's memory; 0 = by gpu_memory_utilization."
    )
    max_adapters: int = Field(
        4, ge=1, description="Adapters in one batch of an engine, which keeps more loaded."
    )


class PoolSettings(BaseSettings):
    """Processes that the agent starts in advance. Environment: `TANDEM_POOL_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_POOL_")

    processes: int = Field(
        1,
        ge=0,
        le=16,
        description="The idle processes of each kind that an agent keeps for the next workers.",
    )
