"""The use of a worker's processes as metrics, `tandem_worker_*`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.protocol.process_use import ProcessUse


class UseCollector(Collector):
    """Reads `use` at each scrape. A worker without a device has 0 in the metrics of devices."""

    def __init__(self, use: Callable[[], ProcessUse]) -> None:
        self._use = use

    def collect(self) -> Iterator[Metric]:
        use = self._use()
        for name, text, total in (
            ("cpu_seconds", "Seconds of computing by all processes.", use.cpu_seconds),
            ("gpu_seconds", "Utilisation of its devices (0 to 1) times seconds.", use.gpu_seconds),
        ):
            yield CounterMetricFamily(f"tandem_worker_{name}", text, value=total or 0.0)
        for name, text, value in (
            ("memory_bytes", "Resident bytes of all processes.", use.memory_bytes),
            ("gpu_memory_bytes", "Bytes on its devices, 0 if unknown.", use.gpu_bytes),
            ("gpu_peak_ratio", "Largest utilisation of its devices so far.", use.gpu_peak),
        ):
            yield GaugeMetricFamily(f"tandem_worker_{name}", text, value=value or 0.0)
