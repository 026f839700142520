"""`tandem models add ORG/NAME`: downloads from a hub, and registers."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cli import hub as downloads
from tandem.cli.main import app
from tandem.errors import TandemError
from tandem.weights.model_store import RECORD_NAME, models_in, read_record
from tests.support.fake_hub import CONFIG, running_hub, shards
from tests.support.gateway.running import running_gateway
from tests.support.model_files import tensor_file
from tests.support.waiting import wait_until

NAME = "org/model"
TOKEN = "hf_a-token-of-a-test"


@pytest.fixture
def hub(monkeypatch):
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # set by tests of other folders
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        hub.add(NAME, shards())
        yield hub


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "models"


def add(place: Path, *arguments: str) -> dict:
    """Return the command's output. Raises `AssertionError` with its error."""
    command = ["models", "add", *(arguments or [NAME]), "--dir", str(place), "--json"]
    if "--data-dir" not in arguments:
        command += ["--data-dir", str(place.parent)]
    done = CliRunner().invoke(app, command)
    if isinstance(done.exception, TandemError | OSError):
        raise AssertionError(str(done.exception))
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_a_model_comes_whole_and_without_what_it_does_not_need(hub, place):
    files = shards()
    extra = {
        "README.md": b"#",
        "modeling_x.py": b"import os",
        "pytorch_model.bin": b"pickle",
        "pytorch_model.bin.index.json": b"{}",
        "consolidated.safetensors": b"twice",
        "original/params.json": b"{}",
    }
    hub.add(NAME, files | extra)
    said = add(place)
    folder = place / NAME
    assert names(folder) == sorted([*files, RECORD_NAME])
    assert all((folder / name).read_bytes() == files[name] for name in files)
    assert said == {
        "name": NAME,
        "path": str(folder),
        "repository": NAME,
        "revision": "main",
        "commit": hub.commit(NAME, "main"),
        "bytes": sum(map(len, files.values())),
        "downloaded_bytes": sum(map(len, files.values())),
        "registered": False,
        "notes": [],
    }
    assert models_in(place) == {NAME: folder}


def test_a_model_that_is_there_is_not_asked_for_again(hub, place):
    add(place)
    hub.requests.clear()
    assert add(place)["downloaded_bytes"] == 0
    assert hub.requests == []


def test_another_revision_needs_another_name(hub, place):
    hub.add(NAME, shards(count=1), revision="v2")
    add(place)
    with pytest.raises(AssertionError, match=f"{NAME} is {NAME} at main .* already.*--name"):
        add(place, NAME, "--revision", "v2")
    said = add(place, NAME, "--revision", "v2", "--name", "org/model-v2")
    assert said["path"] == str(place / "org" / "model-v2")
    assert read_record(place / "org/model-v2").revision == "v2"
    assert list(models_in(place)) == [NAME, "org/model-v2"]


def test_a_connection_that_breaks_is_gone_on_from_where_it_broke(hub, place):
    """The library keeps complete pieces of ten MiB."""
    piece, name = 10 * 2**20, "model-00001-of-00001.safetensors"
    files = shards(count=1, size=3 * piece)
    hub.add(NAME, files)
    hub.cuts[name] = [piece + 10_000, piece + 10_000]
    add(place)
    assert hub.sent(name) == ["", f"bytes={piece}-", f"bytes={2 * piece}-"]
    assert (place / NAME / name).read_bytes() == files[name]


