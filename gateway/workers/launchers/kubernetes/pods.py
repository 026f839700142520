"""Interprets a pod's state for its worker, in a sentence.

The stages are `unscheduled` → `preparing` (`pulling` while that fails) → `running` → `ended`.
`worker` has their deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from gateway.workers.launchers.kubernetes.observed import (
    Container,
    Event,
    Pod,
    Terminated,
)
from tandem.errors import without_paths
from tandem.protocol.worker import WorkerKind, WorkerReport

Stage = Literal["unscheduled", "pulling", "preparing", "running", "ended"]

_PULLS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "RegistryUnavailable",
    "ImageInspectError",
    "SignatureValidationFailed",
)
_NOT_MADE = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}
_SIGNALS |= {15: "SIGTERM"}
_CRASHES = (4, 6, 7, 8, 11)
_NOT_STARTED = ("ContainerCannotRun", "StartError")
_TOLD = (
    "FailedPrepareDynamicResources",
    "FailedMount",
    "FailedAttachVolume",
    "FailedCreatePodSandBox",
    "FailedToRetrieveImagePullSecret",
)
_WENT_ON = ("Pulling", "Pulled", "Created", "Started")
_LONGEST = 600
_MEMORY: dict[WorkerKind, str] = {
    "trainer": "tandem.host_memory",
    "sampler": "tandem.sampler_host_memory",
    "job": "--host-memory",
}
"""The option with the memory of a worker's pod."""


@dataclass(frozen=True)
class PodState:
    """`says` is the reason for waiting or ending. `hopeless`: waiting will not help."""

    stage: Stage
    says: str = ""
    hopeless: bool = False
    crashed: bool = False
    """A fault in native code ended it."""
    from_outside: bool = False
    """The node, the control plane or a signal ended it. Among pods that ended together, such a pod
    has the cause."""
    explained: bool = True
    """Whether `says` has the cause. Otherwise the log may have it."""


def state_of(pod: Pod, *, kind: WorkerKind, container: str) -> PodState:
    """Return a pod's state. `container` is the worker; other containers are an administrator's."""
    status = pod.status
    worker = next((each for each in status.container_statuses if each.name == container), None)
    if worker is not None and (end := worker.state.terminated) is not None:
        return _ended(pod, end, kind, container)
    if status.phase in ("Failed", "Succeeded"):
        return PodState("ended", _why_failed(pod, kind), from_outside=True)
    if not pod.scheduled:
        return _unscheduled(pod)
    if worker is not None and worker.state.running is not None:
        return PodState("running", why_lost(pod) if node_is_lost(pod) else "")
    for each in (*status.init_container_statuses, *status.container_statuses):
        if (state := _waiting(each)) is not None:
            return state
    return PodState("preparing", f"its container is made ready on {pod.spec.node_name}")


def node_is_lost(pod: Pod) -> bool:
    """Return whether the pod's node is lost: the pod is not ready, but the node's last report says
    that its containers are."""
    if pod.status.reason == "NodeLost":
        return True
    ready, containers = pod.condition("Ready"), pod.condition("ContainersReady")
    return (
        ready is not None
        and containers is not None
        and ready.status != "True"
        and containers.status == "True"
        and ready.reason not in ("ReadinessGatesNotReady",)
    )


def runs(pod: Pod) -> bool:
    """Return whether a container runs, according to the node."""
    return any(each.state.running is not None for each in pod.status.container_statuses)


def why_lost(pod: Pod) -> str:
    return f"its node {pod.spec.node_name} does not answer the control plane"


def why_deleted(pod: Pod, *, kind: WorkerKind) -> str:
    cause = pod.condition("DisruptionTarget")
    if cause is not None and cause.status == "True":
        return f"the {kind}'s pod was taken away: {_joined(cause.reason, cause.message)}"
    if node_is_lost(pod):
        return f"the {kind}'s pod was deleted: {why_lost(pod)}"
    return f"the {kind}'s pod was deleted, not by the gateway"


