from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem import __version__
from tandem.settings.gateway import GatewaySettings
from tandem.settings.playground import PlaygroundSettings

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docker-compose.yaml").read_text()
FILE: Mapping[str, Any] = yaml.safe_load(TEXT)
SERVICES: Mapping[str, Any] = FILE["services"]
LASTING = {name: service for name, service in SERVICES.items() if name not in ("setup", "client")}
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
PINNED = re.compile(r"([a-z][a-z0-9/]*:v?\d+\.\d+[a-z0-9.-]*)@(sha256:[0-9a-f]{64})")
DOCKERFILES = sorted((ROOT / "deploy").glob("*.Dockerfile"))


def of_profile(profile: str) -> set[str]:
    return {name for name, each in SERVICES.items() if profile in each.get("profiles", [profile])}


def test_each_profile_has_all_services_and_shares_none_of_its_own_with_the_other():
    always = {"setup", "postgres", "prometheus"}
    assert of_profile("cpu") == always | {"gateway", "trainer", "sampler"}
    assert of_profile("gpu") == always | {"gateway-gpu", "trainer-gpu", "sampler-gpu"}
    assert of_profile("grafana") == always | {"grafana"}
    assert of_profile("client") == always | {"client"}
    assert of_profile("playground") == always | {"playground"}
    for profile in ("cpu", "gpu", "grafana", "client", "playground"):
        for name in of_profile(profile):
            assert set(SERVICES[name].get("depends_on", {})) <= of_profile(profile)


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_has_more_rights_than_it_needs(name: str):
    service = SERVICES[name]
    assert not {"privileged", "cap_add", "pid", "ipc", "devices"} & service.keys()
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not any("docker.sock" in volume for volume in service["volumes"])
    if name != "postgres":  # its image begins as root, to give files to its user
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert all(",size=" in each for each in service["tmpfs"])  # tmpfs is memory


@pytest.mark.parametrize("name", LASTING)
def test_what_runs_on_is_looked_after(name: str):
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped" and service["init"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["stop_grace_period"].endswith("s")


def test_only_gateway_and_monitoring_are_reached_from_outside_and_at_first_from_this_machine():
    published = {name: each["ports"] for name, each in SERVICES.items() if "ports" in each}
    assert set(published) == {"gateway", "gateway-gpu", "prometheus", "grafana"}
    assert all(":-127.0.0.1:" in port for ports in published.values() for port in ports)
    assert FILE["networks"]["workers"] == {"internal": True}
    for name in ("trainer", "trainer-gpu", "sampler", "sampler-gpu"):
        assert set(SERVICES[name]["networks"]) == {"workers"}
    assert SERVICES["postgres"]["network_mode"] == "none"


def test_only_the_gateway_and_what_makes_it_have_the_key_of_the_authority():
    having = {name for name, each in SERVICES.items() if "authority" in str(each["volumes"])}
    assert having == {"setup", "gateway", "gateway-gpu"}


def test_workers_mount_what_they_need_of_the_data_directory_and_write_what_is_theirs():
    folder = "/var/lib/tandem"
    shared = {
        "trainer": {f"data:{folder}", f"models:{folder}/models:ro", f"logs:{folder}/logs"},
        "sampler": {f"data:{folder}:ro", f"models:{folder}/models:ro", f"logs:{folder}/logs"},
    }
    for name, volumes in shared.items():
        for service in (SERVICES[name], SERVICES[f"{name}-gpu"]):
            assert set(service["volumes"]) == volumes | {"agent-certificate:/etc/tandem/agent:ro"}
    private = SERVICES["gateway"]["environment"]["TANDEM_PRIVATE_DIR"]
    having = {name for name, each in SERVICES.items() if "private" in str(each["volumes"])}
    assert f"private:{private}" in SERVICES["gateway"]["volumes"]
    assert having == {"setup", "gateway", "gateway-gpu"}
    mounted = {each for service in OURS.values() for each in service["volumes"] if folder in each}
    assert {each.removesuffix(":ro") for each in mounted} <= set(SERVICES["setup"]["volumes"])


def test_the_gateway_is_stopped_before_its_workers_and_its_database():
    for gateway, suffix in (("gateway", ""), ("gateway-gpu", "-gpu")):
        needed = set(SERVICES[gateway]["depends_on"])
        assert needed == {"postgres", "setup", f"trainer{suffix}", f"sampler{suffix}"}
        assert SERVICES[gateway]["stop_signal"] == "SIGINT"  # SIGINT saves the runs


def test_the_file_is_of_the_syntax_that_every_compose_has():
    assert not {"name", "version", "configs", "secrets"} & FILE.keys()
    for absent in ("\n    gpus:", "start_interval", "required:", "subpath", "!reset"):
        assert absent not in TEXT
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in FILE["volumes"] or (ROOT / source).exists()


@pytest.mark.parametrize("gateway", ["gateway", "gateway-gpu"])
def test_the_gateway_gets_all_settings_of_the_playground_and_sign_in_with_their_defaults(
    gateway: str, monkeypatch: pytest.MonkeyPatch
):
    names = [f"TANDEM_PLAYGROUND_{name.upper()}" for name in PlaygroundSettings.model_fields]
    for name in (*names, "TANDEM_OIDC"):
        value = SERVICES[gateway]["environment"][name]
        assert value.startswith(f"${{{name}:-") and value.endswith("}")
        monkeypatch.setenv(name, value.removeprefix(f"${{{name}:-").removesuffix("}"))
    settings = GatewaySettings()
    fields = PlaygroundSettings.model_fields
    assert settings.playground.model_dump() == {name: fields[name].default for name in fields}
    assert settings.oidc is None


def test_images_are_of_this_version_and_of_the_build_of_their_profile():
    for name, service in OURS.items():
        assert f"${{TANDEM_VERSION:-{__version__}}}" in service["image"]
        build = service["build"]
        assert (ROOT / build["dockerfile"]) in DOCKERFILES
        wanted = "gpu" if name.endswith("-gpu") and "gateway" not in name else "cpu"
        assert build["args"]["TANDEM_BUILD"] == wanted


def test_the_images_of_others_are_of_one_patch_version_by_digest_and_the_same_everywhere():
    database = (ROOT / "k8s" / "components" / "database" / "database.yaml").read_text()
    texts = [TEXT, database, *(file.read_text() for file in DOCKERFILES)]
    pinned = [PINNED.findall(text) for text in texts]
    assert [len(found) for found in pinned] == [4, 1] + [1] * len(DOCKERFILES)
    digests = {image: digest for found in pinned for image, digest in found}
    assert {(image, digest) for found in pinned for image, digest in found} == set(digests.items())
    assert {image.partition(":")[0] for image in digests} == {
        "python",
        "postgres",
        "prom/prometheus",
        "grafana/grafana",
    }


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_a_dockerfile_is_for_the_classic_builder_and_its_image_runs_as_a_user_without_rights(
    file: Path,
):
    text = file.read_text()
    assert text.count("FROM ${BASE_IMAGE}") == 2
    assert "--mount" not in text and "<<" not in text and "# syntax" not in text
    assert re.findall(r"^USER (.*)$", text, re.M) == ["10001:10001"]
    assert "--uid 10001" in text and 'image.version="$TANDEM_VERSION"' in text
    copied = re.findall(r"^COPY (?!--from)(\S+)", text, re.M)
    kept = set((ROOT / ".dockerignore").read_text().replace("!", "").split())
    assert all(path.rstrip("/") in kept or f"{path}install.sh" in kept for path in copied)
