"""Trainers over several hosts, in two network namespaces."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tandem.agent.worker_process import group_members, kill_group
from tandem.protocol.authority import Authority
from tandem.protocol.certificate import Certificate
from tandem.protocol.worker import Layout, TrainingSpec, WorkerReport, WorkerSpec
from tandem.settings.workers import TrainerSettings
from tandem.weights import open_version
from tests.support import failing_ranks
from tests.support.hosts import Host, two_hosts
from tests.support.tiny_model import VOCABULARY
from tests.support.trainer_worker import TrainerClient, datum, request, trainer_process
from tests.support.waiting import wait_until
from tests.support.worker_process import CALL_SECONDS, RUN, SECRET, SESSION, worker_process
from trainer_service.service.node_connection import Hello, Message, Peer, connect

pytestmark = pytest.mark.slow

PORT = 29500
COPY_ON_EACH = TrainingSpec(layout=Layout(replicas=2))
"""The gateways' usual layout: only gradients travel between nodes."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Certificate:
    folder = tmp_path_factory.mktemp("tls") / "authority"
    return Authority.create(folder).issue("trainer-test")


@dataclass
class TwoNodes:
    """Node 0, by gRPC, and node 1, as a process."""

    client: TrainerClient
    member: subprocess.Popen[bytes]

    def ranks_of_member(self) -> set[int]:
        return set(group_members(self.member.pid)) - {self.member.pid}

    def last_report(self) -> WorkerReport:
        """The reason of the end, once both hosts have no process left."""
        report = self.client.next_report()
        assert self.client.process.wait(timeout=CALL_SECONDS) == 1
        assert self.member.wait(timeout=CALL_SECONDS) != 0
        for group in (self.client.process.pid, self.member.pid):
            wait_until(lambda group=group: not group_members(group))
        return report


def specification(
    model: Path, host: Host, tls: Certificate, *, ranks: int, **settings: object
) -> WorkerSpec:
    return WorkerSpec(
        worker_id="trainer-test",
        kind="trainer",
        secret=SECRET,
        model_name="tiny",
        model_path=str(model),
        session_id=SESSION,
        run_id=RUN,
        training=COPY_ON_EACH,
        nodes=2,
        rendezvous=f"{host.address}:{PORT}",
        host=host.from_test,
        tls=tls,
        trainer=TrainerSettings(ranks=ranks, device="cpu", threads=1, **settings),
    )


