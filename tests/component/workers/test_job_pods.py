"""Jobs as pods, on a cluster in memory and in virtual time. Init containers are real processes."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from gateway.workers.epoch import Epoch
from gateway.workers.launchers import make_launchers
from tandem.agent.preflight import CODES, JobNeeds
from tandem.errors import WorkerStartFailed
from tandem.protocol.authority import Authority
from tandem.protocol.worker import JobSpec, WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tests.support.kubernetes.cluster import Image
from tests.support.kubernetes.world import Gateway, on_cluster, spec, until

_POOLS = [
    {"name": "train", "roles": ["trainer"], "claims": 2, "device_class": "gpu.example.com"},
    {"name": "cpu", "roles": ["sampler"], "claims": 1},
]
_JOB = "s-ab12_train_0"


class Place:
    """The data directory of a gateway with one job, and its launcher on a cluster."""

    def __init__(self, data_dir, cluster):
        self.data_dir, self.cluster = data_dir, cluster
        for node in cluster.nodes.values():
            node.labels |= {"tandem.dev/role": "trainer"}
        Authority.create(data_dir / "tls")
        self.folder = data_dir / "jobs" / _JOB
        self.folder.mkdir(parents=True)
        model = data_dir / "models" / "tiny"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_text("weights")
        self.launcher = self.gateway()

    def gateway(self, epoch: int = 1):
        cluster = {"namespace": "rl", "trainer_image": "trl:1", "sampler_image": "sampler:1"}
        settings = GatewaySettings(
            data_dir=self.data_dir,
            tls_dir=self.data_dir / "tls",
            launcher="kubernetes",
            claim_pools=_POOLS,
            kubernetes=cluster,
        )
        launcher = make_launchers(settings, Epoch(number=epoch, superseded=lambda: None))["job"]
        launcher._api._connect = Gateway(self.cluster, claims=False).launcher._api._connect
        return launcher

    def needs(self, **about) -> JobNeeds:
        model = str(self.data_dir / "models" / "tiny")
        about = {"framework": "pytest", "python": sys.executable, **about}
        return JobNeeds(**{"folder": str(self.folder), "model": model, **about})

    def interpreter(self, torch: str) -> str:
        """Return an interpreter whose torch has this text in its `version.py`."""
        program = self.data_dir / "python"
        answer = json.dumps({"packages": {}, "torch": torch})
        program.write_text(f"#!/bin/sh\necho '{answer}'\n")
        program.chmod(0o755)
        return str(program)

    def job(self, worker_id: str = "job-s-ab12") -> WorkerSpec:
        job = JobSpec(
            framework="trl", folder=str(self.folder), argv=("python", "train.py"), processes=2
        )
        about = {"kind": "job", "job": job, "host_memory": 2**30, "group": "train-1"}
        return spec(worker_id).model_copy(update=about)

    def claims_ever(self) -> list[str]:
        return [call.rule[0] for call in self.cluster.calls if call.resource == "resourceclaims"]


def with_place(tmp_path, test):
    @on_cluster()
    async def run(cluster):
        place = Place(tmp_path, cluster)
        await place.launcher.list()
        await test(place)
        await place.launcher.close()

    run()


def _break_image(place):
    place.cluster.images["trl:1"] = Image(error="manifest unknown")


def _break_volume(place):
    for node in place.cluster.nodes.values():
        node.mount_error = "mount failed: connection refused"


def _hang(place):
    for node in place.cluster.nodes.values():
        node.hanging = True


FAULTS = {
    "image_unavailable": (_break_image, {}),
    "backend_unknown": (None, {"backend": "nobody"}),
    "interpreter_unusable": (None, {"framework": "nothing", "python": ""}),
    "package_missing": (None, {"packages": {"nothing": ""}}),
    "package_version": (None, {"packages": {"pydantic": "99"}}),
    "cuda_mismatch": (None, {"devices": 1, "python": "cuda = None"}),
    "volume_unavailable": (_break_volume, {}),
    "folder_unwritable": (None, {"folder": "absent"}),
    "disk_full": (None, {"disk_bytes": 2**60}),
    "model_unreadable": (None, {"model": "/nothing"}),
    "timed_out": (_hang, {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_within_a_minute_and_without_a_claim(tmp_path, fault):
    async def test(place):
        break_it, about = FAULTS[fault]
        if break_it is not None:
            break_it(place)
        if about.get("python"):
            about = {**about, "python": place.interpreter(about["python"])}
        if "folder" in about:
            about = {"folder": str(place.folder.parent / "s-absent_train_0")}
        (found,) = await place.launcher.preflight(place.needs(**about), timeout=20)
        assert (found.fault, found.code) == (fault, CODES[fault])
        assert place.cluster.now < 60
        assert "create" not in place.claims_ever()
        assert place.cluster.owned() == {}

    with_place(tmp_path, test)


def test_a_sound_job_passes_in_a_pod_of_its_image_user_and_mounts(tmp_path):
    async def test(place):
        made = []
        place.cluster.on_change.append(
            lambda plural, kind, body: made.append(body) if kind == "ADDED" else None
        )
        assert await place.launcher.preflight(place.needs(), timeout=20) == ()
        (pod,) = made
        await place.launcher.start(place.job())
        job = place.cluster.pod("job-s-ab12")
        (first,), (container,) = pod["spec"]["initContainers"], job["spec"]["containers"]
        assert first["image"] == container["image"] == "trl:1"
        for field in ("securityContext", "nodeSelector", "tolerations", "serviceAccountName"):
            assert pod["spec"][field] == job["spec"][field]
        mounts = container["volumeMounts"]
        secret = [each for each in mounts if each["name"] == "tandem-spec"]
        assert first["volumeMounts"] == [each for each in mounts if each not in secret]
        assert {each["subPath"]: each["readOnly"] for each in mounts if "subPath" in each} == {
            "models": True,
            f"jobs/{_JOB}": False,
        }
        assert "resourceClaims" not in pod["spec"]
        assert [each["resourceClaimName"] for each in job["spec"]["resourceClaims"]] == [
            "tandem-train-1"
        ]
        assert job["metadata"]["labels"]["tandem.dev/framework"] == "trl"
        assert job["metadata"]["labels"]["app.kubernetes.io/component"] == "job"
        assert container["command"] == ["python", "-m", "trainer_service.jobs"]
        await place.launcher.stop("job-s-ab12")

    with_place(tmp_path, test)


def test_the_end_of_a_jobs_pod_is_told_and_nothing_is_left(tmp_path):
    async def test(place):
        exits = place.launcher.watch()
        await place.launcher.start(place.job())
        place.cluster.exit("job-s-ab12", code=0)
        told = await anext(exits)
        assert (told.worker_id, told.reason) == ("job-s-ab12", "the job exited with status 0")
        await until(lambda: "pods" not in place.cluster.owned())
        assert "secrets" not in place.cluster.owned()

    with_place(tmp_path, test)


def test_checks_that_no_node_can_make_say_why(tmp_path):
    async def test(place):
        for node in place.cluster.nodes.values():
            node.labels.clear()
        with pytest.raises(WorkerStartFailed, match=r"job's checks waits: .*node affinity"):
            await place.launcher.preflight(place.needs(), timeout=20)
        assert place.cluster.now < 60
        assert place.cluster.owned() == {}

    with_place(tmp_path, test)


def test_the_checks_of_a_cancelled_job_leave_no_pod(tmp_path):
    async def test(place):
        _hang(place)
        checks = asyncio.create_task(place.launcher.preflight(place.needs(), timeout=20))
        await until(lambda: "pods" in place.cluster.owned())
        checks.cancel()
        await asyncio.wait({checks})
        assert checks.cancelled()
        assert place.cluster.owned() == {}

    with_place(tmp_path, test)


def test_the_pod_of_a_killed_gateways_checks_is_removed_by_the_next_gateway(tmp_path):
    async def test(place):
        _hang(place)
        checks = asyncio.create_task(place.launcher.preflight(place.needs(), timeout=20))
        await until(lambda: "pods" in place.cluster.owned())
        await place.launcher._reconciler.close()
        following = place.gateway(epoch=2)
        await following.list()
        await until(lambda: not place.cluster.owned())
        await following.close()
        checks.cancel()
        await asyncio.wait({checks})

    with_place(tmp_path, test)