def test_a_command_that_was_ended_goes_on_with_the_files_that_are_missing(hub, place):
    hub.holds = "model-00002-of-00002.safetensors"
    command = [sys.executable, "-c", "from tandem.cli import main; main()"]
    command += ["models", "add", NAME, "--dir", str(place), "--data-dir", str(place.parent)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        first, parts = place / NAME / "model-00001-of-00002.safetensors", place / NAME / ".cache"
        wait_until(lambda: first.exists() and list(parts.rglob("*.incomplete")))
        assert models_in(place) == {}, "no gateway sees what is not whole"
        with pytest.raises(AssertionError, match=f"already, by process {process.pid} of"):
            add(place)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 128 + signal.SIGTERM
        assert "run the command again to go on" in process.stderr.read()
    hub.holds = ""
    hub.held.set()
    assert add(place)["downloaded_bytes"] == 40_000
    assert hub.sent("model-00001-of-00002.safetensors") == [""]
    assert list(parts.rglob("*.incomplete")) == []


def test_files_of_a_revision_that_was_begun_before_do_not_stay(hub, place):
    hub.add(NAME, shards(count=3), revision="v3")
    hub.wrong["model-00003-of-00003.safetensors"] = b"x" * 40_000
    with pytest.raises(AssertionError, match=r"00003-of-00003.safetensors differed from"):
        add(place, NAME, "--revision", "v3")
    add(place)
    assert names(place / NAME) == sorted([*shards(), RECORD_NAME])


def test_what_came_otherwise_than_the_hub_says_is_removed_and_said(hub, place):
    hub.wrong = {"tokenizer.json": b"[]", "model-00001-of-00002.safetensors": b"x" * 40_000}
    with pytest.raises(AssertionError, match=r"00001-of-00002.safetensors, tokenizer.json"):
        add(place)
    assert models_in(place) == {}
    hub.wrong.clear()
    add(place)
    assert (place / NAME / "tokenizer.json").read_bytes() == b"{}"


def test_a_gated_model_needs_a_token_which_no_file_keeps_and_no_other_host_gets(
    hub, place, monkeypatch
):
    hub.refusals = [("/resolve/", 403, "GatedRepo", 1000)]
    with pytest.raises(AssertionError, match=f"gated: HF_TOKEN is not set;.*{hub.url}/{NAME}"):
        add(place)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(AssertionError, match="gated: HF_TOKEN is set, but it must be a token of"):
        add(place)
    hub.refusals.clear()
    hub.token = TOKEN
    hub.requests.clear()
    add(place)
    assert {
        headers.get("authorization") for _, path, headers in hub.requests if "/cdn/" in path
    } <= {None}
    kept = [path.read_bytes() for path in place.rglob("*") if path.is_file()]
    assert TOKEN.encode() not in b"".join(kept)


@pytest.mark.parametrize(
    ("refusals", "sentence"),
    [
        ([("/api/", 404, "RepoNotFound", 9)], "has no model org/model, or it is private"),
        ([("/api/", 401, "", 9)], "has no model org/model, or it is private"),
        ([("/api/", 404, "RevisionNotFound", 9)], "has no revision 'main'"),
        ([("/api/", 403, "", 9)], r"does not let this account have org/model \(403\)"),
        ([("/api/", 429, "", 9)], "wants fewer requests"),
        ([("/api/", 500, "", 9)], r"a problem of its own \(500\).*run the command again"),
        ([("/cdn/", 503, "", 9)], r"a problem of its own \(503\)"),
    ],
)
def test_refusals_of_the_hub_are_sentences(hub, place, refusals, sentence):
    hub.refusals = refusals
    with pytest.raises(AssertionError, match=sentence):
        add(place)
    assert models_in(place) == {}


def test_a_token_that_the_hub_does_not_know_is_said_to_be_so(hub, place, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refusals = [("/api/", 401, "", 9)]
    with pytest.raises(AssertionError, match=r"refuses HF_TOKEN \(401\)"):
        add(place)


def test_a_token_may_be_in_a_file(hub, place, monkeypatch, tmp_path):
    hub.token = TOKEN
    with pytest.raises(AssertionError, match="HF_TOKEN is not set"):
        add(place)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    add(place)


def test_a_hub_that_has_a_bad_moment_is_asked_again(hub, place):
    hub.refusals = [("/tree/", 500, "", 1), ("/cdn/", 429, "", 1), ("/resolve/", 503, "", 1)]
    add(place)


def test_a_hub_that_is_not_there_is_said_to_be_so(place, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(AssertionError, match=r"http://127.0.0.1:9 cannot be reached: .*refused"):
        add(place)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"config.json": None}, "no config.json"),
        ({"config.json": b"{"}, "config.json of org/model is not JSON"),
        ({"config.json": b"{}"}, "names no architecture"),
        ({"tokenizer.json": None}, "has no tokenizer"),
        ({"model-00002-of-00002.safetensors": None}, "has no model-00002-of-00002.safetensors$"),
        ({"model.safetensors.index.json": b"{}"}, "names no safetensors"),
        (
            {"model.safetensors.index.json": None, "pytorch_model.bin": b"x"},
            "has no model.safetensors; it has pytorch_model.bin, but pickles can run code",
        ),
    ],
)
def test_what_is_no_model_is_refused_before_its_weights_are_fetched(hub, place, changes, sentence):
    files = {name: data for name, data in (shards() | changes).items() if data is not None}
    hub.add(NAME, files)
    with pytest.raises(AssertionError, match=sentence):
        add(place)
    assert not any("/cdn/" in path for _, path, _ in hub.requests)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "model-00001-of-00002.safetensors",
            tensor_file("layers.7"),
            r"not whole at the hub: model-00001-of-00002.safetensors lacks layers.0, which model",
        ),
        ("model-00002-of-00002.safetensors", b"", "model-00002-of-00002.safetensors is empty"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1", "tokenizer.json is a po"),
    ],
)
def test_what_is_broken_at_the_hub_gets_no_record(hub, place, name, content, sentence):
    hub.add(NAME, shards() | {name: content})
    with pytest.raises(AssertionError, match=sentence):
        add(place)
    assert models_in(place) == {}