def told_by_events(events: Sequence[Event]) -> str:
    """Return the newest warning about a starting pod, "" if the start went on after it. The cluster
    keeps events for an hour."""
    told = [each for each in events if each.reason in (*_TOLD, *_WENT_ON)]
    newest = max(told, key=lambda each: (each.at, each.reason in _WENT_ON), default=None)
    if newest is None or newest.reason in _WENT_ON:
        return ""
    return _joined(newest.reason, newest.message)


def _unscheduled(pod: Pod) -> PodState:
    condition = pod.condition("PodScheduled")
    if condition is None:  # the caller knows about its claim
        return PodState("unscheduled", "the scheduler has not looked at it yet")
    said = _joined(condition.reason, condition.message)
    if condition.reason == "SchedulerError":
        # Also reported for pods that reached one claim together. The scheduler retries them.
        return PodState("unscheduled", said, hopeless="CEL" in condition.message)
    return PodState("unscheduled", f"it is not scheduled: {said}")


def _waiting(container: Container) -> PodState | None:
    """Return the pod's state if this container is waiting for a notable reason."""
    waiting = container.state.waiting
    if waiting is None:
        return None
    said = _joined(waiting.reason, waiting.message)
    if waiting.reason in _PULLS:
        never = waiting.reason in ("InvalidImageName", "ErrImageNeverPull")
        backs_off = waiting.reason == "ImagePullBackOff"  # it has no further details
        said = f"the image {container.image}: {said}"
        return PodState("pulling", said, hopeless=never, explained=not backs_off)
    if waiting.reason in _NOT_MADE:
        return PodState("preparing", said)
    if waiting.reason == "CrashLoopBackOff":
        return PodState(
            "preparing", f"its container {container.name} fails again and again: {said}"
        )
    return None


def _ended(pod: Pod, end: Terminated, kind: WorkerKind, container: str) -> PodState:
    if reported := _reported(end.message):
        return PodState("ended", reported)
    if end.reason == "OOMKilled":
        return PodState("ended", _out_of_memory(pod, kind, container), from_outside=True)
    if pod.status.reason or pod.condition("DisruptionTarget") is not None:
        return PodState("ended", _why_failed(pod, kind), from_outside=True)
    number = end.signal or (end.exit_code - 128 if end.exit_code > 128 else 0)
    if number in _SIGNALS:
        said = f"the {kind} was killed by {_SIGNALS[number]}"
        return PodState("ended", said, crashed=number in _CRASHES, from_outside=True)
    if end.reason in _NOT_STARTED:
        return PodState("ended", f"the {kind} did not start: {_joined(end.reason, end.message)}")
    return PodState("ended", f"the {kind} exited with status {end.exit_code}", explained=False)


def _out_of_memory(pod: Pod, kind: WorkerKind, container: str) -> str:
    limits = (each.resources.limits for each in pod.spec.containers if each.name == container)
    limit = str(next(limits, {}).get("memory", "memory"))
    if limit.isdigit():  # bytes, as in our requests
        limit = f"{int(limit) // 2**20}Mi"
    setting = _MEMORY[kind]
    return f"the {kind} needed more than the {limit} that its pod may have; {setting} raises that"


def _why_failed(pod: Pod, kind: WorkerKind) -> str:
    cause = pod.condition("DisruptionTarget")
    said = _joined(pod.status.reason, pod.status.message)
    if cause is not None and pod.status.reason != "Evicted":
        said = _joined(cause.reason, cause.message) or said
    return f"the {kind}'s pod was ended: {said}" if said else f"the {kind}'s pod has ended"


def _reported(message: str) -> str:
    for line in reversed(message.splitlines()):
        try:
            return without_paths(WorkerReport.model_validate_json(line).error)
        except ValidationError:
            continue
    return ""


def _joined(reason: str, message: str) -> str:
    said = without_paths(message.strip()[:_LONGEST])
    return f"{reason}: {said}" if reason and said else said or reason
