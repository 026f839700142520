"""A gateway's launcher of pods with the plainest worker, for the clusters in memory and real
ones."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable

from kubernetes.aio.client import ApiClient

from gateway.workers.epoch import Epoch
from gateway.workers.launchers.kubernetes.api import Api
from gateway.workers.launchers.kubernetes.launcher import KubernetesLauncher
from gateway.workers.launchers.kubernetes.names import (
    CONTAINER,
    DEPLOYMENTS,
    EPOCH,
    GROUP,
    GROUP_SPEC,
    INSTANCE,
    SPEC_KEY,
    WORKER,
    WORKER_ID,
)
from gateway.workers.launchers.kubernetes.objects import WorkerObjects
from tandem.protocol.worker import WorkerHandle, WorkerSpec
from tandem.settings.cluster import KubernetesSettings

SETTINGS = {
    "pending_timeout": 60,
    "node_lost": 30,
}
LIFE = "LIFE"
"""The variable with a worker's behaviour: "report", "exit" or "memory" ends it after three seconds,
and "stubborn" ignores SIGTERM."""
ERROR = "the weights are not finite"
OUTPUT = "begun\nsecret of {name}\nKeyError: w\n"
_WORKER = f"""
import os, signal, socket, sys, time
life, name = os.environ["{LIFE}"], os.environ["NAME"]
heard = signal.SIG_IGN if life == "stubborn" else lambda *_: sys.exit(0)
signal.signal(signal.SIGTERM, heard)
listening = socket.create_server(("", 7300))
time.sleep(3)
if life == "report":
    open("/dev/termination-log", "w").write('{{"error": "{ERROR}"}}')
    sys.exit(1)
if life == "exit":
    print({OUTPUT!r}.format(name=name), flush=True)
    sys.exit(3)
kept = [bytearray(2**20) for _ in range(1000)] if life == "memory" else []
while True:
    signal.pause()
