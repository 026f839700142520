"""Makes a worker's pods and their specification from the gateway's settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.workers.launchers.kubernetes.api import Api
from gateway.workers.launchers.kubernetes.home import Home
from gateway.workers.launchers.kubernetes.names import (
    DEPLOYMENTS,
    METRICS_PORT,
    PORT,
    pool_name,
    role_of,
)
from gateway.workers.launchers.kubernetes.objects import (
    WorkerObjects,
    check_templates,
    nodes_of,
    render_preflight,
    render_worker,
    spec_of_pod,
)
from gateway.workers.launchers.kubernetes.pod_spec import FOLDERS, folders_of
from gateway.workers.launchers.kubernetes.resources import resources_of
from gateway.workers.launchers.kubernetes.templates import Object, read_templates
from tandem.agent.preflight import JobNeeds
from tandem.backends.frameworks import own_environment
from tandem.errors import WorkerStartFailed, unusable_directory
from tandem.protocol.authority import Authority
from tandem.protocol.worker import WorkerHandle, WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import get_log
from tandem.weights.store import make_folder


@dataclass(eq=False)
class WorkerMaker:
    """`authority` signs the workers' certificates. `home` is the objects' place and owner. Raises
    `InvalidRequest` for unusable templates or an unusable data directory."""

    settings: GatewaySettings
    authority: Authority
    home: Home

    def __post_init__(self) -> None:
        self._templates = read_templates(self.settings.kubernetes)
        check_templates(self._templates, pools=self.settings.claim_pools, home=self.home)
        if self.settings.kubernetes.volume_claim:
            self._make_folders()
        self._pools = {each.name: each for each in self.settings.claim_pools}
        self._log = get_log()

    async def find_owner(self, api: Api) -> None:
        """Find the objects' owner: the gateway's Deployment, if it has one."""
        name = self.settings.kubernetes.instance
        deployment = await api.read(DEPLOYMENTS, name)
        if deployment is None:
            self._log.warning("no_deployment", name=name, hint="TANDEM_KUBERNETES_INSTANCE")
            return
        self.home = replace(self.home, owner=deployment["metadata"]["uid"])

    def make(self, spec: WorkerSpec) -> tuple[WorkerSpec, WorkerObjects]:
        """Return a worker's specification and objects."""
        pool = self._pool_of(spec.group)
        resources = resources_of(spec, pool=pool, settings=self.settings)
        certificate = self.authority.issue(spec.worker_id)
        spec = spec_of_pod(spec, pool=pool, home=self.home, tls=certificate)
        template = self._templates[role_of(spec.kind)]
        objects = render_worker(
            spec, pool=pool, template=template, resources=resources, home=self.home
        )
        return spec, objects

    def make_preflight(self, needs: JobNeeds) -> Object:
        """Return the pod that checks a job's needs without its devices.

        The image has the framework's environment where Tandem has it here (`job_paths`)."""
        python = needs.python or str(own_environment(needs.framework) / "bin" / "python")
        needs = needs.model_copy(update={"devices_visible": False, "python": python})
        return render_preflight(needs, template=self._templates["trainer"], home=self.home)

    def handle_of(self, spec: WorkerSpec, address: str) -> WorkerHandle:
        host = f"[{address}]" if ":" in address else address
        return WorkerHandle.of(spec, address=f"{host}:{PORT}", metrics_port=METRICS_PORT)

    def nodes_of(self, spec: WorkerSpec) -> int:
        """Return the number of a worker's pods, 0 without its pool."""
        pool = self._pools.get(pool_name(spec.group))
        return nodes_of(spec, pool) if pool is not None else 0

    def idle_seconds(self, group: str) -> float:
        """Return the lifetime of a group's unused claim, 0 without its pool."""
        pool = self._pools.get(pool_name(group))
        return pool.idle if pool is not None else 0.0

    def _make_folders(self) -> None:
        """Create the folders that workers mount, which the node would create for its own user."""
        cluster = self.settings.kubernetes
        for name in {name for kind in FOLDERS for name in folders_of(kind, cluster)}:
            folder = self.settings.data_dir / name
            try:
                if not folder.is_dir():
                    make_folder(folder, mode=0o700)
            except FileExistsError:  # another gateway also starts
                continue
            except OSError as error:
                raise unusable_directory(self.settings.data_dir, error) from error

    def _pool_of(self, group: str) -> ClaimPoolSettings:
        try:
            return self._pools[pool_name(group)]
        except KeyError:
            raise WorkerStartFailed(
                f"no pool of TANDEM_CLAIM_POOLS has the device group {group!r}"
            ) from None
