"""The manifests of `k8s/`, checked by Kubernetes' schemas and for mistakes that schemas miss."""

from __future__ import annotations

import re
import shutil
from pathlib import PurePosixPath

import kubernetes.aio.client  # noqa: F401 - imported before the guard: it binds a port
import kubernetes_validate
import pytest
import yaml

from gateway.workers.declared_groups import groups_of
from gateway.workers.launchers.kubernetes.names import INSTANCE, METRICS_PORT, PORT
from gateway.workers.launchers.kubernetes.pod_spec import _USER_OF_IMAGES
from gateway.workers.launchers.kubernetes.serving import SERVING
from gateway.workers.launchers.kubernetes.templates import read_templates
from tandem.agent.host import Host
from tandem.settings.cluster import KubernetesSettings
from tandem.settings.gateway import GatewaySettings
from tests.support.kubernetes.manifests import (
    K8S,
    OVERLAYS,
    Rendered,
    pods_of,
    reaches,
    render_overlay,
    worker_pods,
    worker_policies,
    workers,
)

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which renders the overlays, is not installed"
)

VERSIONS = ("1.34", "1.37")
OF_OPERATORS = {"PodMonitor", "PrometheusRule"}
"""Kinds without a schema in Kubernetes."""
JOBS = sorted((K8S / "jobs").glob("*.yaml"))
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
GATEWAYS = ("cpu-dev", "gpu-nfs", "with a playground")


@pytest.fixture(scope="module")
def overlays(tmp_path_factory) -> dict[str, Rendered]:
    folder = tmp_path_factory.mktemp("playground")
    return {
        "with a playground": render_overlay("cpu-dev", folder, component="playground"),
        "gpu-nfs with a playground": render_overlay(
            "gpu-nfs", tmp_path_factory.mktemp("gpu-nfs-playground"), component="playground"
        ),
        "with people": render_overlay(
            "cpu-dev", tmp_path_factory.mktemp("people"), component="people"
        ),
        **{each: render_overlay(each, tmp_path_factory.mktemp(each)) for each in OVERLAYS},
    }


@pytest.fixture(params=[*OVERLAYS, "with a playground", "with people"])
def overlay(request, overlays) -> Rendered:
    return overlays[request.param]


@pytest.fixture(params=GATEWAYS)
def stack(request, overlays) -> Rendered:
    return overlays[request.param]


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_one_of_kubernetes_without_unknown_fields(overlay, version):
    for one in overlay.objects:
        if one["kind"] not in OF_OPERATORS:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_each_job_is_one_of_kubernetes_without_unknown_fields(path, version):
    kubernetes_validate.validate(yaml.safe_load(path.read_text()), version, strict=True)


def all_pods(stack: Rendered) -> dict[str, dict]:
    """Pods by name: of an overlay, of the jobs, and of its gateway's workers."""
    jobs = [yaml.safe_load(path.read_text()) for path in JOBS]
    return pods_of([*stack.objects, *jobs]) | worker_pods(stack.settings)


def test_no_pod_may_more_than_the_restricted_standard_allows(stack):
    for name, pod in all_pods(stack).items():
        about = pod["spec"]["securityContext"]
        assert about["runAsNonRoot"] is True, name
        assert about["runAsUser"] > 0 and about["fsGroup"] > 0, name
        assert about["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not pod["spec"].keys() & {"hostNetwork", "hostPID", "hostIPC", "hostUsers"}, name
        for volume in pod["spec"]["volumes"]:
            assert volume.keys() - {"name"} <= VOLUMES, (name, volume)
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert all("hostPort" not in port for port in container.get("ports", [])), name


def containers(pod: dict) -> list[dict]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def test_the_gateway_alone_has_a_token(stack):
    for name, pod in all_pods(stack).items():
        assert pod["spec"]["automountServiceAccountToken"] is (name == "tandem"), name
        assert pod["spec"]["enableServiceLinks"] is False, name  # TANDEM_PORT is a setting


def test_each_component_has_an_account_of_its_own_and_the_gateways_alone_has_rights(stack):
    accounts = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["spec"]["serviceAccountName"]
        for pod in all_pods(stack).values()
    }
    of_jobs = {accounts.pop(component) for component in ("job", "preflight")}
    assert of_jobs == {accounts["trainer"]}
    assert accounts == {component: f"tandem-{component}" for component in accounts}
    assert accounts.keys() >= {"gateway", "trainer", "sampler", "models", "volume-check"}
    bound = [each for one in stack.all("RoleBinding") for each in one["subjects"]]
    assert [each["name"] for each in bound] == ["tandem-gateway"]
    assert all(one["automountServiceAccountToken"] is False for one in stack.all("ServiceAccount"))


