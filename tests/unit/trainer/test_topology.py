"""On which nodes a trainer's ranks are."""

from __future__ import annotations

import pytest

from tandem.errors import WorkerStartFailed
from tandem.worker import WorkerSpec
from tandem.worker_settings import TrainerSettings
from trainer_service.compute.topology import Topology, topology_of


def topology(*, nodes: int = 2, rendezvous: str = "", first: bool = False, **environment: object):
    spec = WorkerSpec(
        worker_id="t",
        kind="trainer",
        secret="s",
        model_name="m",
        model_path="m",
        session_id="s",
        nodes=nodes,
        rendezvous=rendezvous,
        trainer=TrainerSettings(ranks=4),
    )
    said = {name: str(value) for name, value in environment.items()}
    return topology_of(spec, said, first=first)


PET = {
    "PET_NNODES": 2,
    "PET_NODE_RANK": 1,
    "PET_NPROC_PER_NODE": 2,
    "PET_MASTER_ADDR": "trainer-0",
    "PET_MASTER_PORT": 29400,
}
# What Kubeflow's PyTorchJob sets: RANK is the number of the pod, WORLD_SIZE that of all ranks.
PYTORCH_JOB = {
    **PET,
    "MASTER_ADDR": "trainer-0",
    "MASTER_PORT": 29400,
    "RANK": 1,
    "WORLD_SIZE": 4,
}
# What torchrun sets for one process on each of two nodes.
TORCHRUN = {
    "MASTER_ADDR": "trainer-0",
    "MASTER_PORT": 29400,
    "RANK": 1,
    "WORLD_SIZE": 2,
    "LOCAL_RANK": 0,
    "LOCAL_WORLD_SIZE": 1,
    "GROUP_RANK": 1,
}
SECOND = Topology(nodes=2, node=1, ranks=4, host="trainer-0", port=29400)


def test_ranks_are_divided_among_nodes_in_order():
    assert (SECOND.local, SECOND.of(0)) == (range(2, 4), range(2))
    assert [SECOND.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("environment", [PET, PYTORCH_JOB, TORCHRUN])
@pytest.mark.parametrize("nodes", [0, 2], ids=["open", "specified"])
def test_what_starters_say_is_understood(environment, nodes):
    assert topology(nodes=nodes, **environment) == SECOND


def test_a_trainer_of_one_node_does_not_ask_the_environment():
    assert topology(nodes=1, **PET) == Topology(nodes=1, node=0, ranks=4)


def test_a_specification_that_leaves_the_nodes_open_means_one_if_nothing_is_said():
    assert topology(nodes=0, first=True) == Topology(nodes=1, node=0, ranks=4)


def test_the_rendezvous_of_the_specification_comes_first():
    assert topology(rendezvous="[fd00::7]:29500", **PET).host == "fd00::7"


def test_our_own_number_of_the_node_comes_first_and_that_of_a_job_last():
    where = {"rendezvous": "trainer:29500"}
    assert topology(TANDEM_NODE_RANK=1, JOB_COMPLETION_INDEX=0, RANK=0, **where).node == 1
    assert topology(JOB_COMPLETION_INDEX=1, **where).node == 1
    assert topology(JOB_COMPLETION_INDEX=0, PET_NODE_RANK=1, **where).node == 1


def test_the_first_of_several_processes_on_each_node_gives_the_node_its_number():
    said = {**TORCHRUN, "RANK": 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    assert topology(**said) == SECOND


def test_node_0_may_go_without_its_number_and_the_others_may_not():
    assert topology(rendezvous="trainer:29500", first=True).node == 0
    with pytest.raises(WorkerStartFailed, match="which of 2 nodes this is, is not said: set TAND"):
        topology(rendezvous="trainer:29500")


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"PET_NNODES": 3}, "has 2 nodes with 2 ranks each, and PET_NNODES is 3"),
        ({"PET_NNODES": "1:2"}, "PET_NNODES is 1:2: the number of nodes must be fixed"),
        ({"PET_NPROC_PER_NODE": 8}, "with 2 ranks each, and PET_NPROC_PER_NODE is 8"),
        ({"WORLD_SIZE": 16}, "and WORLD_SIZE is 16"),
        ({"LOCAL_RANK": 1}, "LOCAL_RANK is 1: start one process on each node"),
        ({"GROUP_RANK": 0}, "more than one node: PET_NODE_RANK says 1, GROUP_RANK says 0"),
        ({"PET_NODE_RANK": 2}, "there is no node 2: of 2, the last is 1"),
        ({"PET_NODE_RANK": "one"}, "PET_NODE_RANK is 'one', not a number"),
        (
            {"MASTER_ADDR": "other", "MASTER_PORT": 29400},
            "more than one rendezvous: PET_MASTER_ADDR with PET_MASTER_PORT says",
        ),
        ({"PET_MASTER_PORT": ""}, "where node 0 is reached is not said"),
    ],
)
def test_what_contradicts_itself_or_is_missing_is_refused(environment, sentence):
    with pytest.raises(WorkerStartFailed, match=sentence):
        topology(**{**PET, **environment})


def test_a_number_of_processes_that_is_not_one_says_nothing():
    assert topology(**{**PET, "PET_NPROC_PER_NODE": "auto"}) == SECOND


@pytest.mark.parametrize(
    ("nodes", "rendezvous", "sentence"),
    [
        (3, "trainer:29500", "4 ranks cannot be divided equally among 3 nodes"),
        (2, "trainer", "the rendezvous 'trainer' is not of the form HOST:PORT"),
    ],
)
def test_a_specification_that_cannot_be_is_refused(nodes, rendezvous, sentence):
    with pytest.raises(WorkerStartFailed, match=sentence):
        topology(nodes=nodes, rendezvous=rendezvous, TANDEM_NODE_RANK=1)
