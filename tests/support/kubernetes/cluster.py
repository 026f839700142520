"""The rest of a cluster on the server in memory: scheduler, nodes and the controller of claims."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass, field

from tests.support.kubernetes.gateway import ERROR, LIFE, OUTPUT
from tests.support.kubernetes.server import PROTECTION, FakeServer
from tests.support.kubernetes.validation import MOST_RESULTS

_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "m": 1e-3, "": 1.0}


@dataclass
class Node:
    """`prepare_error` is the driver's error for a claim's devices, `mount_error` that of a volume,
    and a `hanging` volume never answers."""

    name: str
    memory: float = 64 * 2**30
    cores: float = 16.0
    devices: int = 8
    labels: dict[str, str] = field(default_factory=dict)
    alive: bool = True
    prepare_error: str = ""
    mount_error: str = ""
    hanging: bool = False


@dataclass
class Image:
    """`pull` is in seconds, and `error` the reason for a failed pull."""

    pull: float = 0.0
    error: str = ""


class FakeCluster(FakeServer):
    """`images` lists images that must be pulled.

    `at_once` pods can be bound to one claim in one moment. More conflict."""

    def __init__(self, *, nodes: int = 2, strict: bool = True, at_once: int = 1) -> None:
        super().__init__(strict=strict)
        self.nodes = {f"node-{n}": Node(f"node-{n}") for n in range(nodes)}
        self.device_classes = {"gpu.example.com"}
        self.images: dict[str, Image] = {}
        self.at_once = at_once
        self.stubborn: set[str] = set()
        """Pods with a container that ends only when killed."""
        self.shutdown = 0.5
        self.conflicts = 0
        self._tasks: set[asyncio.Task] = set()
        self._changed = asyncio.Event()
        self._bound_at: dict[str, list[float]] = {}
        self._addresses = 0
        self._nap: dict[str, float] = {}
        self.on_change.append(self._note_change)

    def open(self) -> None:
        self.put("deployments", {"metadata": {"name": "tandem"}, "spec": {}})
        self._begin(self._schedule())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- For tests -----------------------------------------------------------------------------

    def pod(self, name: str) -> dict:
        return self.objects["pods"][name]

    def owned(self) -> dict[str, list[str]]:
        """Return the possible leftovers of a gateway, by kind."""
        kinds = ("pods", "secrets", "services", "networkpolicies", "resourceclaims")
        return {each: sorted(self.objects[each]) for each in kinds if self.objects[each]}

    def exit(self, name: str, *, code: int, message: str = "", reason: str = "") -> None:
        pod = self.objects["pods"].get(name)
        if pod is None or pod["status"]["phase"] in ("Failed", "Succeeded"):
            return
        reason = reason or ("Completed" if code == 0 else "Error")
        end = {"exitCode": code, "reason": reason, "message": message}
        self._set_container(pod, {"terminated": end})
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        self.change("pods", pod)
        self._release(pod)

    def report(self, name: str, error: str) -> None:
        message = json.dumps({"error": error, "error_type": "WorkerStartFailed"})
        self.exit(name, code=1, message=message)

    def run_out_of_memory(self, name: str) -> None:
        self.exit(name, code=137, reason="OOMKilled")

    def evict(self, name: str, message: str) -> None:
        pod = self.pod(name)
        pod["status"] |= {"phase": "Failed", "reason": "Evicted", "message": message}
        self._condition(pod, "DisruptionTarget", True, "TerminationByKubelet", message)
        self.change("pods", pod)
        self._release(pod)

    def preempt(self, name: str, message: str) -> None:
        pod = self.pod(name)
        self._condition(pod, "DisruptionTarget", True, "PreemptionByScheduler", message)
        self.change("pods", pod)
        self.delete("pods", name)

    def lose_node(self, name: str) -> None:
        self.nodes[name].alive = False
        for pod in self.all("pods"):
            if pod["spec"].get("nodeName") == name:
                self._condition(pod, "Ready", False)
                self.change("pods", pod)

    # --- The scheduler ------------------------------------------------------------------------

    def _note_change(self, plural: str, kind: str, body: dict) -> None:
        self._changed.set()
        if plural != "pods":
            return
        if kind == "DELETED":
            self._release(body)
        elif "deletionTimestamp" in body["metadata"] and body["spec"].get("nodeName"):
            self._begin(self._terminate(body, body["metadata"]["deletionGracePeriodSeconds"]))

    async def _schedule(self) -> None:
        while True:
            try:
                async with asyncio.timeout(1):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            for pod in self.all("pods"):
                name = pod["metadata"]["name"]
                if not pod["spec"].get("nodeName") and self._nap.get(name, 0) <= self.now:
                    self._place(pod)

    def _place(self, pod: dict) -> None:
        claims = []
        for each in pod["spec"].get("resourceClaims", []):
            claim = self.get("resourceclaims", each["resourceClaimName"])
            if claim is None or "deletionTimestamp" in claim["metadata"]:
                return  # no condition, no event
            claims.append(claim)
        for claim in claims:
            if (fault := self._class_fault(claim)) is not None:
                self._unschedulable(pod, *fault)
                return
        whys = {}
        for node in self.nodes.values():
            if why := self._why_not(pod, claims, node):
                whys.setdefault(why, []).append(node.name)
                continue
            if any(self._conflicts(claim) for claim in claims):
                self.conflicts += 1
                name = claims[0]["metadata"]["name"]
                self._nap[pod["metadata"]["name"]] = self.now + 1
                said = (
                    f"add reservation to claim {self.namespace}/{name}: Operation cannot be "
                    "fulfilled: the object has been modified; please apply your changes to the "
                    "latest version and try again"
                )
                self._unschedulable(pod, "SchedulerError", said)
                return
            self._bind(pod, claims, node)
            return
        said = ", ".join(f"{len(names)} {why}" for why, names in whys.items())
        self._unschedulable(
            pod, "Unschedulable", f"0/{len(self.nodes)} nodes are available: {said}."
        )

    def _class_fault(self, claim: dict) -> tuple[str, str] | None:
        for request in claim["spec"]["devices"].get("requests", []):
            asked = request.get("exactly")
            if asked is None:
                continue
            name = asked["deviceClassName"]
            if name not in self.device_classes:
                return "Unschedulable", f"device class {name} does not exist"
            for selector in asked.get("selectors", []):
                if "missing" in selector["cel"]["expression"]:
                    return "SchedulerError", "CEL runtime error: no such key: missing"
        return None

    def _why_not(self, pod: dict, claims: list[dict], node: Node) -> str:
        wants = pod["spec"].get("nodeSelector", {})
        if not node.alive:
            return "node(s) had untolerated taint {node.kubernetes.io/unreachable: }"
        if any(node.labels.get(key) != value for key, value in wants.items()):
            return "node(s) didn't match Pod's node affinity/selector"
        held = [each for each in self.all("pods") if each["spec"].get("nodeName") == node.name]
        held = [p for p in held if p["status"]["phase"] not in ("Failed", "Succeeded")]
        for resource, most in (("memory", node.memory), ("cpu", node.cores)):
            if _asked(pod, resource) + sum(_asked(each, resource) for each in held) > most:
                return f"Insufficient {resource}"
        free = node.devices
        for claim in self.all("resourceclaims"):
            allocation = claim.get("status", {}).get("allocation")
            if allocation is not None and allocation["node"] == node.name:
                free -= len(allocation["devices"]["results"])
        for claim in claims:
            allocation = claim.get("status", {}).get("allocation")
            if allocation is None:
                wanted = sum(_count(r) for r in claim["spec"]["devices"].get("requests", []))
                if wanted > free or wanted > MOST_RESULTS:
                    return "cannot allocate all claims"
                free -= wanted
            elif allocation["node"] != node.name:
                return "resourceclaim not available on the node"
        return ""

    def _conflicts(self, claim: dict) -> bool:
        recent = [t for t in self._bound_at.get(claim["metadata"]["name"], []) if t == self.now]
        return len(recent) >= self.at_once

    def _unschedulable(self, pod: dict, reason: str, message: str) -> None:
        if self._condition(pod, "PodScheduled", False, reason, message):
            self.change("pods", pod)

    def _bind(self, pod: dict, claims: list[dict], node: Node) -> None:
        name = pod["metadata"]["name"]
        for claim in claims:
            self._bound_at.setdefault(claim["metadata"]["name"], []).append(self.now)
            status = claim.setdefault("status", {})
            if "allocation" not in status:
                results = [
                    {"request": request["name"], "device": f"gpu-{number}"}
                    for request in claim["spec"]["devices"].get("requests", [])
                    for number in range(_count(request))
                ]
                status["allocation"] = {"node": node.name, "devices": {"results": results}}
            claim["metadata"]["finalizers"] = [PROTECTION]
            consumer = {"resource": "pods", "name": name, "uid": pod["metadata"]["uid"]}
            status.setdefault("reservedFor", []).append(consumer)
            self.change("resourceclaims", claim)
        pod["spec"]["nodeName"] = node.name
        self._condition(pod, "PodScheduled", True)
        self._set_container(pod, {"waiting": {"reason": "ContainerCreating"}})
        self.change("pods", pod)
        self._begin(self._run(pod, node))

    # --- A node -------------------------------------------------------------------------------

    async def _run(self, pod: dict, node: Node) -> None:
        name = pod["metadata"]["name"]

        def over() -> bool:
            return self.get("pods", name) is not pod or "deletionTimestamp" in pod["metadata"]

        while pod["spec"].get("resourceClaims") and node.prepare_error and not over():
            self._tell(pod, "FailedPrepareDynamicResources", node.prepare_error)
            await asyncio.sleep(3)
        image = pod["spec"]["containers"][0]["image"]
        while (about := self.images.get(image)) is not None and about.error and not over():
            for reason in ("ErrImagePull", "ImagePullBackOff"):
                said = about.error if reason == "ErrImagePull" else f'Back-off pulling "{image}"'
                self._set_container(pod, {"waiting": {"reason": reason, "message": said}})
                self.change("pods", pod)
                await asyncio.sleep(5)
        await asyncio.sleep(about.pull if about is not None else 0.1)
        if over() or not node.alive:
            return
        secret = self._secret_of(pod)
        if secret and self.get("secrets", secret) is None:
            self._tell(pod, "FailedMount", f'secret "{secret}" not found')
            return
        while node.mount_error and not over():
            self._tell(pod, "FailedMount", node.mount_error)
            await asyncio.sleep(3)
        for container in pod["spec"].get("initContainers", []):
            if not await self._run_first(pod, container, node):
                return
        self._addresses += 1
        status = pod["status"]
        status["podIP"] = f"10.0.{self._addresses // 256}.{self._addresses % 256}"
        status["phase"] = "Running"
        self._set_container(pod, {"running": {"startedAt": self.clock()}})
        self._condition(pod, "ContainersReady", True)
        self._condition(pod, "Ready", True)
        self.change("pods", pod)
        await self._live(pod)

    async def _run_first(self, pod: dict, container: dict, node: Node) -> bool:
        """Run an init container, as a real process. Return whether the pod goes on."""

        def note(state: dict) -> None:
            about = {"name": container["name"], "image": container["image"], "state": state}
            pod["status"]["initContainerStatuses"] = [about]
            self.change("pods", pod)

        note({"running": {"startedAt": self.clock()}})
        await asyncio.sleep(0.1)
        while node.hanging:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(1)
        if self.get("pods", pod["metadata"]["name"]) is not pod:
            return False
        code, message = _run_container(container)
        reason = "Error" if code else "Completed"
        note({"terminated": {"exitCode": code, "reason": reason, "message": message}})
        if code:
            pod["status"]["phase"] = "Failed"
            self.change("pods", pod)
        return code == 0

    async def _live(self, pod: dict) -> None:
        name = pod["metadata"]["name"]
        variables = pod["spec"]["containers"][0].get("env", [])
        life = next((each["value"] for each in variables if each["name"] == LIFE), "")
        if life == "stubborn":
            self.stubborn.add(name)
        await asyncio.sleep(3)
        if self.get("pods", name) is not pod:
            return
        if life == "report":
            self.report(name, ERROR)
        elif life == "exit":
            self.logs[name] = OUTPUT.format(name=name)
            self.exit(name, code=3)
        elif life == "memory":
            self.run_out_of_memory(name)

    def _secret_of(self, pod: dict) -> str:
        volumes = pod["spec"].get("volumes", [])
        return next((v["secret"]["secretName"] for v in volumes if "secret" in v), "")

    async def _terminate(self, pod: dict, grace: float) -> None:
        """End the container and report it. A lost node reports nothing."""
        name = pod["metadata"]["name"]
        running = pod["status"]["phase"] == "Running"
        if running:
            await asyncio.sleep(grace if name in self.stubborn else min(grace, self.shutdown))
        while not self.nodes[pod["spec"]["nodeName"]].alive:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(1)
        if self.get("pods", name) is not pod:
            return
        self.exit(name, code=137 if name in self.stubborn else 0)
        if self.get("pods", name) is pod:
            self.remove("pods", name)

    def _tell(self, pod: dict, reason: str, message: str) -> None:
        about = {"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"], "kind": "Pod"}
        self.put(
            "events",
            {
                "metadata": {"name": uuid.uuid4().hex},
                "involvedObject": about,
                "type": "Warning",
                "reason": reason,
                "message": message,
                "lastTimestamp": self.clock(),
            },
        )

    # --- Its parts ----------------------------------------------------------------------------

    def _release(self, pod: dict) -> None:
        """A claim without consumers loses its allocation."""
        for each in pod["spec"].get("resourceClaims", []):
            claim = self.get("resourceclaims", each["resourceClaimName"])
            if claim is None or "status" not in claim:
                continue
            status, uid = claim["status"], pod["metadata"]["uid"]
            kept = [each for each in status.get("reservedFor", []) if each["uid"] != uid]
            if len(kept) == len(status.get("reservedFor", [])):
                continue
            status["reservedFor"] = kept
            if not kept:
                del claim["status"]
                claim["metadata"].pop("finalizers", None)
            self.change("resourceclaims", claim)
            if not kept and "deletionTimestamp" in claim["metadata"]:
                self.remove("resourceclaims", claim["metadata"]["name"])

    def _set_container(self, pod: dict, state: dict) -> None:
        container = pod["spec"]["containers"][0]
        pod["status"]["containerStatuses"] = [
            {"name": container["name"], "image": container["image"], "state": state}
        ]

    def _condition(
        self, pod: dict, kind: str, status: bool, reason: str = "", message: str = ""
    ) -> bool:
        """Returns whether that changed it."""
        conditions = pod["status"].setdefault("conditions", [])
        condition = {"type": kind, "status": str(status), "reason": reason, "message": message}
        if condition in conditions:
            return False
        conditions[:] = [each for each in conditions if each["type"] != kind] + [condition]
        return True


def _run_container(container: dict) -> tuple[int, str]:
    """Run a container's command on this machine. Return its status and termination message."""
    with tempfile.NamedTemporaryFile("r") as report:
        places = {"python": sys.executable, container["terminationMessagePath"]: report.name}
        command = [places.get(word, word) for word in container["command"]]
        done = subprocess.run(command, check=False, capture_output=True)
        return done.returncode, report.read()


def _asked(pod: dict, resource: str) -> float:
    return sum(
        _quantity(container.get("resources", {}).get("requests", {}).get(resource, 0))
        for container in pod["spec"]["containers"]
    )


def _quantity(text: str | float) -> float:
    number = str(text).rstrip("KMGTim")
    return float(number) * _UNITS[str(text)[len(number) :]]


def _count(request: dict) -> int:
    asked = request.get("exactly") or (request.get("firstAvailable") or [{}])[0]
    return asked.get("count") or 1
