"""Settings of trainers and samplers, and of idle processes that wait to become one.

The gateway reads the environment, and gives each worker its settings (`WorkerSpec`). Nobody needs
to change the fields that only `TrainerSettings` or `SamplerSettings` has."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class _TrainerFields(BaseModel):
    ranks: int = Field(1, ge=1, description="Processes that train one run together.")
    backend: str = Field("fsdp2", description="The default trainer backend.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device without declared groups (auto: GPUs if present).",
    )
    threads: int = Field(0, ge=0, description="A rank's CPU threads (0: cores divided by ranks).")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Dtype of computation (auto: bfloat16 on a GPU, float32 on a CPU).",
    )
    micro_batch_tokens: int = Field(
        0,
        ge=0,
        description="Tokens of a forward pass (0: 2048 on a CPU, 16384 on a GPU).",
    )
    memory_bytes: int = Field(
        0,
        ge=0,
        description="Memory on each GPU, or on the host for CPU ranks (0: nine tenths of the free "
        "memory).",
    )
    collective_timeout: float = Field(
        120.0,
        gt=0,
        description="A trainer ends when its ranks wait for each other for this time.",
    )
    interface: str = Field(
        "",
        description="Network interface between nodes (default: the one with the route to node 0).",
    )


class TrainerEnvironment(_TrainerFields, BaseSettings):
    """Settings of all trainers. Environment: `TANDEM_TRAINER_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_TRAINER_")


class _OfOneWorker(BaseModel):
    """Settings that come from the gateway, not from the environment."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def of(cls, environment: BaseSettings, **more: object) -> Self:
        return cls.model_validate(environment.model_dump(exclude_unset=True) | more)


class TrainerSettings(_OfOneWorker, _TrainerFields):
    """Settings of one trainer."""

    operation_timeout: float = 1800.0
    parallel_micro_batches: int = Field(
        0,
        ge=0,
        description="The micro-batches that a single CPU rank computes in parallel, each with its "
        "own gradients (0: 2, or 1 with one thread).",
    )
    packing: Literal["on", "off"] = Field(
        "on",
        description="Sequences are packed into rows instead of padded, if a test shows that model "
        "and device allow it.",
    )
    logits_bytes: int = Field(
        0,
        ge=0,
        description="The bytes of a chunk of float32 logits (0: 64 MiB on a CPU, 512 MiB on a "
        "GPU). A chunk takes about three times as much. With compiled blocks it has more rows in "
        "the same memory.",
    )
    unreduced_gradients_bytes: int = Field(
        0,
        ge=0,
        description="Ranks reduce gradients once per call instead of once per micro-batch if the "
        "whole model's float32 gradients have at most this many bytes, which each rank then holds "
        "(0: 256 MiB on a CPU, 4 GiB on a GPU).",
    )
    checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Blocks keep only their inputs for the backward pass, and are computed again "
        "there (auto: if memory is too small otherwise).",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "off",
        description="Blocks are compiled at a trainer's start, for runs that do not choose (auto: "
        "on a GPU).",
    )
    shard_group_parameters: int = Field(
        16_000_000, ge=1, description="The smallest FSDP group of blocks, in parameters."
    )


class _SamplerFields(BaseModel):
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device without declared groups (auto: GPUs if present).",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Dtype of computation (auto: bfloat16 on a GPU, float32 on a CPU).",
    )
    ranks: int = Field(
        1,
        ge=1,
        le=64,
        description="Devices of one engine.",
    )
    engine_process: Literal["auto", "on", "off"] = Field(
        "auto",
        description="An engine has a process of its own (auto: on a GPU).",
    )
    max_model_len: int = Field(
        0,
        ge=0,
        description="Longest prompt with its sample (0: the model's limit, or the KV cache's).",
    )
    max_num_seqs: int = Field(256, ge=1, description="Samples that an engine computes at a time.")
    kv_cache_bytes: int = Field(512 * 2**20, ge=2**20, description="An engine's KV cache on a CPU.")
    gpu_memory_utilization: float = Field(
        0.45, gt=0, le=1, description="An engine's share of a GPU's memory."
    )


class SamplerEnvironment(_SamplerFields, BaseSettings):
    """Settings of all samplers. Environment: `TANDEM_SAMPLER_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_SAMPLER_")


class SamplerSettings(_OfOneWorker, _SamplerFields):
    """Settings of one sampler."""

    operation_timeout: float = 1800.0
    max_lora_rank: int = Field(
        0, ge=0, le=512, description="The largest rank of served adapters (0: no adapters)."
    )
    model_runner: Literal["auto", "v1", "v2"] = Field(
        "auto",
        description="vLLM's model runner (auto: vLLM's choice on a GPU, v1 on a CPU, because v2 "
        "needs Triton).",
    )
    gpu_memory_bytes: int = Field(
        0, ge=0, description="The GPU memory of an engine (0: by gpu_memory_utilization)."
    )
    max_adapters: int = Field(
        4, ge=1, description="The adapters in one batch of an engine. It keeps more loaded."
    )


class PoolSettings(BaseSettings):
    """Processes that the agent starts in advance. Environment: `TANDEM_POOL_*`."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_POOL_")

    processes: int = Field(
        1,
        ge=0,
        le=16,
        description="Idle processes of each kind that an agent keeps ready.",
    )