"""


class PlainMaker:
    """Makes minimal workers. With `claims`, a group is a claim."""

    def __init__(self, *, epoch: int, claims: bool, nodes: int, idle: float) -> None:
        self.epoch = epoch
        self.claims = claims
        self.nodes = nodes
        self.idle = idle
        self.owner = ""
        self.selectors: list[str] = []
        self.device_class = "gpu.example.com"
        self.digest = "1"
        self.devices = 2
        self.memory = "64Mi"
        self.image = "worker:1"
        self.lives: dict[str, str] = {}
        self.extra: dict[str, str] = {}

    async def find_owner(self, api) -> None:
        self.owner = (await api.read(DEPLOYMENTS, "tandem"))["metadata"]["uid"]

    def make(self, spec: WorkerSpec) -> tuple[WorkerSpec, WorkerObjects]:
        name = spec.worker_id
        labels = {WORKER: name, GROUP: spec.group}
        data = base64.b64encode(spec.model_dump_json().encode()).decode()
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata(name, labels, {WORKER_ID: name}),
            "data": {SPEC_KEY: data},
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(name, labels, {WORKER_ID: name}),
            "spec": {"clusterIP": "None"},
        }
        policy = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": self._metadata(name, labels, {WORKER_ID: name}),
            "spec": {"podSelector": {"matchLabels": labels}},
        }
        nodes = range(self.nodes)
        names = [f"tandem-{spec.group}" + (f"-{n}" if self.nodes > 1 else "") for n in nodes]
        return spec, WorkerObjects(
            secret=secret,
            service=service if self.nodes > 1 else None,
            policy=policy if self.nodes > 1 else None,
            claims=tuple(self._claim(each, spec) for each in names) if self.claims else (),
            pods=tuple(self._pod(spec, n, names[n], labels) for n in nodes),
        )

    def _claim(self, name: str, spec: WorkerSpec) -> dict:
        asked = {
            "deviceClassName": self.device_class,
            "allocationMode": "ExactCount",
            "count": self.devices,
            "selectors": [{"cel": {"expression": each}} for each in self.selectors],
        }
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": self._metadata(name, {GROUP: spec.group}, {GROUP_SPEC: self.digest}),
            "spec": {"devices": {"requests": [{"name": "devices", "exactly": asked}]}},
        }

    def _pod(self, spec: WorkerSpec, node: int, claim: str, labels: dict) -> dict:
        name = spec.worker_id + (f"-{node}" if node else "")
        resources: dict = {"requests": {"memory": self.memory}, "limits": {"memory": self.memory}}
        pod: dict = {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": CONTAINER,
                    "image": self.image,
                    "command": ["python3", "-c", _WORKER],
                    "env": [
                        {"name": LIFE, "value": self.lives.get(spec.worker_id, "")},
                        {"name": "NAME", "value": spec.worker_id},
                    ],
                    "resources": resources,
                }
            ],
            **self.extra,
            "volumes": [{"name": "spec", "secret": {"secretName": spec.worker_id}}],
        }
        if self.claims:
            resources["claims"] = [{"name": "devices"}]
            pod["resourceClaims"] = [{"name": "devices", "resourceClaimName": claim}]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": self._metadata(name, labels, {WORKER_ID: spec.worker_id}),
            "spec": pod,
        }

    def _metadata(self, name: str, labels: dict, annotations: dict) -> dict:
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "tandem", "uid": self.owner}
        return {
            "name": name,
            "labels": {INSTANCE: "tandem", **labels},
            "annotations": {EPOCH: str(self.epoch), **annotations},
            "ownerReferences": [owner],
        }

    def handle_of(self, spec: WorkerSpec, address: str) -> WorkerHandle:
        return WorkerHandle.of(spec, address=f"{address}:7300", metrics_port=7301)

    def nodes_of(self, _spec: WorkerSpec) -> int:
        return self.nodes

    def idle_seconds(self, _group: str) -> float:
        return self.idle


class Gateway:
    """A launcher, and the exits reported by it."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[ApiClient]],
        *,
        namespace: str,
        epoch: int = 1,
        claims: bool = True,
        nodes: int = 1,
        idle: float = 20.0,
        resync: float = 60.0,
        pull_timeout: float = 300.0,
        api_timeout: float = 10.0,
        **settings: float,
    ) -> None:
        self.maker = PlainMaker(epoch=epoch, claims=claims, nodes=nodes, idle=idle)
        chosen = KubernetesSettings(namespace=namespace, **{**SETTINGS, **settings})
        self.superseded = False
        self.exits: list[tuple[str, str]] = []
        self.launcher = KubernetesLauncher(
            Api(
                connect,
                namespace=namespace,
                timeout=api_timeout,
                patience=4 * api_timeout,
            ),
            self.maker,
            settings=chosen,
            stop_timeout=5.0,
            epoch=Epoch(number=epoch, superseded=self._note_superseded),
            resync=resync,
            pull_timeout=pull_timeout,
        )
        self._hearing: asyncio.Task | None = None

    async def open(self) -> list[WorkerHandle]:
        found = await self.launcher.list()
        self._hearing = asyncio.create_task(self._hear())
        return found

    async def __aenter__(self) -> Gateway:
        await self.open()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _hear(self) -> None:
        async for exit_ in self.launcher.watch():
            self.exits.append((exit_.worker_id, exit_.reason))

    def _note_superseded(self) -> None:
        self.superseded = True

    async def run(self, worker_id: str, **about) -> WorkerHandle:
        """Start a worker, and wait until its containers run."""
        return await self.launcher.start(spec(worker_id, **about))

    async def die(self) -> None:
        """Kill the process. Its planned actions are lost."""
        await self.launcher._reconciler.close()
        await self.launcher._api.close()
        if self._hearing is not None:
            self._hearing.cancel()

    async def close(self) -> None:
        await self.launcher.close()


def spec(worker_id: str, *, group: str = "train-0", **about) -> WorkerSpec:
    about = {"kind": "trainer", "session_id": "s-1", "run_id": f"{worker_id}:run", **about}
    return WorkerSpec(
        worker_id=worker_id,
        secret=f"secret of {worker_id}",
        model_name="tiny",
        model_path="models/tiny",
        group=group,
        start_timeout=100.0,
        stop_timeout=5.0,
        **about,
    )


async def until(condition, *, seconds: float = 300.0) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, "it does not come to be so"
        await asyncio.sleep(0.05)
