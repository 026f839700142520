"""`KubernetesLauncher` starts workers as pods. `kubernetes_launcher` builds it from the
settings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from pydantic import ValidationError

from gateway.workers.epoch import Epoch
from gateway.workers.launchers.kubernetes.api import Api, ApiFault, Refused
from gateway.workers.launchers.kubernetes.home import Home
from gateway.workers.launchers.kubernetes.maker import WorkerMaker
from gateway.workers.launchers.kubernetes.names import EPOCH, PODS, SECRETS, SPEC_KEY, WORKER_ID
from gateway.workers.launchers.kubernetes.objects import LIFELINE
from gateway.workers.launchers.kubernetes.observed import Pod
from gateway.workers.launchers.kubernetes.preflight import PreflightPods
from gateway.workers.launchers.kubernetes.reconcile import Reconciler
from gateway.workers.launchers.kubernetes.removal import KILL_GRACE
from gateway.workers.launchers.kubernetes.resources import pod_request
from gateway.workers.launchers.kubernetes.serving import keep_label, move_label
from gateway.workers.launchers.kubernetes.worker import Deadlines, PodWorker
from gateway.workers.needs import Needs
from gateway.workers.requests import WorkerRequest
from tandem.agent.host import Host
from tandem.agent.preflight import JobNeeds, PreflightCheck
from tandem.errors import (
    InvalidRequest,
    SuspendFailed,
    WorkerCrashed,
    WorkerMayRun,
    WorkerStartFailed,
    describe,
)
from tandem.protocol.authority import Authority
from tandem.protocol.exit_watchers import ExitWatchers
from tandem.protocol.worker import WORKER_STOP_TIMEOUT, WorkerExit, WorkerHandle, WorkerSpec
from tandem.settings.cluster import KubernetesSettings
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log

_FIRST_LIST = 60.0
_API_TIMEOUT = 30.0
"""Seconds before a request to the API server is repeated."""
_PATIENCE = 2
"""A call's time with repetitions, in request timeouts."""


class KubernetesLauncher:
    """Implements `Launcher`.

    Times are in seconds. Workers end within `stop_timeout` and get their image within
    `pull_timeout`. A pending pod's events are read every `poll` seconds, and all objects every
    `resync` seconds, in case a watch missed a change."""

    def __init__(
        self,
        api: Api,
        maker: WorkerMaker,
        *,
        settings: KubernetesSettings,
        stop_timeout: float,
        epoch: Epoch,
        pull_timeout: float = 1800.0,
        poll: float = 5.0,
        resync: float = 60.0,
    ) -> None:
        self._api = api
        self._maker = maker
        self._stop_timeout = stop_timeout
        self._epoch = epoch.number
        self._reconciler = Reconciler(
            api,
            maker,
            instance=settings.instance,
            epoch=epoch,
            deadlines=Deadlines(
                pending=settings.pending_timeout,
                pull=pull_timeout,
                node_lost=settings.node_lost,
                poll=poll,
            ),
            resync=resync,
            ended=self._note_end,
        )
        self._preflights = PreflightPods(
            api, maker, self._reconciler, pull_timeout=pull_timeout, poll=poll
        )
        self._label = {"instance": settings.instance, "pod": settings.pod}
        self._resync = resync
        self._keeping: asyncio.Task[None] | None = None
        self._watchers = ExitWatchers()
        self._opened = self._closed = False
        self._log = get_log()

    @property
    def name(self) -> str:
        return "cluster"

    metrics_address: str = ""  # Prometheus finds pods by their labels

    @property
    def reports(self) -> bool:
        return self._reconciler.current and not self._api.trouble

    def prepare(self, request: WorkerRequest, needs: Callable[[], Needs], /) -> WorkerRequest:
        return pod_request(request, needs, self._maker.settings.claim_pools)

    async def preflight(self, needs: JobNeeds, *, timeout: float) -> tuple[PreflightCheck, ...]:
        self._open()
        return await self._preflights.check_needs(needs, timeout=timeout)

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        if self._closed:
            raise WorkerStartFailed("the launcher is closed")
        if spec.worker_id in self._reconciler.workers:
            raise WorkerStartFailed(f"worker {spec.worker_id} runs already")
        self._open()
        worker = self._reconciler.want(*self._maker.make(spec))
        handle = await asyncio.shield(worker.running)
        self._log.info("worker_started", worker_id=spec.worker_id, session_id=spec.session_id)
        return handle

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        self._open()
        grace = KILL_GRACE if at_once else max(KILL_GRACE, round(self._stop_timeout))
        gone = self._reconciler.remove_worker(worker_id, grace=grace)
        await asyncio.wait({gone})
        if gone.cancelled():
            raise WorkerMayRun("the launcher was closed")

    async def suspend(self, worker_id: str, *, lease: int, timeout: float) -> None:
        raise SuspendFailed(
            "a pod's state cannot be moved off its devices from outside; on a cluster, choose a "
            "trainer backend that can sleep, or a pool with `awake` 0"
        )

    async def resume(self, worker_id: str, *, lease: int, timeout: float) -> None:
        raise SuspendFailed("no pod is ever suspended")

    async def list(self) -> list[WorkerHandle]:
        """Return workers whose pods all run. Their specifications, with secrets, are in the
        cluster."""
        self._open()
        reconciler = self._reconciler
        try:
            async with asyncio.timeout(_FIRST_LIST):
                for view in reconciler.views:
                    await view.listed.wait()
            await self._maker.find_owner(self._api)
            if self._label["pod"]:
                await move_label(self._api, **self._label)
            specs = await self._read_specs()
        except (TimeoutError, ApiFault) as error:
            raise WorkerMayRun(
                f"the cluster cannot be asked for its workers: {error or 'no answer'}"
            ) from error
        if self._label["pod"] and self._keeping is None:
            keeping = keep_label(self._api, **self._label, period=self._resync)
            self._keeping = asyncio.create_task(keeping, name="serving-label")
        for worker_id, spec in specs.items():
            if worker_id in reconciler.workers:
                continue
            if _all_run(reconciler.pods.objects_of(worker_id), nodes=self._maker.nodes_of(spec)):
                reconciler.adopt(spec)
        await self._supersede()
        reconciler.sweeps = True
        starting = [each for each in reconciler.workers.values() if not each.running.done()]
        others = {*reconciler.unwanted(), *(each.worker_id for each in starting)}
        for worker_id in others:
            reconciler.remove_worker(worker_id, grace=KILL_GRACE)
        return [each.running.result() for each in reconciler.workers.values()]

    async def _supersede(self) -> None:
        """Write this epoch on each adopted pod before deleting others. An earlier gateway then
        knows that it was superseded, and its pending deletes fail. Raises `WorkerMayRun`."""
        adopted = [pod for each in self._reconciler.workers.values() for pod in each.pods]
        try:
            await asyncio.gather(*(self._take_over(pod) for pod in adopted))
        except ApiFault as error:
            raise WorkerMayRun(f"the cluster cannot be told who adopts: {error}") from error

    async def _take_over(self, pod: str) -> None:
        try:
            await self._api.patch(PODS, pod, {"annotations": {EPOCH: str(self._epoch)}})
        except Refused as error:
            if error.status != 404:
                raise

    async def _read_specs(self) -> dict[str, WorkerSpec]:
        listed = await self._api.list(SECRETS, labels=self._reconciler.secrets.labels)
        specs: dict[str, WorkerSpec] = {}
        for secret in listed.items:
            worker_id = secret["metadata"].get("annotations", {}).get(WORKER_ID, "")
            try:
                text = base64.b64decode(secret.get("data", {}).get(SPEC_KEY, ""))
                specs[worker_id] = WorkerSpec.model_validate_json(text)
            except (ValidationError, ValueError):
                self._log.error("specification_unreadable", worker_id=worker_id)
        return specs

    async def describe_host(self) -> Host:
        """Return an empty host, because the cluster's scheduler manages memory and devices."""
        return Host("cluster", cores=(), memory_bytes=0)

    def explain(self, worker_id: str) -> str:
        if (worker := self._reconciler.workers.get(worker_id)) is not None:
            return self._api.trouble or worker.says
        return self._reconciler.why_left(worker_id)

    def watch(self) -> AsyncIterator[WorkerExit]:
        self._open()
        return self._watchers.watch_exits()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        await self._reconciler.close()
        await self._api.close()
        self._watchers.close()

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._reconciler.start_following()

    def _note_end(self, worker: PodWorker) -> None:
        """Report a lost worker to the watchers."""
        assert worker.failure is not None
        if worker.running.exception() is not None:  # `start` reports it
            return
        exit_ = WorkerExit(
            worker_id=worker.worker_id,
            reason=worker.failure.message,
            crashed=isinstance(worker.failure, WorkerCrashed),
        )
        self._log.error("worker_ended", worker_id=worker.worker_id, reason=exit_.reason)
        self._watchers.tell(exit_)


