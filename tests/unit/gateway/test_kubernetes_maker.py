from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest

from gateway.workers.epoch import Epoch
from gateway.workers.launchers import load_launcher, make_launchers
from tandem.errors import InvalidRequest, WorkerStartFailed
from tandem.protocol.authority import Authority
from tandem.protocol.worker import WorkerSpec
from tandem.settings.gateway import GatewaySettings
from tests.support.kubernetes.world import Gateway, on_cluster, spec

POOLS = [
    {"name": "train", "roles": ["trainer"], "claims": 2, "device_class": "gpu.example.com"},
    {"name": "cpu", "roles": ["sampler"], "claims": 1},
]


def settings(tmp_path, **about) -> GatewaySettings:
    tls = tmp_path / "tls"
    if not tls.exists():
        Authority.create(tls)
    cluster = {"namespace": "rl", "trainer_image": "trainer:1", "sampler_image": "sampler:1"}
    return GatewaySettings(
        data_dir=tmp_path,
        tls_dir=tls,
        launcher="kubernetes",
        claim_pools=POOLS,
        kubernetes={**cluster, **about},
    )


def test_a_template_of_which_no_pod_could_be_made_is_refused_at_the_start(tmp_path):
    template = "apiVersion: v1\nkind: Pod\nspec: {restartPolicy: Always}\n"
    (tmp_path / "trainer-pod.yaml").write_text(template)
    chosen = settings(tmp_path, templates=str(tmp_path))
    with pytest.raises(InvalidRequest, match="restartPolicy: the gateway sets it"):
        make_launchers(chosen, Epoch(number=1, superseded=lambda: None))


def test_what_workers_mount_is_there_before_they_are(tmp_path):
    chosen = settings(tmp_path)
    for _ in range(2):
        make_launchers(chosen, Epoch(number=1, superseded=lambda: None))
    made = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    assert made.pop("tls")
    assert made == dict.fromkeys(("checkpoints", "models", "snapshots", "spill", "weights"), 0o700)

    chosen = settings(tmp_path, keep_compiled=True)
    make_launchers(chosen, Epoch(number=1, superseded=lambda: None))
    assert (tmp_path / "compiled").is_dir()


def launcher_of(chosen: GatewaySettings, cluster, *, epoch: int = 1):
    launcher = make_launchers(chosen, Epoch(number=epoch, superseded=lambda: None))["trainer"]
    fake = Gateway(cluster, claims=False)
    launcher._api._connect = fake.launcher._api._connect
    return launcher


def test_pods_of_the_settings_are_accepted_run_and_leave_nothing(tmp_path):
    @on_cluster()
    async def test(cluster):
        for node in cluster.nodes.values():
            node.labels |= {"tandem.dev/role": "trainer"}
        launcher = launcher_of(settings(tmp_path), cluster)
        assert await launcher.list() == []
        about = {"host_memory": 2**30, "group": "train-1"}
        handle = await launcher.start(spec("trainer-s-1-0").model_copy(update=about))
        assert handle.address == "10.0.0.1:7300" and handle.metrics_port == 7301
        assert handle.authority == Authority.read(tmp_path / "tls").pem
        assert cluster.owned()["resourceclaims"] == ["tandem-train-1"]
        uid = cluster.get("deployments", "tandem")["metadata"]["uid"]
        for kind in ("pods", "secrets", "resourceclaims"):
            (made,) = cluster.all(kind)
            assert [owner["uid"] for owner in made["metadata"]["ownerReferences"]] == [uid]
        secret = "secret of trainer-s-1-0"
        assert secret not in str(cluster.all("pods"))
        await launcher.close()
        again = launcher_of(settings(tmp_path), cluster)
        assert await again.list() == [handle]
        await again.stop("trainer-s-1-0")
        assert set(cluster.owned()) == {"resourceclaims"}
        await again.close()

    test()


def test_a_changed_template_leaves_running_pods_alone_and_shapes_the_next_pod(tmp_path):
    """The gateway reads its templates at its start, and an invalid one ends it before that."""
    file = tmp_path / "trainer-pod.yaml"
    template = "apiVersion: v1\nkind: Pod\nspec: {%s}\n"
    about = {"host_memory": 2**30, "group": "train-1"}

    def trainer(name: str) -> WorkerSpec:
        return spec(name).model_copy(update=about)

    @on_cluster()
    async def test(cluster):
        chosen = settings(tmp_path, templates=str(tmp_path), placement="shared")
        file.write_text(template % "priorityClassName: first")
        load_launcher(chosen)
        old = launcher_of(chosen, cluster)
        await old.list()
        handle = await old.start(trainer("trainer-s-1-0"))
        running = deepcopy(cluster.pod("trainer-s-1-0"))
        assert running["spec"]["priorityClassName"] == "first"

        file.write_text(template % "restartPolicy: Always")
        with pytest.raises(InvalidRequest, match="restartPolicy: the gateway sets it"):
            load_launcher(chosen)
        await old.start(trainer("trainer-s-2-0"))
        assert old.reports
        assert cluster.pod("trainer-s-2-0")["spec"]["priorityClassName"] == "first"
        await old.close()

        file.write_text(template % "priorityClassName: second")
        load_launcher(chosen)
        new = launcher_of(chosen, cluster, epoch=2)
        assert handle in await new.list()
        await new.start(trainer("trainer-s-3-0"))
        assert cluster.pod("trainer-s-3-0")["spec"]["priorityClassName"] == "second"
        found = cluster.pod("trainer-s-1-0")
        assert found["metadata"]["uid"] == running["metadata"]["uid"]
        assert found["spec"] == running["spec"]
        for number in (1, 2, 3):
            await new.stop(f"trainer-s-{number}-0")
        await new.close()

    test()


def test_a_start_that_no_settings_allow_says_why(tmp_path):
    @on_cluster()
    async def test(cluster):
        launcher = launcher_of(settings(tmp_path), cluster)
        await launcher.list()
        with pytest.raises(WorkerStartFailed, match=r"no pool .* has the device group 'old-0'"):
            await launcher.start(spec("trainer-s-1-0", group="old-0"))
        assert cluster.owned() == {}
        await launcher.close()

    test()


def test_a_gateways_takeover_may_not_outlast_the_life_of_its_workers(tmp_path):
    make = partial(make_launchers, epoch=Epoch(number=1, superseded=lambda: None))
    chosen = settings(tmp_path)
    with pytest.raises(InvalidRequest, match=r"for 600 s; lower TANDEM_LEADER_TIMEOUT"):
        make(chosen.model_copy(update={"leader_timeout": 540}))
    make(chosen.model_copy(update={"leader_timeout": 539}))


def test_settings_without_an_authority_or_a_namespace_are_refused(tmp_path):
    make = partial(make_launchers, epoch=Epoch(number=1, superseded=lambda: None))
    chosen = settings(tmp_path)
    with pytest.raises(InvalidRequest, match="TANDEM_TLS_DIR"):
        make(chosen.model_copy(update={"tls_dir": None}))
    with pytest.raises(InvalidRequest, match="TANDEM_KUBERNETES_NAMESPACE"):
        make(settings(tmp_path, namespace=""))
