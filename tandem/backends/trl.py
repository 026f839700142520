"""The job backend `trl`: SFT, DPO, KTO and GRPO of Hugging Face's TRL.

The program is `trainer_service/jobs/trl/train.py`. It reads the job's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from tandem.backends.description import register_backend
from tandem.backends.jobs import JobConfiguration, JobPaths, JobResources
from tandem.errors import InvalidField

Method = Literal["sft", "dpo", "kto", "grpo"]
Reward = Literal["equals_answer", "contains_answer", "answer_characters"]

_OF_METHODS: Mapping[str, Mapping[str, object]] = {
    "max_length": {"sft": 1024, "dpo": 1024, "kto": 1024},
    "beta": {"dpo": 0.1, "kto": 0.1, "grpo": 0.0},
    "group_size": {"grpo": 8},
    "max_completion_length": {"grpo": 256},
    "temperature": {"grpo": 1.0},
    "reward": {"grpo": "contains_answer"},
}
"""The fields that only some methods have, with their defaults."""


@register_backend(
    "trl", capabilities=("sft", "dpo", "kto", "grpo", "lora", "all_parameters", "resume")
)
class TrlConfiguration(JobConfiguration):
    """A training by TRL. A field that the method does not use is null.

    SFT reads rows with `messages`, or `prompt` and `completion`. DPO reads rows with `prompt`,
    `chosen` and `rejected`. KTO reads rows with `prompt`, `completion` and `label`. GRPO reads rows
    with `prompt` and `answer`. It samples completions and scores them with `reward`."""

    framework: ClassVar[str] = "trl"
    packages: ClassVar[Mapping[str, str]] = {"trl": "1.16", "torch": "", "transformers": "5"}

    method: Method
    learning_rate: float = Field(1e-5, gt=0, le=1, allow_inf_nan=False)
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="how the learning rate falls after the warmup"
    )
    warmup_steps: int = Field(0, ge=0, le=1_000_000)
    weight_decay: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    max_grad_norm: float = Field(
        1.0, ge=0, le=1e6, allow_inf_nan=False, description="0 does not clip the gradients"
    )
    steps: int = Field(
        0, ge=0, le=10_000_000, description="optimizer steps; 0 means that `epochs` decides"
    )
    epochs: float = Field(1.0, gt=0, le=10_000, allow_inf_nan=False)
    batch_size: int = Field(8, ge=1, le=4096, description="rows of each process at once")
    gradient_accumulation: int = Field(1, ge=1, le=4096, description="batches of each step")
    lora_rank: int = Field(0, ge=0, le=512, description="0 trains all parameters")
    lora_alpha: float = Field(32.0, gt=0, le=4096, allow_inf_nan=False)
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = Field(0, ge=0, lt=2**31)
    logging_steps: int = Field(1, ge=1, le=1_000_000)
    save_steps: int = Field(
        100, ge=0, le=1_000_000, description="steps between two states for a resume; 0 keeps none"
    )
    eval_steps: int = Field(
        0, ge=0, le=1_000_000, description="steps between two evaluations; 0 evaluates at the end"
    )
    max_length: int | None = Field(
        None, ge=8, le=2**20, description="SFT, DPO, KTO: the most tokens of a row"
    )
    beta: float | None = Field(
        None,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="DPO, KTO, GRPO: the weight of the reference model",
    )
    group_size: int | None = Field(
        None, ge=2, le=1024, description="GRPO: the completions of each prompt"
    )
    max_completion_length: int | None = Field(
        None, ge=1, le=2**17, description="GRPO: the most tokens of a completion"
    )
    temperature: float | None = Field(
        None, gt=0, le=10, allow_inf_nan=False, description="GRPO: of the samples"
    )
    reward: Reward | None = Field(
        None,
        description="GRPO: 1 if the completion equals or contains the row's `answer`, else 0; or "
        "the part of the completion's characters that occur in `answer`",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_the_methods_defaults(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        method = values.get("method")
        defaults = {
            name: by_method[method]
            for name, by_method in _OF_METHODS.items()
            if isinstance(method, str) and method in by_method and values.get(name) is None
        }
        return values | defaults

    @model_validator(mode="after")
    def _refuse_fields_of_other_methods(self) -> Self:
        for name, by_method in _OF_METHODS.items():
            if self.method not in by_method and getattr(self, name) is not None:
                others = ", ".join(by_method)
                raise InvalidField(
                    f"{name} is a setting of {others}, and the method is {self.method}", field=name
                )
        if self.method == "kto" and self.batch_size < 2:
            raise InvalidField(
                "batch_size is 1, and KTO compares the rows of a batch: give it 2 at least",
                field="batch_size",
            )
        return self

    def validate_resources(self, resources: JobResources) -> None:
        completions = self.batch_size * self.gradient_accumulation
        if self.group_size is not None and completions % self.group_size:
            raise InvalidField(
                f"group_size is {self.group_size}, and each process has {completions} completions "
                "in a step (batch_size · gradient_accumulation), which it must divide",
                field="group_size",
            )

    def command(self, paths: JobPaths) -> tuple[str, ...]:
        return (paths.python, "-m", "torch.distributed.run")

    def args(self, paths: JobPaths) -> tuple[str, ...]:
        return (f"{paths.program}/train.py", "--job", f"{paths.folder}/job.json")

    def environment(self, paths: JobPaths) -> dict[str, str]:
        return {
            "DO_NOT_TRACK": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": f"{paths.folder}/state/cache",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_OFFLINE": "1",
        }

    def outputs(self, paths: JobPaths) -> tuple[str, ...]:
        names = ("config.json", "model.safetensors")
        if self.lora_rank:
            names = ("adapter_config.json", "adapter_model.safetensors")
        return tuple(f"{paths.folder}/result/{name}" for name in names)
