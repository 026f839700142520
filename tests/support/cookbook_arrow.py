"""Writes small data in the Arrow folders that `sdft.run_continual_learning` reads.

The argument is the folder."""

from __future__ import annotations

import sys

from datasets import Dataset

ROWS = 8


def main(folder: str) -> None:
    calls = [
        {
            "prompt": f"Call {n}.",
            "golden_response": [f"call({n})"],
            "golden_answer": [{"Action": "call", "Action_Input": str(n)}],
        }
        for n in range(ROWS)
    ]
    questions = [
        [{"role": "system", "content": "Select."}, {"role": "user", "content": f"A or B? {n}"}]
        for n in range(ROWS)
    ]
    answers = ["AB"[n % 2] for n in range(ROWS)]
    golden = [f"<reasoning>\nSo.\n</reasoning>\n<answer>\n{each}\n</answer>" for each in answers]
    data = {
        "tooluse_data/train_data": Dataset.from_list(calls),
        "tooluse_data/eval_data": Dataset.from_list(calls),
        "science_data/train_data": Dataset.from_dict(
            {"messages": questions, "output_text": golden}
        ),
        "science_data/eval_data": Dataset.from_dict({"prompt": questions, "answer": answers}),
    }
    for name, rows in data.items():
        rows.save_to_disk(f"{folder}/{name}")


if __name__ == "__main__":
    main(sys.argv[1])