def test_what_does_not_work_with_a_model_is_noted(hub, place):
    config = json.dumps({**json.loads(CONFIG), "auto_map": {"AutoModel": "modeling_x.X"}}).encode()
    files = shards() | {"config.json": config, "vocab.txt": b"a"}
    del files["tokenizer.json"]
    hub.add(NAME, files)
    code, text = add(place)["notes"]
    assert "is never run" in code
    assert "no tokenizer.json" in text


def test_a_disk_without_room_is_said_before_the_weights_are_fetched(hub, place, monkeypatch):
    usage = type("Usage", (), {"free": 50_000})
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setenv("TANDEM_MIN_FREE_BYTES", "0")
    with pytest.raises(AssertionError, match=r"needs 78.1 KiB more.*has 48.8 KiB free"):
        add(place)
    assert not any("/cdn/" in path for _, path, _ in hub.requests)
    usage.free = 100_000
    add(place)


def test_a_folder_of_somebody_elses_and_a_name_that_is_no_folder_are_left_alone(hub, place):
    mine = place / NAME / "mine"
    mine.parent.mkdir(parents=True)
    mine.touch()
    with pytest.raises(AssertionError, match="did not make"):
        add(place)
    for name in ("../x", "a/../b", ".x", "a//b", "/x", "a" * 201):
        with pytest.raises(AssertionError, match="is not allowed: one to three parts"):
            add(place, NAME, "--name", name)
    assert names(mine.parent) == ["mine"]


def test_the_gateway_that_runs_knows_a_model_at_once(hub, tmp_path):
    with running_gateway(tmp_path) as gate:
        data_dir = gate.settings.data_dir
        said = add(data_dir / "models")
        assert said["registered"]
        listed = CliRunner().invoke(app, ["models", "list", "--json", "--data-dir", str(data_dir)])
        model = next(m for m in json.loads(listed.stdout)["models"] if m["name"] == NAME)
        assert (model["path"], model["max_length"]) == (said["path"], 64)
        CliRunner().invoke(app, ["models", "remove", NAME, "--data-dir", str(data_dir)])
        assert models_in(data_dir / "models") == {}
        hub.requests.clear()
        assert add(data_dir / "models")["downloaded_bytes"] == 0, "its files are still there"
        assert not any("/cdn/" in path for _, path, _ in hub.requests)


def test_a_gateway_finds_what_was_put_into_its_models_directory(hub, place, tmp_path, monkeypatch):
    """As after a Job on a shared volume."""
    monkeypatch.setattr("gateway.housekeeping._MODELS_INTERVAL", 0.05)
    with running_gateway(tmp_path, models_dir=place) as gate, gate.http() as client:
        assert not add(place, NAME, "--data-dir", str(tmp_path / "other"))["registered"]
        path = "/api/tandem/v1/models"
        wait_until(lambda: NAME in [m["name"] for m in client.get(path).json()["models"]])
        assert gate.run_id(gate.session_id(), model=f"{NAME}:full")


def test_a_gateway_in_another_container_is_not_taken_for_one_here(hub, place):
    """Its process number and loopback address mean nothing here."""
    announced = {
        "url": "http://127.0.0.1:9",
        "pid": os.getpid(),
        "process_start": "",
        "api_key": "tml-x",
    }
    (place.parent / "gateway.json").write_text(json.dumps(announced))
    assert not add(place)["registered"]


def test_what_is_on_the_disk_is_not_downloaded(place):
    with pytest.raises(AssertionError, match="with PATH nothing is downloaded"):
        add(place, NAME, str(place))


def test_two_at_once_for_one_model_are_one(hub, place):
    (place / ".locks").mkdir(parents=True)
    with (place / ".locks" / "org--model").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(AssertionError, match="is being downloaded"):
            add(place)
    add(place)


def test_it_needs_no_folder_but_its_own(hub, place):
    """As in a container without a home and with a read-only root."""
    place.mkdir()
    environment = {**os.environ, "HOME": "/proc/none", "TMPDIR": "/proc/none"}
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    command = [sys.executable, "-c", "from tandem.cli import main; main()"]
    done = subprocess.run(
        [*command, "models", "add", NAME, "--dir", str(place)],
        env=environment | {"PYTHONPATH": str(Path.cwd())},
        cwd="/proc",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "finds it within ten seconds" in done.stdout
    assert "\r" not in done.stderr, "no bar where there is no terminal"
    assert models_in(place) == {NAME: place / NAME}
