"""What the state of a pod means for its worker, in a sentence.

A pod comes through these stages: `unscheduled` → `preparing` (`pulling`, if that fails) → `running`
→ `ended`. What a worker may take for each is in `worker`.
"""

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


@dataclass(frozen=True)
class PodState:
    """`says` is what it waits for, or why it ended. `hopeless`: no waiting will help."""

    stage: Stage
    says: str = ""
    hopeless: bool = False
    crashed: bool = False
    """A fault in native code ended it."""
    from_outside: bool = False
    """The node or the control plane ended it, or a signal: of several pods that ended together, it
    is such a one that the others speak of."""
    explained: bool = True
    """Whether `says` has the cause; otherwise the log may have it."""


def state_of(pod: Pod, *, kind: WorkerKind, container: str) -> PodState:
    """Return what has become of the pod whose container of that name is the worker; others in it
    are an administrator's."""
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
    """Whether the control plane has lost the pod's node: it says that the pod is not ready, and the
    node, the last time that it said anything, that its containers are."""
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
    """Whether a container of it runs, as far as its node has said."""
    return any(each.state.running is not None for each in pod.status.container_statuses)


def why_lost(pod: Pod) -> str:
    return f"its node {pod.spec.node_name} does not answer the control plane"


def why_deleted(pod: Pod, *, kind: WorkerKind) -> str:
    """Say who took away a pod that nobody here asked to end."""
    cause = pod.condition("DisruptionTarget")
    if cause is not None and cause.status == "True":
        return f"the {kind}'s pod was taken away: {_joined(cause.reason, cause.message)}"
    if node_is_lost(pod):
        return f"the {kind}'s pod was deleted: {why_lost(pod)}"
    return f"the {kind}'s pod was deleted, not by the gateway"


def told_by_events(events: Sequence[Event]) -> str:
    """Return the newest warning about a pod that is made ready; "" if there is none, or if it went
    on after that: the cluster keeps what it told once for an hour."""
    told = [each for each in events if each.reason in (*_TOLD, *_WENT_ON)]
    newest = max(told, key=lambda each: (each.at, each.reason in _WENT_ON), default=None)
    if newest is None or newest.reason in _WENT_ON:
        return ""
    return _joined(newest.reason, newest.message)


def _unscheduled(pod: Pod) -> PodState:
    condition = pod.condition("PodScheduled")
    if condition is None:  # the caller knows whether its claim is there
        return PodState("unscheduled", "the scheduler has not looked at it yet")
    said = _joined(condition.reason, condition.message)
    if condition.reason == "SchedulerError":
        # Also said of pods that came to one claim at once, of which the scheduler tries each again.
        return PodState("unscheduled", said, hopeless="CEL" in condition.message)
    return PodState("unscheduled", f"it is not scheduled: {said}")


def _waiting(container: Container) -> PodState | None:
    """Return the state of a pod one of whose containers waits for something to say of."""
    waiting = container.state.waiting
    if waiting is None:
        return None
    said = _joined(waiting.reason, waiting.message)
    if waiting.reason in _PULLS:
        never = waiting.reason in ("InvalidImageName", "ErrImageNeverPull")
        backs_off = waiting.reason == "ImagePullBackOff"  # says no more than that
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
    if limit.isdigit():  # bytes, as we say it
        limit = f"{int(limit) // 2**20}Mi"
    setting = "tandem.host_memory" if kind == "trainer" else "tandem.sampler_host_memory"
    return f"the {kind} needed more than the {limit} that its pod may have; {setting} raises that"


def _why_failed(pod: Pod, kind: WorkerKind) -> str:
    """Say why a whole pod has failed: the node or the control plane ended it."""
    cause = pod.condition("DisruptionTarget")
    said = _joined(pod.status.reason, pod.status.message)
    if cause is not None and pod.status.reason != "Evicted":
        said = _joined(cause.reason, cause.message) or said
    return f"the {kind}'s pod was ended: {said}" if said else f"the {kind}'s pod has ended"


def _reported(message: str) -> str:
    """Return the worker's own sentence from its termination message, if that is its report."""
    for line in reversed(message.splitlines()):
        try:
            return without_paths(WorkerReport.model_validate_json(line).error)
        except ValidationError:
            continue
    return ""


def _joined(reason: str, message: str) -> str:
    said = without_paths(message.strip()[:_LONGEST])
    return f"{reason}: {said}" if reason and said else said or reason
