"""The weight versions behind the tokens of in-flight samples. A run of tokens takes 12 bytes,
because one request may have thousands of samples."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.v1 import sampler_pb2

_MOST_RUNS = 4_000_000


@dataclass(frozen=True, slots=True)
class VersionRun:
    """Consecutive tokens from one weight version of an optimizer step."""

    version: str
    step: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _SampledRequest:
    """`runs` has three numbers per run: sample, version, tokens."""

    samples: int
    versions: tuple[tuple[str, int], ...]
    runs: array[int]


class RememberedVersions:
    """Keeps the newest requests, `most_runs` runs of tokens in all."""

    def __init__(self, *, most_runs: int = _MOST_RUNS) -> None:
        self._most = 3 * most_runs
        self._numbers = 0
        self._requests: OrderedDict[str, _SampledRequest] = OrderedDict()

    def remember(self, request_id: str, samples: Iterable[sampler_pb2.SampleVersions]) -> None:
        self._forget(request_id)
        versions: dict[tuple[str, int], int] = {}
        runs = array("i")
        number = 0
        for number, sample in enumerate(samples, start=1):
            for run in sample.runs:
                version = versions.setdefault((run.version, run.step), len(versions))
                runs.extend((number - 1, version, run.tokens))
        self._requests[request_id] = _SampledRequest(number, tuple(versions), runs)
        self._numbers += len(runs)
        while self._numbers > self._most and len(self._requests) > 1:
            self._forget(next(iter(self._requests)))

    def find(self, request_id: str) -> list[list[VersionRun]] | None:
        request = self._requests.get(request_id)
        if request is None:
            return None
        found: list[list[VersionRun]] = [[] for _ in range(request.samples)]
        numbers = iter(request.runs)
        for sample, version, tokens in zip(numbers, numbers, numbers, strict=True):
            found[sample].append(VersionRun(*request.versions[version], tokens))
        return found

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        self._numbers -= len(request.runs) if request is not None else 0
