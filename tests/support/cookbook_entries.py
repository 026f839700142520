"""tinker-cookbook's entry points: small arguments for each, or the reason why it cannot run.

Each runs in a folder with the models of `MODELS` and the data of `cookbook_data.write_data`."""

from __future__ import annotations

from dataclasses import dataclass, field

MODELS = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.5-9B-Base",
    "Qwen/Qwen3.6-27B",
    "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3.8-27B",
)
"""Names that the recipes have as defaults. One tiny model stands for all of them."""

Q = "Qwen/Qwen3-8B"


@dataclass(frozen=True)
class Entry:
    """An entry point that runs. `needs` says what it reads beside a model, for the table.

    `log` is the argument that names its log folder. `given` is its standard input. `driver` is a
    module that calls the entry point, where it cannot run by itself. `survives` is what it prints
    of an error after which it goes on."""

    module: str
    arguments: dict[str, object] = field(default_factory=dict)
    needs: str = ""
    log: str = "log_path"
    given: str = ""
    variant: str = ""
    driver: str = ""
    survives: str = ""

    @property
    def name(self) -> str:
        return f"{self.module} {self.variant}".strip()


_RL: dict[str, object] = {
    "model_name": Q,
    "lora_rank": 4,
    "groups_per_batch": 4,
    "group_size": 2,
    "max_tokens": 8,
    "max_steps": 1,
    "eval_every": 0,
    "save_every": 0,
}
_SDFT = {**_RL, "group_size": 1, "topk": 4}