def test_every_container_says_what_it_needs_and_what_it_may_have(stack):
    for name, pod in all_pods(stack).items():
        for container in containers(pod):
            wants, bounds = (container["resources"][each] for each in ("requests", "limits"))
            assert wants.keys() == {"cpu", "memory", "ephemeral-storage"}, name
            assert bounds.keys() == {"memory", "ephemeral-storage"}, name
        for volume in pod["spec"]["volumes"]:
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], name


@pytest.mark.parametrize("name", ["with a playground", "gpu-nfs with a playground"])
def test_pods_run_every_built_image_and_no_other_of_one_registry_and_tag(overlays, name):
    script = (K8S.parent / "scripts" / "images.sh").read_text()
    (built,) = re.findall(r"\$\{IMAGES:-([a-z ]+)\}", script)
    stack = overlays[name]
    pods = [*pods_of(stack.objects).values(), *worker_pods(stack.settings).values()]
    images = {container["image"] for pod in pods for container in containers(pod)}
    ours = {image for image in images if "@sha256:" not in image}
    ((prefix, tag),) = {(image.partition("tandem-")[0], image.rpartition(":")[2]) for image in ours}
    assert ours == {f"{prefix}tandem-{each}:{tag}" for each in built.split()}


def test_what_pods_mount_and_name_is_there(stack):
    there = {(one["kind"], one["metadata"]["name"]) for one in stack.objects}
    of_one_worker = {("Secret", name) for name in workers(stack.settings)}
    optional = {("Secret", "tandem-hub")}
    for name, pod in all_pods(stack).items():
        missing = named(pod["spec"]) - there - of_one_worker - optional
        assert not missing, (name, missing)


def named(spec: dict) -> set[tuple[str, str]]:
    found = {("ServiceAccount", spec["serviceAccountName"])}
    if "priorityClassName" in spec:
        found.add(("PriorityClass", spec["priorityClassName"]))
    for volume in spec["volumes"]:
        for source, kind, key in (
            ("configMap", "ConfigMap", "name"),
            ("secret", "Secret", "secretName"),
            ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
        ):
            if source in volume:
                found.add((kind, volume[source][key]))
    for container in spec["containers"]:
        for source in container.get("envFrom", []):
            found.add(("ConfigMap", source["configMapRef"]["name"]))
        for each in container.get("env", []):
            if "secretKeyRef" in each.get("valueFrom", {}):
                found.add(("Secret", each["valueFrom"]["secretKeyRef"]["name"]))
    return found


def test_the_settings_are_ones_that_the_gateway_takes(stack, monkeypatch):
    settings = stack.gateway_settings(monkeypatch)
    known = {f"TANDEM_{name}".upper() for name in GatewaySettings.model_fields}
    known |= {f"TANDEM_KUBERNETES_{name}".upper() for name in KubernetesSettings.model_fields}
    assert stack.settings.keys() - known == set()
    assert settings.launcher == "kubernetes"
    groups_of(settings, Host("pod", cores=(0,), memory_bytes=2**30))


