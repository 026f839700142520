"""`tandem train --render trainjob`, without a gateway."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from tandem.backends.jobs import JobResources
from tandem.cli.main import main
from tests.support.kubeflow import rendered

ARGUMENTS = (
    "train trl-sft --render trainjob --model s3://models/tiny --data hf://someone/sums "
    "--image registry.example.org/tandem-trl:0.2.0 "
    "--initializers registry.example.org/kubeflow/trainer "
)


def command(capsys, monkeypatch, more: str, arguments: str = ARGUMENTS) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["tandem", *shlex.split(arguments + more)])
    with pytest.raises(SystemExit) as ended:
        main()
    done = capsys.readouterr()
    return int(ended.value.code or 0), done.out, done.err


def test_it_writes_the_runtime_and_the_trainjob(capsys, monkeypatch):
    options = "--name sums --set learning_rate=1e-4 --set schedule=cosine --processes 2 --nodes 2"
    expected = rendered(
        {"method": "sft", "learning_rate": 1e-4, "schedule": "cosine"},
        JobResources(processes=2, nodes=2, device="cuda"),
    )
    status, out, err = command(capsys, monkeypatch, options)
    assert (status, err, tuple(yaml.safe_load_all(out))) == (0, "", expected)
    status, out, _err = command(capsys, monkeypatch, f"{options} --json")
    assert (status, tuple(json.loads(out))) == (0, expected)


def test_a_job_on_cores_needs_no_gpu(capsys, monkeypatch):
    _status, out, _err = command(capsys, monkeypatch, "--name sums --device cpu")
    assert tuple(yaml.safe_load_all(out)) == rendered({"method": "sft"})


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--priority 3", "--priority is for Tandem's own queue"),
        ("--deadline 60", "--deadline is for Tandem's own queue"),
        ("--follow", "--follow is for Tandem's own queue"),
        ("--name Sums", "'Sums' is no name of a TrainJob"),
        ("--set lora_rank=-1", "lora_rank: Input should be greater than or equal to 0"),
        ("--model tiny", "model is 'tiny', and Kubeflow downloads"),
        ("--image ''", "--render needs --image"),
        ("--initializers ''", "--render needs --initializers"),
    ],
)
def test_an_option_that_kubeflow_cannot_serve_is_refused(capsys, monkeypatch, more, sentence):
    status, out, err = command(capsys, monkeypatch, more)
    assert (status != 0, out) == (True, "")
    assert sentence in " ".join(err.split())


def test_a_step_backend_is_refused_with_the_job_backends(capsys, monkeypatch):
    arguments = ARGUMENTS.replace("trl-sft", "fsdp2")
    status, out, err = command(capsys, monkeypatch, "", arguments)
    assert (status != 0, out) == (True, "")
    assert "'fsdp2' is no job backend; known: trl" in " ".join(err.split())


@pytest.mark.parametrize("option", ["--image x", "--initializers x", "--nodes 2", "--device cpu"])
def test_an_option_of_rendering_needs_it(capsys, monkeypatch, option):
    arguments = "train trl-sft --model tiny --data rows.jsonl "
    status, _out, err = command(capsys, monkeypatch, option, arguments)
    assert status != 0
    assert "--image, --initializers, --nodes and --device are for --render" in err
