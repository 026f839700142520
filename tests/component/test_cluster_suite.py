"""`make test-cluster` starts a control plane, bounds the tests, keeps artefacts and stops all.

No Kubernetes runs here. Small programs take the places of `etcd`, `kube-apiserver` and `kind`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import __main__ as suite
from tests.cluster import settings
from tests.cluster.artefacts import keep
from tests.cluster.kubectl import Kubectl
from tests.support.processes import marked
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

ETCD = """#!{python}
import signal, sys
print("etcd", *sys.argv[1:], flush=True)
signal.pause()
"""
SERVER = """#!{python}
import http.server, pathlib, ssl, subprocess, sys
given = dict(each.removeprefix("--").split("=", 1) for each in sys.argv[1:])
print("serving", given["etcd-servers"], flush=True)
certificates = pathlib.Path(given["cert-dir"])
certificates.mkdir()
names = [str(certificates / each) for each in ("key", "certificate")]
subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x",
                "-keyout", names[0], "-out", names[1]], check=True, capture_output=True)
token = pathlib.Path(given["token-auth-file"]).read_text().split(",")[0]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Authorization"] == f"Bearer {{token}}"
        self.send_response(200 if right else 401)
        self.end_headers()
        self.wfile.write(b"ok" if right else b"no")
server = http.server.HTTPServer(("127.0.0.1", int(given["secure-port"])), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(names[1], names[0])
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""
BROKEN = """#!{python}
import sys
sys.exit("no such flag: --secure-port")
"""
KIND = """#!{python}
import pathlib, sys
arguments = sys.argv[1:]
with pathlib.Path({calls!r}).open("a") as calls:
    print(*arguments, file=calls)
if "--kubeconfig" in arguments:
    pathlib.Path(arguments[arguments.index("--kubeconfig") + 1]).write_text("a cluster")
"""
ASKS = """
import os, pathlib, subprocess
subprocess.run(["kubectl", "get", "--raw", "/readyz"], capture_output=True, check=True)
artefacts = pathlib.Path(os.environ["TANDEM_TEST_ARTEFACTS"])
(artefacts / "asked").write_text(os.environ["TANDEM_TEST_NODES"])
"""
HANGS = """
import os, pathlib, signal
artefacts = pathlib.Path(os.environ["TANDEM_TEST_ARTEFACTS"])
try:
    signal.pause()
except KeyboardInterrupt:
    (artefacts / "cleaned-up").touch()
"""
PLUGIN = """
import os, pathlib, signal
def pytest_sessionstart():
    artefacts = pathlib.Path(os.environ["TANDEM_TEST_ARTEFACTS"])
    (artefacts / "runs").touch()
    try:
        signal.pause()
    finally:
        (artefacts / "cleaned-up").touch()
"""


@pytest.fixture
def artefacts(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(settings, "ARTEFACTS", tmp_path / "artefacts")
    monkeypatch.setattr(settings, "KUBECONFIG", "")
    monkeypatch.setattr(settings, "BINARIES", tmp_path / "binaries")
    monkeypatch.setenv("TANDEM_TEST_COMMAND_MARK", str(tmp_path))
    (tmp_path / "binaries").mkdir()
    return tmp_path / "artefacts"


def write(name: str, text: str, **values: str) -> None:
    program = settings.BINARIES / name
    program.write_text(text.format(python=sys.executable, **values))
    program.chmod(0o755)


def run(code: str, *, most_seconds: float = 120.0) -> int:
    return suite.main([], tests=(sys.executable, "-c", code), most_seconds=most_seconds)


def test_the_tests_reach_a_control_plane_that_is_gone_after_them(artefacts, tmp_path):
    write("etcd", ETCD)
    write("kube-apiserver", SERVER)
    assert run(ASKS) == 0
    assert (artefacts / "asked").read_text() == "0", "it has no nodes"
    assert "--unsafe-no-fsync" in (artefacts / "etcd.log").read_text()
    assert "serving http://127.0.0.1:" in (artefacts / "kube-apiserver.log").read_text()
    assert not marked(str(tmp_path))


def test_a_failing_test_is_told_by_the_status_and_the_control_plane_stops_too(artefacts, tmp_path):
    write("etcd", ETCD)
    write("kube-apiserver", SERVER)
    assert run("raise SystemExit(3)") == 3
    assert not marked(str(tmp_path))


def test_a_program_that_ends_is_named_with_its_last_words(artefacts, tmp_path, capfd):
    write("etcd", ETCD)
    write("kube-apiserver", BROKEN)
    assert run(ASKS) == 1
    told = capfd.readouterr().err
    assert "kube-apiserver ended" in told and "no such flag" in told
    assert not marked(str(tmp_path))


def test_a_server_that_is_never_ready_is_given_up(artefacts, tmp_path, capfd):
    write("etcd", ETCD)
    write("kube-apiserver", ETCD)
    assert run(ASKS, most_seconds=2.0) == 1
    assert "is not ready in time" in capfd.readouterr().err
    assert not marked(str(tmp_path))


def test_a_folder_without_the_programs_is_refused(artefacts, capfd):
    assert run(ASKS) == 1
    assert "has neither kind nor etcd and kube-apiserver" in capfd.readouterr().err


def test_tests_that_take_too_long_are_interrupted_and_clean_up(artefacts, tmp_path):
    write("etcd", ETCD)
    write("kube-apiserver", SERVER)
    assert run(HANGS, most_seconds=20.0) == 124
    assert (artefacts / "cleaned-up").exists()
    assert not marked(str(tmp_path))


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_suite_cleans_up_and_leaves_nothing(artefacts, tmp_path, asked):
    write("etcd", ETCD)
    write("kube-apiserver", SERVER)
    (tmp_path / "hangs.py").write_text(PLUGIN)
    (temporary := tmp_path / "temporary").mkdir()
    environment = {
        **os.environ,
        "KUBECONFIG": "",
        "TANDEM_TEST_BINARIES": str(settings.BINARIES),
        "TANDEM_TEST_ARTEFACTS": str(artefacts),
        "PYTHONPATH": str(tmp_path),
        "TMPDIR": str(temporary),
    }
    command = [sys.executable, "-m", "tests.cluster", "-p", "hangs"]
    with subprocess.Popen(command, env=environment) as process:
        try:
            wait_until((artefacts / "runs").exists, what="the tests", timeout=120)
            process.send_signal(asked)
            assert process.wait(timeout=120) == 130
        finally:
            process.kill()
    assert (artefacts / "cleaned-up").exists()
    assert not marked(str(tmp_path))
    assert not list(temporary.glob("cluster-*")), "the administrator's token is there"


def test_a_kind_cluster_gets_the_images_and_its_logs_are_kept_before_it_is_deleted(
    artefacts, tmp_path
):
    calls = tmp_path / "calls"
    write("kind", KIND, calls=str(calls))
    read = "import os; assert open(os.environ['KUBECONFIG']).read() == 'a cluster'"
    assert run(read) == 0
    made = [line.split() for line in calls.read_text().splitlines()]
    assert [each[:2] for each in made] == [
        ["create", "cluster"],
        ["load", "docker-image"],
        ["export", "logs"],
        ["delete", "cluster"],
    ]
    assert set(settings.images_of_the_machine()) <= set(made[1])
    assert len({each[each.index("--name") + 1] for each in made}) == 1


def test_artefacts_of_a_cluster_without_an_answer_say_so_and_fail_no_test(tmp_path, monkeypatch):
    (tmp_path / "kubeconfig").write_text("")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    keep(Kubectl("tandem-test"), tmp_path / "kept")
    assert {path.name for path in (tmp_path / "kept").iterdir()} >= {"events.txt", "pods.txt"}
    assert (tmp_path / "kept" / "events.txt").read_text()