def test_what_the_settings_name_is_mounted_there(stack, monkeypatch):
    settings = stack.gateway_settings(monkeypatch)
    spec = stack.one("Deployment", "tandem")["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts[str(settings.data_dir)] == "data"
    assert mounts[str(settings.kubernetes.templates)] == "templates"
    assert mounts[str(settings.tls_dir)] == "authority"
    assert settings.bootstrap_key_file is not None
    assert mounts[str(settings.bootstrap_key_file.parent)] == "first-key"
    keys = {name: set(stack.one("Secret", name)["data"]) for name in stack.names("Secret")}
    assert settings.bootstrap_key_file.name in keys["tandem-first-key"]
    assert keys["tandem-authority"] == {"tls.crt", "tls.key"}  # the names that the gateway reads
    (claim,) = (volume for volume in spec["volumes"] if volume["name"] == "data")
    name = claim["persistentVolumeClaim"]["claimName"]
    assert name == settings.kubernetes.volume_claim
    assert spec["securityContext"]["runAsUser"] == _USER_OF_IMAGES


def test_an_authority_of_the_database_is_mounted_where_there_is_one_and_its_password_is_not(stack):
    spec = stack.one("Deployment", "tandem")["spec"]["template"]["spec"]
    (volume,) = (each["secret"] for each in spec["volumes"] if each["name"] == "database")
    assert volume["secretName"] == stack.one("Secret", "tandem-database-url")["metadata"]["name"]
    assert volume["optional"] is True
    assert [each["key"] for each in volume["items"]] == ["ca.crt"]


def test_no_environment_of_a_pod_has_a_secret(stack):
    for name, pod in all_pods(stack).items():
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            assert not any("secretRef" in source for source in container.get("envFrom", [])), name
            for each in container.get("env", []):
                assert "secretKeyRef" not in each.get("valueFrom", {}), (name, each["name"])


def test_the_gateway_reads_the_url_of_its_database_from_a_secrets_file(stack):
    spec = stack.one("Deployment", "tandem")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    file = PurePosixPath(variables["TANDEM_DATABASE_URL_FILE"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    secret = volumes[mounts[str(file.parent)]]["secret"]
    assert secret["secretName"] == stack.one("Secret", "tandem-database-url")["metadata"]["name"]
    assert secret["items"] == [{"key": "url", "path": file.name}]
    assert not secret.get("optional"), "without it the pod would start, and say something else"
    assert "TANDEM_DATABASE_URL" not in {*variables, *stack.settings}


def test_the_workers_are_owned_by_the_deployment_that_the_gateway_may_read(stack, monkeypatch):
    instance = stack.gateway_settings(monkeypatch).kubernetes.instance
    assert stack.one("Deployment", instance)
    (rule,) = (
        rule
        for rule in stack.one("Role", "tandem-gateway")["rules"]
        if rule["resources"] == ["deployments"]
    )
    assert rule["resourceNames"] == [instance]


def test_the_templates_are_those_of_the_package_with_a_priority_and_marks_for_a_scraper():
    packaged = read_templates(KubernetesSettings())
    own = read_templates(KubernetesSettings(templates=K8S / "base" / "templates"))
    for kind, template in own.items():
        spec = dict(template.body["spec"])
        assert spec.pop("priorityClassName") == "tandem-worker"
        assert spec == packaged[kind].body["spec"]
        marks = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)}
        assert template.body["metadata"]["annotations"] == marks


def test_nothing_of_the_manifests_is_taken_for_an_object_of_a_worker(stack):
    for one in stack.objects:
        pod = one.get("spec", {}).get("template", {})
        for metadata in (one["metadata"], pod.get("metadata", {})):
            assert INSTANCE not in metadata.get("labels", {}), one["metadata"]["name"]


def test_an_upgrade_starts_the_next_gateway_before_it_ends_one_and_leaves_time_to_hand_over(stack):
    spec = stack.one("Deployment", "tandem")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 60
    (container,) = pod["containers"]
    # A standby never passes `readyz`. With such a probe, no upgrade would end.
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/api/v1/healthz"
    assert "lifecycle" not in container  # SIGTERM alone hands the workers over


def test_the_health_of_workers_is_asked_by_the_gateway_and_by_no_node(stack):
    for name, pod in worker_pods(stack.settings).items():
        for container in containers(pod):
            assert not [key for key in container if key.endswith("Probe")], name


def test_requests_reach_the_gateway_that_serves(stack):
    (port,) = stack.one("Service", "tandem")["spec"]["ports"]
    selector = dict(stack.one("Service", "tandem")["spec"]["selector"])
    assert selector.pop(SERVING) == stack.settings["TANDEM_KUBERNETES_INSTANCE"]
    template = stack.one("Deployment", "tandem")["spec"]["template"]
    assert selector.items() <= template["metadata"]["labels"].items()
    assert port["targetPort"] == int(stack.settings["TANDEM_PORT"])


# --- Network policies -----------------------------------------------------------------------------

OF_NODES = {
    "trainer": "trainer-s-ab12-0",
    "trainer-node-1": "trainer-s-ab12-0-1",
    "trainer-other": "trainer-s-cd34-0",
    "trainer-other-node-1": "trainer-s-cd34-0-1",
}
HOLDERS = (
    *("gateway", *OF_NODES, "trainer-alone", "sampler", "job", "preflight"),
    *("database", "models", "somebody"),
)
PORTS = (PORT, METRICS_PORT, 5432, 8000)
ALLOWED = {
    *(("gateway", name, PORT) for name in (*OF_NODES, "trainer-alone", "sampler", "job")),
    ("gateway", "database", 5432),
    *(
        (source, target, port)
        for one in (("trainer", "trainer-node-1"), ("trainer-other", "trainer-other-node-1"))
        for source in one
        for target in one
        for port in PORTS
    ),
}
"""The nodes of a trainer reach each other at all ports. `trainer-alone` has one node."""


def labels_of(stack: Rendered) -> dict[str, dict[str, str]]:
    """The labels of one pod of each component."""
    of_workers = worker_pods(stack.settings)
    jobs = pods_of([yaml.safe_load((K8S / "jobs" / "add-model.yaml").read_text())])
    pods = pods_of(stack.objects)
    by_component = {
        "gateway": pods["tandem"],
        "database": pods["tandem-database"],
        "models": next(iter(jobs.values())),
        "trainer-alone": of_workers["trainer-alone"],
        "sampler": of_workers["sampler-s-ab12-0"],
        "job": of_workers["job-s-ef56-0"],
        "preflight": next(p for name, p in of_workers.items() if name.startswith("preflight")),
        **{name: of_workers[pod] for name, pod in OF_NODES.items()},
        "somebody": {"metadata": {"labels": {"app": "else"}}},
    }
    return {name: pod["metadata"]["labels"] for name, pod in by_component.items()}


def test_pods_reach_one_another_only_as_far_as_they_need(overlays):
    stack = overlays["cpu-dev"]
    labels = labels_of(stack)
    policies = [*stack.all("NetworkPolicy"), *worker_policies(stack.settings)]
    reached = {
        (source, target, port)
        for source in HOLDERS
        for target in HOLDERS
        for port in PORTS
        if reaches(policies, labels[source], labels[target], port)
    }
    assert reached == ALLOWED


def test_the_runner_of_the_playground_reaches_the_gateway_alone(overlays):
    stack = overlays["with a playground"]
    runner = pods_of(stack.objects)["tandem-playground"]["metadata"]["labels"]
    policies = [*stack.all("NetworkPolicy"), *worker_policies(stack.settings)]
    reached = {
        (target, port)
        for target, labels in labels_of(stack).items()
        for port in PORTS
        if reaches(policies, runner, labels, port)
    }
    assert reached == {("gateway", 8000)}


def test_a_trainer_on_several_nodes_works_where_the_policies_of_the_base_are_absent(overlays):
    stack = overlays["cpu-dev"]
    labels = labels_of(stack)
    policies = worker_policies(stack.settings)
    sources = {
        (source, port)
        for source in HOLDERS
        for port in PORTS
        if reaches(policies, labels[source], labels["trainer"], port)
    }
    own = {(source, port) for source in ("trainer", "trainer-node-1") for port in PORTS}
    assert sources == own | {("gateway", PORT)}


@pytest.mark.parametrize("base", [True, False])
def test_a_trainer_on_several_nodes_resolves_names_and_reaches_nothing_else_outside(overlays, base):
    stack = overlays["cpu-dev"]
    trainer = labels_of(stack)["trainer"]
    policies = worker_policies(stack.settings)
    if base:
        policies += stack.all("NetworkPolicy")
    reached = {
        (namespace, port)
        for namespace in ("kube-system", "monitoring")
        for port in (53, 443, *PORTS)
        if reaches(policies, trainer, {}, port, to_namespace=namespace)
    }
    assert reached == {("kube-system", 53)}


def test_prometheus_reaches_the_metrics_of_workers_with_its_overlay_alone(overlays):
    plain, with_it = (
        [each for name in names for each in overlays[name].all("NetworkPolicy")]
        for names in (["cpu-dev"], ["cpu-dev", "monitoring"])
    )
    for kind in (*OF_NODES, "trainer-alone", "sampler"):
        worker = labels_of(overlays["cpu-dev"])[kind]
        for policies, port, may in (
            (plain, METRICS_PORT, False),
            (with_it, METRICS_PORT, True),
            (with_it, PORT, False),
        ):
            assert reaches(policies, {}, worker, port, from_namespace="monitoring") is may


def test_the_monitors_select_the_pods_that_have_metrics(overlays):
    labels = labels_of(overlays["cpu-dev"])
    monitors = {
        one["metadata"]["name"]: one["spec"]["selector"]
        for one in overlays["monitoring"].all("PodMonitor")
    }
    serving = labels["gateway"] | {SERVING: "tandem"}
    selected = {
        name: {
            component
            for component, those in (labels | {"serving": serving}).items()
            if Rendered.selects(selector, those)
        }
        for name, selector in monitors.items()
    }
    assert selected == {
        "tandem-gateway": {"serving"},
        "tandem-workers": {*OF_NODES, "trainer-alone", "sampler"},
    }
