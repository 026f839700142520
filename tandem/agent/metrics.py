"""The agent's metrics, `tandem_agent_*`, and the ports of its workers' metrics.

An agent at HOST:PORT serves its metrics at PORT + 1. An agent without an address chooses a port on
loopback, names it in a file, and takes it again the next time. Its workers take the ports above."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

import prometheus_client
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.agent.host import free_memory_bytes
from tandem.errors import describe
from tandem.protocol.metrics_server import MetricsServer
from tandem.protocol.worker import LOOPBACK
from tandem.telemetry import get_log

_MOST_WORKER_PORTS = 256
_LARGEST_PORT = 2**16 - 1


def metrics_address_of(address: str) -> str:
    """Return the metrics' HOST:PORT of an agent that listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


def local_metrics_address(data_dir: Path) -> str:
    """Return the metrics' HOST:PORT of the data directory's agent, or ""."""
    port = _port_in(_file(data_dir))
    return f"{LOOPBACK}:{port}" if port else ""


def worker_port(base: int, used: Collection[int]) -> int:
    """Return the smallest unused port above the agent's metrics port `base`, or 0 for any."""
    ports = range(base + 1, min(base + _MOST_WORKER_PORTS, _LARGEST_PORT) + 1) if base else ()
    return next((port for port in ports if port not in used), 0)


class AgentMetrics:
    """Serves metrics in a thread. `kinds` returns the kind of each running worker."""

    def __init__(self, *, data_dir: Path, logs: Path, kinds: Callable[[], Iterator[str]]) -> None:
        self._file = _file(data_dir)
        registry = prometheus_client.CollectorRegistry()
        registry.register(_HostGauges(folders=(data_dir, logs), kinds=kinds))
        prometheus_client.ProcessCollector(registry=registry)
        self._registry = registry
        self.worker_exits = prometheus_client.Counter(
            "tandem_agent_worker_exits",
            "Workers that ended by themselves.",
            ["kind"],
            registry=registry,
        )

    def serve_agent(self, address: str) -> int:
        """Serve beside an agent at this address, or on loopback for "". Return the port, 0 if it
        is taken."""
        if not address:
            server = MetricsServer(self._registry, host=LOOPBACK)
            port = server.serve_metrics(port=_port_in(self._file), or_any=True)
            with suppress(OSError):  # a full disk costs metrics, not the agent
                self._file.write_text(str(port))
            return port
        host, _, number = metrics_address_of(address).rpartition(":")
        try:
            server = MetricsServer(self._registry, host=host.strip("[]"))
            return server.serve_metrics(port=int(number))
        except (OSError, OverflowError) as error:  # also a port above 65535
            get_log().warning("no_agent_metrics", port=int(number), reason=describe(error))
            return 0


class _HostGauges(Collector):
    def __init__(self, *, folders: tuple[Path, ...], kinds: Callable[[], Iterator[str]]) -> None:
        self._folders = folders
        self._kinds = kinds

    def collect(self) -> Iterator[GaugeMetricFamily]:
        workers = GaugeMetricFamily("tandem_agent_workers", "Running workers.", labels=["kind"])
        for kind, count in Counter({"trainer": 0, "sampler": 0} | Counter(self._kinds())).items():
            workers.add_metric([kind], count)
        yield workers
        yield GaugeMetricFamily(
            "tandem_agent_free_memory_bytes",
            "Free memory of the host, within a container's limit.",
            value=free_memory_bytes(),
        )
        free = GaugeMetricFamily(
            "tandem_agent_free_disk_bytes", "Free bytes for data and logs.", labels=["folder"]
        )
        for name, folder in zip(("data", "logs"), self._folders, strict=True):
            with suppress(OSError):
                free.add_metric([name], shutil.disk_usage(folder).free)
        yield free


def _file(data_dir: Path) -> Path:
    return data_dir / "agent.metrics"


def _port_in(file: Path) -> int:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return 0
