from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.errors import UnknownSetting
from tandem.settings.variables import (
    FREE_PREFIXES,
    OTHER_NAMES,
    check_environment,
    settings_by_name,
)

ROOT = Path(__file__).parents[3]
_SOURCES = ("tandem", "gateway", "trainer_service", "sampler_service", "tests", "scripts")
_SOURCES += ("benchmarks", "deploy", "k8s", "docs")
_FILES = ("README.md", "CONTRIBUTING.md", "Makefile", "docker-compose.yaml")
_WRONG_ON_PURPOSE = {
    "test_setting_names.py",
    "test_unknown_settings.py",
    "test_environment.py",  # variables that an agent inherits
    "error_table.py",  # an example of the error, also on the next two pages
    "errors.md",
    "troubleshooting.md",
    "test_cluster_settings.py",
    "variables.py",
}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("TANDEM_DATA_DIRR", "TANDEM_DATA_DIR"),
        ("TANDEM_DATADIR", "TANDEM_DATA_DIR"),
        ("TANDEM_TRAINER_RANK", "TANDEM_TRAINER_RANKS"),
        ("TANDEM_LORA_RUNS", "TANDEM_SHARING_LORA_RUNS"),
        ("TANDEM_BULID", "TANDEM_BUILD"),
        ("tandem_data_dir", "TANDEM_DATA_DIR"),
        ("Tandem_Port", "TANDEM_PORT"),
        ("TANDEM_test_sdk", None),
        ("TANDEM_QWERTZUIOP", None),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(name, nearest):
    with pytest.raises(UnknownSetting) as caught:
        check_environment({"PATH": "/bin", name: "1"})
    question = f"{name} is unknown; did you mean {nearest}?"
    assert caught.value.message == question if nearest else name in caught.value.message


def test_all_unknown_names_are_in_one_sentence():
    with pytest.raises(UnknownSetting, match=r"TANDEM_HOSTT.*; TANDEM_PROT is unknown"):
        check_environment({"TANDEM_PROT": "1", "TANDEM_HOSTT": "h"})


def test_every_name_in_code_and_deployments_is_known():
    known = {name for name, _ in settings_by_name()} | OTHER_NAMES.keys()
    unknown = {}
    folders = (path for folder in _SOURCES for path in (ROOT / folder).rglob("*"))
    for path in (*folders, *(ROOT / name for name in _FILES)):
        if path.suffix in (".gz", ".pyc", ".png", ".pyi") or path.name.endswith("_pb2.py"):
            continue
        if not path.is_file() or path.name in _WRONG_ON_PURPOSE:
            continue
        for name in re.findall(r"\bTANDEM_[A-Z0-9_]*[A-Z0-9]\b(?!\*)", path.read_text()):
            if name not in known and not name.startswith(tuple(FREE_PREFIXES)):
                unknown.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert unknown == {}


def test_every_process_may_have_the_names_of_all_others():
    names = [*(name for name, _ in settings_by_name()), *OTHER_NAMES, "TANDEM_BACKEND_X"]
    environment = dict.fromkeys(names, "1")
    check_environment(environment)
    assert list(environment) == names


def test_names_that_kubernetes_adds_for_services_are_removed():
    others = {
        "TANDEM_DATA_DIR": "/data",
        "TANDEM_PORT": "8000",
        "TANDEM_TEST_SDK": "0.27.2",
        "TANDEM_BACKEND_MINE": "1",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }
    added = {
        "TANDEM_GATEWAY_SERVICE_HOST": "10.0.0.2",
        "TANDEM_GATEWAY_SERVICE_PORT": "8000",
        "TANDEM_GATEWAY_SERVICE_PORT_HTTP": "8000",
        "TANDEM_GATEWAY_PORT": "tcp://10.0.0.2:8000",
        "TANDEM_GATEWAY_PORT_8000_TCP": "tcp://10.0.0.2:8000",
        "TANDEM_GATEWAY_PORT_8000_TCP_PROTO": "tcp",
        "TANDEM_GATEWAY_PORT_8000_TCP_PORT": "8000",
        "TANDEM_GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.2",
        "TANDEM_MY_DATABASE_0_PORT_53_UDP_ADDR": "10.0.0.3",
        "TANDEM_SERVICE_HOST": "10.0.0.4",
    }
    environment = others | added
    check_environment(environment)
    assert environment == others


def test_the_address_of_a_service_called_tandem_is_not_taken_for_the_port():
    environment = {"TANDEM_PORT": "tcp://10.0.0.2:8000"}
    check_environment(environment)
    assert environment == {}


def test_a_name_that_only_resembles_that_of_a_service_is_refused():
    for name in ("TANDEM_GATEWAY_PORT", "TANDEM_GATEWAY_SERVICE", "TANDEM_GATEWAY_PORT_TCP"):
        with pytest.raises(UnknownSetting):
            check_environment({name: "8000"})
