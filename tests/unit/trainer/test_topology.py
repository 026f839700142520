from __future__ import annotations

import pytest

from tandem.errors import WorkerStartFailed
from tandem.protocol.worker import WorkerSpec
from tandem.settings.workers import TrainerSettings
from trainer_service.compute.topology import Topology, node_number, topology_of


def topology(*, node: int = 1, nodes: int = 2, rendezvous: str = "trainer-0:29400") -> Topology:
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
    return topology_of(spec, node=node)


def test_ranks_are_divided_among_nodes_in_order():
    second = topology()
    assert second == Topology(nodes=2, node=1, ranks=4, host="trainer-0", port=29400)
    assert (second.local, second.ranks_of(0)) == (range(2, 4), range(2))
    assert [second.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_a_trainer_of_one_node_needs_no_rendezvous():
    assert topology(nodes=1, node=0, rendezvous="") == Topology(nodes=1, node=0, ranks=4)


def test_the_host_of_a_rendezvous_may_be_an_address_of_ipv6():
    assert topology(rendezvous="[fd00::7]:29500").host == "fd00::7"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"nodes": 3}, "4 ranks cannot be divided equally among 3 nodes"),
        ({"node": 2}, "there is no node 2: of 2, the last is 1"),
        ({"rendezvous": "trainer"}, "the rendezvous 'trainer' is not of the form HOST:PORT"),
        ({"rendezvous": ""}, "the rendezvous '' is not of the form HOST:PORT"),
    ],
)
def test_a_specification_that_cannot_be_is_refused(changes, sentence):
    with pytest.raises(WorkerStartFailed, match=sentence):
        topology(**changes)


def test_a_node_is_told_its_number_by_its_environment():
    assert node_number({"TANDEM_NODE_RANK": "3"}) == 3


@pytest.mark.parametrize(
    "environment", [{}, *({"TANDEM_NODE_RANK": n} for n in ("0", "one", "-1"))]
)
def test_a_node_other_than_0_needs_its_number(environment):
    with pytest.raises(WorkerStartFailed, match=r"TANDEM_NODE_RANK is '.*': set the node"):
        node_number(environment)
