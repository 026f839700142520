"""The program of TRL jobs, under the real torchrun, in TRL's own environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.local_trainer import forward_backward, make, step, weights
from tests.support.trainer_worker import datum
from tests.support.trl_jobs import DATA, MESSAGES, PYTHON, ROOT, TrlJob, needs_trl, write_model
from tests.support.waiting import wait_until

pytestmark = needs_trl

PROGRAM = ROOT / "trainer_service" / "jobs" / "trl" / "train.py"
LORA = {"method": "sft", "learning_rate": 1e-2, "lora_rank": 4, "batch_size": 2, "max_length": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, model: Path) -> tuple[TrlJob, int]:
    """A job of two processes that was killed and resumed, and the step of its resume."""
    job = TrlJob(tmp_path_factory.mktemp("job"), model)
    job.write_data(MESSAGES)
    first = job.start({**LORA, "steps": 100_000, "save_steps": 2})
    try:
        saved = job.folder / "state" / "checkpoint-4" / "complete"
        wait_until(lambda: saved.exists() or first.poll() is not None)
        ranks = psutil.Process(first.pid).children(recursive=True)
        assert len(ranks) == 2
    finally:
        first.kill()
        first.communicate()
    _gone, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    state = job.folder / "state"
    step = max(int(each.parent.name.split("-")[1]) for each in state.glob("*/complete"))
    (state / f"checkpoint-{step + 2}").mkdir(exist_ok=True)  # a save that did not end
    job.run({**LORA, "steps": step + 3, "save_steps": 2}, attempt=2)
    return job, step


def test_two_processes_say_two_and_train_on_different_rows(resumed):
    job, _step = resumed
    for attempt in (1, 2):
        world = job.lines("world", attempt)
        assert [each["rank"] for each in world] == [0, 1]
        assert [each["world_size"] for each in world] == [2, 2]
        assert all(each["rows"] and each["device"].startswith("cpu") for each in world)
        assert world[0]["sha256"] != world[1]["sha256"]


def test_a_killed_job_continues_at_its_newest_complete_checkpoint(resumed):
    job, step = resumed
    first, second = (job.lines("metrics", attempt) for attempt in (1, 2))
    assert [each["step"] for each in first[:step]] == list(range(1, step + 1))
    assert [each["step"] for each in second] == [step + 1, step + 2, step + 3]
    assert all(each["steps"] == step + 3 and each["seconds"] > 0 for each in second)


def test_the_loss_falls(resumed):
    job, _step = resumed
    assert job.values("loss", 2)[-1] < 0.98 * job.values("loss", 1)[0]


def test_the_result_is_an_adapter_that_peft_loads(resumed, model):
    job, _step = resumed
    result = job.folder / "result"
    assert json.loads((result / "adapter_config.json").read_text())["r"] == 4
    base = AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.arange(8)[None]
    before = base(tokens).logits
    trained = PeftModel.from_pretrained(base, result)
    assert (trained(tokens).logits - before).abs().max() > 1e-4


def test_other_starts_than_by_torchrun_with_all_processes_end_with_the_reason(tmp_path, model):
    job = {"configuration": {}, "model": str(model), "folder": str(tmp_path), "attempt": 1}
    (tmp_path / "job.json").write_text(json.dumps({**job, "processes": 2}))
    program = [str(PROGRAM), "--job", str(tmp_path / "job.json")]
    accelerate = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"]
    elastic = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "1", "RANK": "0"}
    starts = {
        "the job has 2 processes, but WORLD_SIZE is 1": ([PYTHON, *program], elastic),
        "torchrun must start this program: accelerate launch ignores PET_*": (
            [PYTHON, *accelerate, *program],
            {},
        ),
    }
    processes = {
        reason: subprocess.Popen(
            argv, env={**os.environ, **more}, text=True, stderr=subprocess.PIPE
        )
        for reason, (argv, more) in starts.items()
    }
    for reason, process in processes.items():
        _none, errors = process.communicate(timeout=120)
        assert process.returncode == 1 and reason in errors, errors


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method, more",
    [
        ("sft", {}),
        ("dpo", {}),
        ("kto", {}),
        ("grpo", {"group_size": 4, "max_completion_length": 8, "reward": "answer_characters"}),
    ],
)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_each_method_trains_adapters_and_whole_models(tmp_path, model, method, more, lora_rank):
    job = TrlJob(tmp_path / "job", model)
    job.write_data(DATA[method], DATA[method][:8])
    values = {"method": method, "learning_rate": 1e-2, "batch_size": 4, "lora_rank": lora_rank}
    job.run({**values, "steps": 4, "eval_steps": 2, **more})
    assert [each["world_size"] for each in job.lines("world")] == [2, 2]
    assert len(job.values("loss")) == 4 and len(job.values("eval_loss")) >= 3
    names = {path.name for path in (job.folder / "result").iterdir()}
    if lora_rank:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    else:
        AutoModelForCausalLM.from_pretrained(job.folder / "result")


@pytest.mark.nightly
def test_a_job_that_dies_after_its_last_step_still_writes_its_result(tmp_path, model):
    job = TrlJob(tmp_path / "job", model)
    job.write_data(MESSAGES, MESSAGES[:4])
    job.run({**LORA, "steps": 3})
    wanted = job.result()
    shutil.rmtree(job.folder / "result")
    job.run({**LORA, "steps": 3}, attempt=2)
    found = job.result()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert len(job.values("loss", 2)) == 0


@pytest.mark.nightly
def test_the_first_loss_and_update_are_those_of_fsdp2(tmp_path, model):
    rows, rate = DATA["sft"][:4], 1e-3
    job = TrlJob(tmp_path / "job", model, processes=1)
    job.write_data(rows)
    same = {"learning_rate": rate, "schedule": "constant", "max_grad_norm": 0}
    job.run({"method": "sft", "batch_size": 4, "steps": 1, **same})

    tokenizer = AutoTokenizer.from_pretrained(model)
    data, completions = [], []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        tokens = [*prompt, *tokenizer(row["completion"] + tokenizer.eos_token)["input_ids"]]
        completions.append(len(tokens) - len(prompt))
        data.append((tokens, len(prompt)))
    operations = make(model, None)
    before = weights(operations)
    output = forward_backward(operations, [_shifted(*one, sum(completions)) for one in data])
    step(operations, lr=rate, decay=0.0)
    after = weights(operations)

    assert output.metrics["loss:sum"] == pytest.approx(job.values("loss")[0], abs=1e-2)
    result = job.result()
    assert result.keys() <= after.keys()
    ours = torch.cat([(after[name] - before[name]).flatten() for name in result])
    theirs = torch.cat([(result[name] - before[name]).flatten() for name in result])
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=0)
    print(f"losses {output.metrics['loss:sum']} {job.values('loss')[0]}, cosine {cosine}")
    assert cosine > 0.99


def _shifted(tokens: list[int], prompt: int, completions: int) -> wire.Datum:
    """Each completion token has an equal weight, as in TRL's mean over a batch's tokens."""
    targets = tokens[1:]
    part = [float(place >= prompt) / completions for place in range(1, len(tokens))]
    return datum(tokens[:-1], targets=targets, weights=part)
