"""Torch's store, where ranks meet."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from tandem.errors import WorkerStartFailed
from tandem.protocol.worker import LOOPBACK
from trainer_service.compute import process_group
from trainer_service.compute.process_group import reach_store, serve_store

SHORT = timedelta(seconds=2)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_reads_what_rank_0_wrote(nodes):
    store, port = serve_store(ranks=2, nodes=nodes)
    store.set("key", "value")
    assert reach_store(LOOPBACK, port, rank=1).get("key") == b"value"


def test_stores_that_are_served_at_once_have_ports_of_their_own():
    stores = [serve_store(ranks=2, nodes=nodes) for nodes in (1, 2) * 4]
    assert len({port for _, port in stores}) == len(stores)


def test_the_store_of_one_node_is_reached_by_this_host_alone():
    """All of 127.0.0.0/8 is this host: 127.0.0.2 is another of its addresses."""
    for nodes, found in ((1, False), (2, True)):
        _store, port = serve_store(ranks=2, nodes=nodes)
        with socket.socket() as client:
            assert (client.connect_ex(("127.0.0.2", port)) == 0) is found


def test_a_store_that_refuses_connections_ends_the_start_with_its_address():
    with socket.socket() as silent:
        silent.bind((LOOPBACK, 0))  # reserves the port, without a listener
        port = silent.getsockname()[1]
        with pytest.raises(WorkerStartFailed) as caught:
            reach_store(LOOPBACK, port, rank=3, timeout=SHORT)
    assert caught.value.message.startswith(
        f"rank 3 did not reach rank 0's store at {LOOPBACK}:{port} within 2 s: the nodes of a "
    )


def test_a_store_that_accepts_and_does_not_answer_ends_the_start(monkeypatch):
    monkeypatch.setattr(process_group, "_ANSWER_SECONDS", 0.5)
    with socket.create_server((LOOPBACK, 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(WorkerStartFailed, match=f"rank 1 did not reach .*:{port} within 2 s"):
            reach_store(LOOPBACK, port, rank=1, timeout=SHORT)


def test_a_store_whose_host_has_no_address_ends_the_start_with_its_name():
    with pytest.raises(WorkerStartFailed, match=r"rank 1 did not reach .* nowhere\.invalid:29500"):
        reach_store("nowhere.invalid", 29500, rank=1, timeout=SHORT)