@contextmanager
def node_1(spec: WorkerSpec, host: Host, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    file = folder / "spec.json"
    file.write_text(spec.model_dump_json())
    files = ["--spec-file", str(file), "--report-file", str(folder / "report")]
    process = subprocess.Popen(
        [*host.prefix, sys.executable, "-m", "trainer_service.node", *files],
        env={**os.environ, "TANDEM_NODE_RANK": "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_group(process.pid)
        process.wait(timeout=CALL_SECONDS)


@contextmanager
def two_nodes(
    hosts: tuple[Host, Host],
    model: Path,
    tls: Certificate,
    folder: Path,
    *,
    ranks: int = 2,
    **settings: object,
) -> Iterator[TwoNodes]:
    here, there = hosts
    spec = specification(model, here, tls, ranks=ranks, **settings)
    with (
        worker_process(spec, prefix=here.prefix) as started,
        node_1(spec, there, folder) as member,
        TrainerClient(started) as client,
    ):
        client.wait_until_serving()
        yield TwoNodes(client, member)


def answer_to(hello: Hello, address: tuple[str, int]) -> str:
    """Node 0's reason to refuse another node."""
    connection = connect(*address, node=hello.node, until=time.monotonic())
    peer = Peer(connection, name="node 0", patience=CALL_SECONDS)
    peer.send(Message(kind="hello", hello=hello))
    with closing(peer):
        return peer.receive().text


def mixed_data(seed: int):
    rng = np.random.default_rng(seed)
    return [
        datum(rng.integers(0, VOCABULARY, length).tolist(), weights=rng.uniform(0, 1, length))
        for length in rng.integers(2, 20, 9)
    ]


def train(client: TrainerClient, *, steps: range) -> None:
    for step in steps:
        client.output(request(mixed_data(step)))
        assert not client.optim_step(lr=1e-2).HasField("failure")


def published(client: TrainerClient, folder: Path) -> dict[str, torch.Tensor]:
    reply, path = client.publish(folder)
    assert not reply.HasField("failure"), reply.failure
    open_version(path, name=reply.version.name)
    assert len(list(path.glob("model-*.safetensors"))) == 4
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


def test_strangers_are_refused_and_two_nodes_compute_what_one_does_bit_for_bit(
    hosts, model, tls, tmp_path
):
    here, there = hosts
    settings = {"ranks": 4, "shard_group_parameters": 1, "micro_batch_tokens": 40}
    spec = specification(model, here, tls, **settings)
    with worker_process(spec, prefix=here.prefix) as started, TrainerClient(started) as client:
        address = (here.from_test, PORT)
        with closing(socket.create_connection(address)) as rude:
            rude.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
        as_node_1 = Hello(worker_id="trainer-test", node=1, nodes=2, ranks=4, interface="lo")
        for other, reason in (
            ({"nodes": 3}, "node 1 counts 3 nodes with 4 ranks in all, and node 0 2 with 4"),
            ({"ranks": 8}, "node 1 counts 2 nodes with 8 ranks in all, and node 0 2 with 4"),
            ({"node": 2}, "there is no node 2"),
            ({"worker_id": "trainer-other"}, "node 1 belongs to the worker trainer-other"),
        ):
            assert answer_to(as_node_1.model_copy(update=other), address) == reason
        silent = [socket.create_connection(address) for _ in range(100)]
        with node_1(spec, there, tmp_path) as member:
            client.wait_until_serving()
            assert answer_to(as_node_1, address) == "there is a node 1 already"
            train(client, steps=range(2))
            assert not client.save(tmp_path / "checkpoint").HasField("failure")
            snapshot = client.take_snapshot(str(tmp_path / "snapshot"))
            assert (snapshot.step, snapshot.HasField("failure")) == (2, False)
            train(client, steps=range(2, 4))
            final = published(client, tmp_path / "two")
            for path in ("checkpoint", "snapshot"):
                loaded = client.load(tmp_path / path, optimizer=True)
                assert (loaded.step, loaded.HasField("failure")) == (2, False)
                train(client, steps=range(2, 4))
                again = published(client, tmp_path / f"again-{path}")
                assert all(torch.equal(final[name], again[name]) for name in final)
            client.process.send_signal(signal.SIGTERM)
            assert client.process.wait(timeout=CALL_SECONDS) == 0
            assert member.wait(timeout=CALL_SECONDS) == 0
            wait_until(lambda: not group_members(member.pid))
        for connection in silent:
            connection.close()
    with trainer_process(model, tmp_path, training=COPY_ON_EACH, **settings) as one_host:
        train(one_host, steps=range(4))
        alone = published(one_host, tmp_path / "one")
    assert alone.keys() == final.keys()
    assert all(torch.equal(alone[name], final[name]) for name in alone)


def test_a_killed_rank_of_another_node_is_named(hosts, model, tls, tmp_path):
    with two_nodes(hosts, model, tls, tmp_path, ranks=4) as trainer:
        train(trainer.client, steps=range(1))
        os.kill(max(trainer.ranks_of_member()), signal.SIGKILL)
        report = trainer.last_report()
        assert report.error_type == "worker_died"
        assert report.error in [f"rank {r} on node 1 was killed by SIGKILL" for r in (2, 3)]
        of_node_1 = WorkerReport.model_validate_json((tmp_path / "report").read_bytes())
        assert of_node_1.error == f"node 0 ended: {report.error}"


def test_an_error_in_a_rank_of_another_node_is_told_with_the_node(
    hosts, model, tls, tmp_path, monkeypatch
):
    failing_ranks.install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    patient = {"backend": "fails_in_forward", "collective_timeout": 20 * CALL_SECONDS}
    with two_nodes(hosts, model, tls, tmp_path, ranks=4, **patient) as trainer:
        with pytest.raises(grpc.RpcError) as caught:
            trainer.client.forward_backward(request(mixed_data(0)))
        report = trainer.last_report()
        assert report.error_type == "worker_died"
        assert report.error == caught.value.details()
        assert report.error.startswith("rank 3 on node 1 failed: AssertionError (traceback: ")
        assert "failing_ranks.py" in report.error
        assert "caused by KeyError: 'of the datum'" in report.error


def test_a_killed_node_is_named(hosts, model, tls, tmp_path):
    with two_nodes(hosts, model, tls, tmp_path) as trainer:
        trainer.member.kill()
        assert trainer.last_report().error == ("node 1 (rank 1) is gone: its connection was closed")


def test_a_node_that_is_told_to_end_says_so(hosts, model, tls, tmp_path):
    with two_nodes(hosts, model, tls, tmp_path) as trainer:
        trainer.member.terminate()
        report = trainer.client.next_report()
        assert report.error == "node 1 (rank 1) ended: it was stopped by SIGTERM"
        assert trainer.member.wait(timeout=CALL_SECONDS) == 0


def test_when_node_0_is_killed_the_other_node_ends_with_its_ranks(hosts, model, tls, tmp_path):
    with two_nodes(hosts, model, tls, tmp_path) as trainer:
        trainer.client.process.kill()
        assert trainer.member.wait(timeout=CALL_SECONDS) == 1
        wait_until(lambda: not group_members(trainer.member.pid))


def test_a_stopped_node_is_told_though_there_is_nothing_to_do(hosts, model, tls, tmp_path):
    with two_nodes(hosts, model, tls, tmp_path, collective_timeout=20.0) as trainer:
        os.killpg(trainer.member.pid, signal.SIGSTOP)
        report = trainer.client.next_report()
        assert report.error.startswith("node 1 (rank 1) was not heard of for 10 s")
        assert trainer.client.process.wait(timeout=CALL_SECONDS) == 1
        os.killpg(trainer.member.pid, signal.SIGCONT)
        assert trainer.member.wait(timeout=CALL_SECONDS) == 1


def test_a_stopped_rank_of_another_node_ends_the_operation_at_the_collective_timeout(
    hosts, model, tls, tmp_path
):
    with two_nodes(hosts, model, tls, tmp_path, collective_timeout=10.0) as trainer:
        (rank_1,) = trainer.ranks_of_member()
        os.kill(rank_1, signal.SIGSTOP)
        with pytest.raises(grpc.RpcError, match="imed out"):
            trainer.client.forward_backward(request(mixed_data(0)))
        assert trainer.last_report().error_type == "worker_died"


def test_nodes_end_on_both_sides_of_a_network_that_is_down(model, tls, tmp_path):
    with (
        two_hosts() as hosts,
        two_nodes(hosts, model, tls, tmp_path, collective_timeout=20.0) as trainer,
    ):
        hosts[0].unplug()
        with pytest.raises(grpc.RpcError, match=r"node 1 \(rank 1\) was not heard of for 10 s"):
            trainer.client.forward_backward(request(mixed_data(0)))
        assert trainer.last_report().error_type == "worker_died"


def test_a_node_that_does_not_come_is_named(hosts, model, tls):
    spec = specification(model, hosts[0], tls, ranks=2).model_copy(update={"start_timeout": 2.0})
    with worker_process(spec, prefix=hosts[0].prefix) as started:
        report = WorkerReport.model_validate_json(started.reports.readline())
        assert report.error_type == "worker_start_failed"
        assert report.error == f"of 2 nodes, 1 did not come to {spec.rendezvous} within 2 s"
        assert started.process.wait(timeout=CALL_SECONDS) == 1
