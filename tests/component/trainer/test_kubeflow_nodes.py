"""The nodes of a rendered TrainJob, as two real torchruns on this machine."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tandem.backends.jobs import JobResources
from tandem.backends.kubeflow import REQUEST_ANNOTATION, image_paths
from tests.support.kubeflow import node_variables, of_node, rendered
from tests.support.ports import known_port
from tests.support.trl_configurations import TRL
from tests.support.trl_jobs import DATA, PYTHON, ROOT, TrlJob, needs_trl, write_model

pytestmark = [needs_trl, pytest.mark.nightly]

VALUES = {"method": "sft", "learning_rate": 1e-2, "batch_size": 2, "steps": 4, "lora_rank": 4}


def test_two_nodes_of_a_trainjob_train_as_two_processes_of_one_node(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    one, two = (TrlJob(tmp_path / name, model) for name in ("one node", "two nodes"))
    for job in (one, two):
        job.write_data(DATA["sft"])
    one.run(VALUES)
    run_nodes(two)
    world = two.lines("world")
    assert [(each["rank"], each["world_size"]) for each in world] == [(0, 2), (1, 2)]
    assert world[0]["sha256"] != world[1]["sha256"]
    assert world == one.lines("world")
    metrics = [
        [(line["step"], line["values"]) for line in job.lines("metrics")] for job in (one, two)
    ]
    assert metrics[0] == metrics[1]
    assert len(two.values("loss")) == 4
    expected, result = one.result(), two.result()
    assert expected.keys() == result.keys()
    assert all(expected[name].equal(tensor) for name, tensor in result.items())


def run_nodes(job: TrlJob) -> None:
    """Run both nodes of the job's TrainJob, each with the variables of Kubeflow's trainer."""
    _runtime, trainjob = rendered(VALUES, JobResources(processes=1, nodes=2))
    trainer = trainjob["spec"]["trainer"]
    patch = of_node(trainjob["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"])
    request = patch["spec"]["template"]["metadata"]["annotations"][REQUEST_ANNOTATION]
    (job.folder / "job.json").write_text(here(request, job))
    argv = [here(word, job) for word in (*trainer["command"], *trainer["args"])]
    own = {each["name"]: here(each["value"], job) for each in trainer["env"]}
    port, nodes, logs = known_port(), list[subprocess.Popen[bytes]](), list[Path]()
    try:
        for number in range(trainer["numNodes"]):
            more = node_variables(trainer, number, port=port) | {"OMP_NUM_THREADS": "1"}
            logs.append(job.folder / f"node-{number}.log")
            with logs[-1].open("wb") as log:
                node = subprocess.Popen(
                    argv, env=os.environ | own | more, cwd=job.folder, stdout=log, stderr=log
                )
            nodes.append(node)
        ended = [node.wait(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert ended == [0, 0], [log.read_text()[-3000:] for log in logs]


def here(text: str, job: TrlJob) -> str:
    """Return a text of the TrainJob with the paths of this machine."""
    there = image_paths(TRL)
    places = {
        there.python: str(PYTHON),
        there.program: str(ROOT / "trainer_service" / "jobs" / "trl"),
        there.model: str(job.model),
        there.folder: str(job.folder),
    }
    return re.sub("|".join(map(re.escape, places)), lambda found: places[found[0]], text)