def _all_run(pods: list[Pod], *, nodes: int) -> bool:
    return len(pods) == nodes and all(
        pod.status.phase == "Running" and pod.status.pod_ip and not pod.deleted for pod in pods
    )


_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def kubernetes_launcher(settings: GatewaySettings, epoch: Epoch) -> KubernetesLauncher:
    """Build the launcher. Raises `InvalidRequest` for unusable settings."""
    cluster = settings.kubernetes
    if settings.tls_dir is None:
        raise InvalidRequest(
            "TANDEM_LAUNCHER=kubernetes needs TANDEM_TLS_DIR, the certificate authority that signs "
            "the workers' certificates; `tandem tls create` makes one"
        )
    if settings.leader_timeout + _FIRST_LIST >= LIFELINE:
        raise InvalidRequest(
            f"workers end themselves when no gateway has called them for {LIFELINE:g} s; lower "
            "TANDEM_LEADER_TIMEOUT, so that a takeover takes less"
        )
    home = Home(
        settings=cluster,
        namespace=cluster.namespace or _own_namespace(),
        volume=settings.data_dir,
        epoch=epoch.number,
    )
    api = Api(
        partial(_connect, cluster.kubeconfig),
        namespace=home.namespace,
        timeout=_API_TIMEOUT,
        patience=_PATIENCE * _API_TIMEOUT,
    )
    return KubernetesLauncher(
        api,
        WorkerMaker(settings=settings, authority=Authority.read(settings.tls_dir), home=home),
        settings=cluster,
        stop_timeout=WORKER_STOP_TIMEOUT,
        epoch=epoch,
    )


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        raise InvalidRequest(
            "TANDEM_KUBERNETES_NAMESPACE is not set, and this is no pod of a cluster"
        ) from None


async def _connect(kubeconfig: Path | None) -> ApiClient:
    configuration = Configuration()
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(
                config_file=str(kubeconfig), client_configuration=configuration
            )
    except (config.ConfigException, OSError) as error:
        raise Refused(
            status=0, reason="", message=f"no access to a cluster: {describe(error)}"
        ) from error
    return ApiClient(configuration)
