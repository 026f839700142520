"""Small data sets in place of those that tinker-cookbook's recipes read from the hub."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from tests.support.cookbook import write_lines

CONFIGURED = "---\nconfigs:\n{}---\n"
"""The head of a data set's README.md with named configurations."""
FORECAST = (
    "submission_id",
    "event_ticker",
    "title",
    "snapshot_time",
    "close_time",
    "market_outcome",
    "category",
    "markets",
    "sources",
)
DEEPCODER = ("primeintellect", "taco", "lcbv5", "codeforces")


def write_data(folder: Path) -> None:
    """Write each data set into `folder` under its name on the hub."""
    talks = [[_turn("user", f"Say {n}."), _turn("assistant", f"Here is {n}.")] for n in range(160)]
    for split in ("train", "test"):
        _rows(folder, f"HuggingFaceH4/no_robots/{split}", [{"messages": each} for each in talks])
        pairs = [
            {
                "chosen": f"\n\nHuman: Is {n} even?\n\nAssistant: Perhaps.",
                "rejected": f"\n\nHuman: Is {n} even?\n\nAssistant: No idea.",
            }
            for n in range(40)
        ]
        _rows(folder, f"Anthropic/hh-rlhf/{split}", pairs)
    write_lines(folder / "talks.jsonl", [{"messages": each} for each in talks])

    sums = [{"question": f"{n}+{n}?", "answer": f"It is.\n#### {2 * n}"} for n in range(140)]
    _configured(folder, "openai/gsm8k", {"main": {"train": sums, "test": sums[:8]}})
    math = [
        {"problem": f"Add {n} and 1.", "solution": f"\\boxed{{{n + 1}}}", "answer": str(n + 1)}
        for n in range(24)
    ]
    _configured(
        folder, "EleutherAI/hendrycks_math", {"algebra": {"train": math[8:], "test": math[8:12]}}
    )
    _configured(folder, "HuggingFaceH4/MATH-500", {"default": {"test": math[:8]}})
    preferences = [
        {
            "context": [_turn("user", f"Is {n} odd?")],
            "response1": "Yes.",
            "response2": "Ask another.",
            "overall_preference": -2 if n % 2 else 2,
        }
        for n in range(16)
    ]
    _configured(
        folder,
        "nvidia/HelpSteer3",
        {"preference": {"train": preferences, "validation": preferences}},
    )
    thoughts = [
        {"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": "Ok."}]}
        for n in range(16)
    ]
    _rows(folder, "open-thoughts/OpenThoughts3-1.2M/train", thoughts)
    deep = [{"question": f"What is {n} + 1?", "final_answer": str(n + 1)} for n in range(16)]
    _rows(folder, "zwhe99/DeepMath-103K/train", deep)
    _rows(folder, "allenai/tulu-3-sft-mixture/train", [{"messages": each} for each in talks])
    chemistry = [
        {
            "domain": "Chemistry",
            "details": {"level": "L3"},
            "type": "mcq-4-choices",
            "question": f"How many are {n}?",
            "choices": {"text": ["one", "two"], "label": ["A", "B"]},
            "answerKey": "AB"[n % 2],
        }
        for n in range(20)
    ]
    _rows(folder, "hicai-zju/SciKnowEval/test", chemistry)
    tools = [{"instruction": f"Call {n}.", "output": f"call({n})"} for n in range(20)]
    _rows(folder, "tangqiaoyu/ToolAlpaca/train", tools)
    graded = [
        {
            "orig_instruction": f"What is {n} + 1?",
            "orig_criteria": "Is it right?",
            **{f"orig_score{score}_description": f"{score} of 5." for score in range(1, 6)},
            "orig_reference_answer": str(n + 1),
        }
        for n in range(8)
    ]
    _rows(folder, "prometheus-eval/Feedback-Collection/train", graded)
    lines = [{"text": f"Line {n} of a short page with some words in it. "} for n in range(400)]
    _configured(folder, "Salesforce/wikitext", {"wikitext-103-raw-v1": {"train": lines}})
    tasks = [
        {
            "problem": f"Print {n}.",
            "tests": json.dumps([{"input": "", "output": str(n), "testtype": "stdin_stdout"}]),
            "metadata": "{}",
            "starter_code": "",
        }
        for n in range(8)
    ]
    _configured(
        folder,
        "agentica-org/DeepCoder-Preview-Dataset",
        {name: {"train": tasks, "test": tasks[:2]} for name in DEEPCODER},
    )
    _write_forecasts(folder / "forecasts.csv")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _rows(folder: Path, name: str, rows: list[dict]) -> None:
    write_lines(folder / f"{name}.jsonl", rows)


def _configured(folder: Path, name: str, configurations: dict[str, dict[str, list]]) -> None:
    head = ""
    for each, splits in configurations.items():
        head += f"- config_name: {each}\n  data_files:\n"
        for split, rows in splits.items():
            _rows(folder, f"{name}/{each}/{split}", rows)
            head += f"  - split: {split}\n    path: {each}/{split}.jsonl\n"
    (folder / name / "README.md").write_text(CONFIGURED.format(head))


def _write_forecasts(path: Path) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(FORECAST)
        for n in range(24):
            month = 9 if n < 16 else 11  # before and after the recipe's split
            table.writerow(
                [
                    f"s{n}", f"E{n}", f"Event {n}", f"2025-{month:02}-01T00:00:00Z",
                    f"2025-{month:02}-05T00:00:00Z", json.dumps({f"m{n}": n % 2}), "Sums",
                    json.dumps([f"m{n}"]),
                    json.dumps([{"title": "Paper", "summary": "It may be.", "ranking": 1}]),
                ]
            )  # fmt: skip
