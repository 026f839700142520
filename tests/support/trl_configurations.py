"""Hypothesis strategies for settings of the job backend `trl`."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from tandem.backends.jobs import JobPaths
from tandem.backends.registry import job_backend

TRL = job_backend("trl")
NUMBERS = {
    "learning_rate": st.floats(1e-9, 1),
    "warmup_steps": st.integers(0, 1000),
    "weight_decay": st.floats(0, 1),
    "max_grad_norm": st.floats(0, 100),
    "steps": st.integers(0, 1000),
    "epochs": st.floats(0.01, 100),
    "batch_size": st.integers(2, 64),
    "gradient_accumulation": st.integers(1, 64),
    "lora_rank": st.integers(0, 512),
    "lora_alpha": st.floats(0.1, 100),
    "seed": st.integers(0, 2**31 - 1),
    "logging_steps": st.integers(1, 100),
    "save_steps": st.integers(0, 100),
    "eval_steps": st.integers(0, 100),
}
CHOICES = {
    "schedule": st.sampled_from(["constant", "linear", "cosine"]),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
}
LENGTH, BETA = {"max_length": st.integers(8, 10_000)}, {"beta": st.floats(0, 10)}
OF_METHODS = {
    "sft": LENGTH,
    "dpo": LENGTH | BETA,
    "kto": LENGTH | BETA,
    "grpo": BETA
    | {
        "group_size": st.integers(2, 64),
        "max_completion_length": st.integers(1, 10_000),
        "temperature": st.floats(0.1, 2),
        "reward": st.sampled_from(["equals_answer", "contains_answer", "answer_characters"]),
    },
}
NOT_OF_ALL = LENGTH | OF_METHODS["grpo"]
EVERY_FIELD = NUMBERS | CHOICES | NOT_OF_ALL


def of_method(method: str) -> st.SearchStrategy[dict[str, object]]:
    optional = NUMBERS | CHOICES | OF_METHODS[method]
    return st.fixed_dictionaries({"method": st.just(method)}, optional=optional)


values = st.sampled_from(sorted(OF_METHODS)).flatmap(of_method)
text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
paths = st.builds(
    JobPaths,
    **{name: text.map("/{}".format) for name in ("python", "program", "folder", "model")},
)
wrong = st.one_of(
    st.sampled_from([-1, -0.5, math.nan, math.inf, 2**40]),
    st.lists(st.none(), max_size=2),
    st.just("$(none)"),
)