ENTRIES = (
    Entry("sl_basic", {"max_steps": 1}, "`HuggingFaceH4/no_robots`, 128 rows or more", log=""),
    Entry(
        "rl_basic",
        {"max_tokens": 4, "max_steps": 1},
        "`openai/gsm8k`, 128 rows or more",
        log="",
    ),
    Entry(
        "chat_sl.train",
        {"model_name": Q, "dataset": "no_robots", "batch_size": 8, "max_steps": 2, "eval_every": 0},
        "`HuggingFaceH4/no_robots`, or a file",
    ),
    Entry(
        "chat_sl.sweep",
        {
            "recipe": "sft",
            "base.model_name": Q,
            "base.dataset": "talks.jsonl",
            "base.batch_size": 8,
            "learning_rates": "1e-3,3e-3",
            "lora_ranks": "4",
            "training_budget_examples": 16,
        },
        "as its recipe",
        log="sweep_dir",
    ),
    Entry("math_rl.train", {**_RL, "env": "arithmetic"}),
    Entry("math_rl.train", {**_RL, "env": "gsm8k"}, "`openai/gsm8k`", variant="env=gsm8k"),
    Entry(
        "math_rl.train",
        {**_RL, "env": "math"},
        "`EleutherAI/hendrycks_math`, `HuggingFaceH4/MATH-500`",
        variant="env=math",
    ),
    Entry(
        "math_rl.train",
        {**_RL, "max_steps_off_policy": 2, "max_steps": 3},
        variant="max_steps_off_policy=2",
    ),
    Entry(
        "preference.dpo.train",
        {"model_name": Q, "dataset": "hhh", "batch_size": 8, "max_steps": 1},
        "`Anthropic/hh-rlhf`",
    ),
    Entry(
        "preference.dpo.train",
        {"model_name": Q, "dataset": "helpsteer3", "batch_size": 8, "max_steps": 1},
        "`nvidia/HelpSteer3`",
        variant="dataset=helpsteer3",
    ),
    Entry(
        "preference.shorter.train",
        {"batch_size": 4, "group_size": 4, "max_tokens": 8, "max_steps": 1, "eval_every": 0},
    ),
    Entry(
        "preference.rlhf.rlhf_pipeline",
        {
            "lora_rank": 4,
            "batch_size": 8,
            "rl_max_tokens": 8,
            "rl_group_size": 2,
            "max_steps": 1,
            "eval_every": 0,
        },
        "`HuggingFaceH4/no_robots`, `Anthropic/hh-rlhf`",
        log="",
    ),
    Entry(
        "prompt_distillation.create_data",
        {"output_file": "distilled.jsonl"},
        "`tinker_cookbook/example_data/multilingual.txt` in the folder",
        log="",
    ),
    Entry(
        "prompt_distillation.train",
        {"file_path": "talks.jsonl", "batch_size": 8, "max_steps": 1, "lora_rank": 4},
        "a file",
    ),
    Entry(
        "distillation.off_policy_reasoning",
        {"batch_size": 4, "max_steps": 1, "buffer_size": 8, "max_prompts": 8, "lora_rank": 4},
        "`open-thoughts/OpenThoughts3-1.2M`",
    ),
    Entry(
        "distillation.on_policy_distillation",
        {**_RL, "teacher_model": "Qwen/Qwen3.5-9B"},
        "`zwhe99/DeepMath-103K`",
    ),
    Entry(
        "distillation.on_policy_multi_teacher",
        {
            "tulu3_teacher_model": "Qwen/Qwen3.5-9B-Base",
            "lora_rank": 4,
            "group_size": 2,
            "deepmath_groups_per_batch": 2,
            "tulu3_groups_per_batch": 2,
            "max_tokens": 8,
            "max_steps": 1,
            "eval_every": 0,
            "save_every": 0,
        },
        "`zwhe99/DeepMath-103K`, `allenai/tulu-3-sft-mixture`",
    ),
    Entry("rubric.generate_data", needs="the folder `tinker_cookbook/example_data`", log=""),
    Entry("rubric.debug_env", log=""),
    Entry(
        "rubric.train",
        {
            "lora_rank": 4,
            "train_group_size": 2,
            "groups_per_batch": 2,
            "max_tokens": 8,
            "max_steps": 1,
            "eval_every": 0,
        },
        "files of `rubric.generate_data`",
    ),
    Entry(
        "rubric.prometheus_experimental",
        {
            "lora_rank": 4,
            "train_group_size": 2,
            "groups_per_batch": 2,
            "max_tokens": 8,
            "max_steps": 1,
            "eval_every": 0,
        },
        "`prometheus-eval/Feedback-Collection`",
    ),
    Entry("sdft.train", _SDFT, "`hicai-zju/SciKnowEval`"),
    Entry(
        "sdft.train",
        {**_SDFT, "dataset": "toolalpaca", "teacher_sync_every": 1, "max_steps": 2},
        "`tangqiaoyu/ToolAlpaca`",
        variant="dataset=toolalpaca",
    ),
    Entry(
        "multiplayer_rl.twenty_questions.train",
        {"batch_size": 2, "group_size": 2, "max_tokens": 8, "max_steps": 1, "eval_every": 0},
    ),
    Entry("decisions.demo", {"model_name": Q}, log="", given="How do I pay?\n"),
    Entry(
        "decisions.forecasting",
        {"data_path": "forecasts.csv", "batch_size": 4, "max_steps": 1, "lora_rank": 4},
        "`data_path=FILE.csv`",
    ),
    Entry(
        "forecasting.train",
        {
            "data_path": "forecasts.csv",
            "lora_rank": 4,
            "group_size": 2,
            "groups_per_batch": 2,
            "validation_group_size": 1,
            "max_tokens": 8,
            "max_steps": 1,
            "eval_every": 0,
        },
        "`data_path=FILE.csv`",
    ),
    Entry(
        "rl_numerics_check.train",
        {
            "model_name": Q,
            "lora_rank": 4,
            "group_size": 2,
            "groups_per_batch": 2,
            "max_tokens": 8,
            "task.page_chars": 400,
            "max_steps": 1,
        },
        "`Salesforce/wikitext`",
    ),
    Entry("true_thinking_score.run_small_experiment", log="", survives="Failed on problem"),
    Entry(
        "true_thinking_score.analyze",
        {"model_name": Q, "dataset": "gsm8k", "n_problems": 2, "max_tokens": 32},
        "`openai/gsm8k`",
        survives="] Failed: ",
    ),
    Entry(
        "code_rl.train",
        _RL,
        "`agentica-org/DeepCoder-Preview-Dataset`, and a SandboxFusion server at `SANDBOX_URL`",
    ),
    Entry(
        "harbor_rl.train",
        {**_RL, "max_turns": 2},
        "a sandbox: pass `sandbox_factory=` to its `cli_main`",
        driver="tests.support.cookbook_harbor",
    ),
    Entry(
        "distillation.on_policy_distillation_harbor_multi_turn",
        {
            **_RL,
            "max_turns": 2,
            "teacher_model": "Qwen/Qwen3.5-9B",
            "sandbox_factory": "tests.support.cookbook_harbor:local_sandbox",
        },
        "a sandbox, as `harbor_rl`",
        driver="tests.support.cookbook_harbor",
    ),
    Entry(
        "multiplayer_rl.text_arena.train",
        {
            "batch_size": 4,
            "num_train_datapoints": 4,
            "num_test_datapoints": 2,
            "max_tokens": 8,
            "max_steps": 1,
            "eval_every": 0,
        },
    ),
    Entry(
        "sdft.run_continual_learning",
        {
            "data_dir": "continual",
            "methods": "sft,sdft_is,sdft_topk,sdft_hybrid",
            "learning_rates": "1e-3",
            "lora_rank": 4,
            "batch_size": 4,
            "max_tokens": 64,
            "topk": 4,
        },
        "the paper's Arrow folders, at `data_dir`",
        log="log_root",
    ),
)

IN_OTHER_TESTS = {
    "sl_loop": "`HuggingFaceH4/no_robots`",
    "rl_loop": "`openai/gsm8k`",
    "multiplayer_rl.guess_number.train": "",
}
"""Run by tests/integration/test_recipes.py, which also reads their results."""

BY_HAND = {
    "search_tool.train": "Chroma, and an address for Vertex AI's embeddings",
}
"""Have run once, with what the nightly tests lack."""

BLOCKED = {
    "harbor_rl.scripts.*": "need Modal and a cache of tasks",
    "sdft.benchmark": "is not implemented for its own data set `sciknoweval`",
    "verifiers_rl.train": "calls its own `custom_do_group_rollout` with an unknown argument",
    "verifiers_rl.evaluate": "ends with an `IndexError` in its own printout",
    "vlm_classifier.*": "needs images, which Tandem does not take",
    "audio.*": "needs sound, which Tandem does not take",
}
