"""The program of TRL jobs: `torchrun … train.py --job FOLDER/job.json`, one process for each rank.

It runs in TRL's environment, so it imports nothing else of Tandem. `docs/design/jobs.md` lists the
files. It resumes from the newest complete checkpoint in `state/`."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# torchrun starts its ranks in sessions of their own. The kernel kills them when it ends.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

import torch
import torch.distributed as dist
import trl
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoTokenizer, TrainerCallback

Json = dict[str, Any]
ROW = "row"  # the column with a row's number in its file
COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "label", "answer")
SETTINGS = (
    *("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "seed", "logging_steps"),
    *("save_steps", "eval_steps", "max_length", "beta", "max_completion_length", "temperature"),
)  # TRL has the same names. A setting of another method is null.
REWARDS: dict[str, Callable[[str, str], float]] = {
    "equals_answer": lambda text, answer: float(text.strip() == answer.strip()),
    "contains_answer": lambda text, answer: float(answer in text),
    "answer_characters": lambda text, answer: sum(x in answer for x in text) / max(1, len(text)),
}


def reward_function(name: str) -> Callable[..., list[float]]:
    def reward(completions: list[Any], answer: list[str], **_columns: object) -> list[float]:
        texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
        return [REWARDS[name](text, right) for text, right in zip(texts, answer, strict=True)]

    reward.__name__ = name
    return reward


class AttemptFiles(TrainerCallback):  # type: ignore[misc]
    """Writes world and metrics, and marks complete checkpoints. As the collator, it hashes the
    number and line of each training row."""

    def __init__(self, attempt: Path, train: Path, trainer: Any) -> None:
        self._attempt, self._device = attempt, str(trainer.args.device)
        self._collate, self._began, self._known = trainer.data_collator, time.monotonic(), False
        self._lines, self._hash, self._rows = train.read_bytes().splitlines(), hashlib.sha256(), 0

    def __call__(self, examples: list[Json]) -> Any:
        for number in (each[ROW] for each in examples if ROW in each):
            self._hash.update(b"%d %s\n" % (number, self._lines[number]))
            self._rows += 1
        return self._collate(examples)

    def on_step_end(self, *_about: Any, **_more: Any) -> None:
        if not self._known:
            self.on_train_end()

    def on_train_end(self, *_about: Any, **_more: Any) -> None:
        self._known, rank, world = True, dist.get_rank(), dist.get_world_size()
        own = {"rank": rank, "world_size": world, "device": self._device, "rows": self._rows}
        ranks: list[Json] = [{}] * world
        dist.all_gather_object(ranks, {**own, "sha256": self._hash.hexdigest()})
        if rank == 0:
            partial = self._attempt / "world.partial"
            partial.write_text("".join(json.dumps(each) + "\n" for each in ranks))
            partial.replace(self._attempt / "world.jsonl")
        if self._rows and len({each["sha256"] for each in ranks}) < len(ranks):
            raise RuntimeError("two ranks have read the same rows: their data hashes are equal")

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Json, **_more: Any) -> None:
        if dist.get_rank() == 0 and "train_runtime" not in logs:
            kept = {key: value for key, value in logs.items() if math.isfinite(value)}
            where = {"step": state.global_step, "steps": state.max_steps}
            line = {**where, "seconds": time.monotonic() - self._began, "values": kept}
            with (self._attempt / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def on_save(self, args: Any, state: Any, _control: Any, **_more: Any) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            sync(checkpoint := Path(args.output_dir, f"checkpoint-{state.global_step}"))
            (checkpoint / "complete").touch()


def check_launcher(processes: int) -> None:
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" not in os.environ:
        raise RuntimeError("torchrun must start this program: accelerate launch ignores PET_*")
    if (world := int(os.environ["WORLD_SIZE"])) != processes:
        raise RuntimeError(f"the job has {processes} processes, but WORLD_SIZE is {world}")


def sync(folder: Path) -> None:
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def newest_checkpoint(state: Path) -> Path | None:
    for each in sorted(state.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        if (each / "complete").exists():
            return each
        if dist.get_rank() == 0:
            shutil.rmtree(each)
    return None


def read(path: Path) -> Dataset:
    rows = enumerate(map(json.loads, path.read_bytes().splitlines()))
    known = ({key: row[key] for key in COLUMNS if key in row} | {ROW: n} for n, row in rows)
    return Dataset.from_list([*known])


def make_trainer(job: Json, folder: Path, attempt: Path) -> Any:
    chosen, cuda = job["configuration"], torch.cuda.is_available()
    method, rank, bf16 = chosen["method"], chosen["lora_rank"], chosen["dtype"] == "bfloat16"
    train, held_out = folder / "data/train.jsonl", folder / "data/eval.jsonl"
    arguments = getattr(trl, f"{method.upper()}Config")(
        **{each: chosen[each] for each in SETTINGS if chosen[each] is not None},
        output_dir=str(folder / "state"),
        **({"num_generations": chosen["group_size"]} if method == "grpo" else {}),
        max_steps=chosen["steps"] or -1,
        num_train_epochs=chosen["epochs"],
        per_device_train_batch_size=chosen["batch_size"],
        per_device_eval_batch_size=chosen["group_size"] or chosen["batch_size"],
        gradient_accumulation_steps=chosen["gradient_accumulation"],
        gradient_checkpointing=cuda,
        lr_scheduler_type=chosen["schedule"],
        save_strategy="steps" if chosen["save_steps"] else "no",
        save_total_limit=2,
        eval_strategy="steps" if held_out.exists() and chosen["eval_steps"] else "no",
        eval_on_start=held_out.exists(),
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=not cuda,
        bf16=bf16,
        # Trained weights are in float32. A frozen model needs no more than it computes with.
        model_init_kwargs={"dtype": "bfloat16" if bf16 and rank else "float32"},
    )
    lora = {"r": rank, "lora_alpha": chosen["lora_alpha"], "target_modules": "all-linear"}
    trainer = getattr(trl, f"{method.upper()}Trainer")(
        model=job["model"],
        args=arguments,
        train_dataset=read(train),
        eval_dataset=read(held_out).remove_columns(ROW) if held_out.exists() else None,
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        peft_config=LoraConfig(**lora, task_type="CAUSAL_LM") if rank else None,
        **({"reward_funcs": reward_function(chosen["reward"])} if method == "grpo" else {}),
    )
    trainer.data_collator = report = AttemptFiles(attempt, train, trainer)
    trainer.add_callback(report)
    return trainer


@record  # type: ignore[untyped-decorator]
def main(path: Path) -> None:
    job: Json = json.loads(path.read_bytes())
    check_launcher(job["processes"])
    folder, attempt = Path(job["folder"]), Path(job["folder"], f"attempt-{job['attempt']}")
    attempt.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(job, folder, attempt)
    checkpoint = newest_checkpoint(folder / "state")
    dist.barrier()
    saved = checkpoint and trainer.state.load_from_json(str(checkpoint / "trainer_state.json"))
    if saved and saved.global_step >= saved.max_steps:  # TRL would train one more step
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = saved
        trainer.callback_handler.on_train_end(trainer.args, saved, trainer.control)
    else:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    if dist.get_rank() == 0:
        for left in (partial := folder / "result.partial", result := folder / "result"):
            shutil.rmtree(left, ignore_errors=True)
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(partial)
        sync(partial)
        partial.rename(result)
    dist.barrier()
    os._exit(0)  # DDP's destructor can wait forever for a thread of gloo that waits for the GIL


if __name__ == "__main__":
    main(Path(sys.argv[sys.argv.index("--job") + 1]))
