"""`tandem runs` on recorded runs, from elsewhere, with the keys of an owner and of a stranger."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from gateway.owners.auth.keys import NewKey
from tandem.cli import context
from tandem.errors import PermissionDenied, UnknownRun, UserError
from tests.support.gateway.running import Gate

OWN = "/api/tandem/v1"
Command = Callable[..., str]


@pytest.fixture
def keys(gate: Gate) -> dict[str, str]:
    roles = {"ann": "member", "ben": "member", "reader": "reader"}
    return {
        name: gate.run(
            gate.gateway.keys.create(NewKey(owner="ann" if name == "reader" else name, role=role))
        )[1]
        for name, role in roles.items()
    }


@pytest.fixture
def tandem(tandem: Command, keys) -> Command:
    return lambda *arguments, key="ann": tandem(*arguments, key=keys[key])


@pytest.fixture
def record(gate: Gate, keys) -> Callable[..., str]:
    """Creates a run of ann's with a reward for each step. Its value is the run's id."""

    def make(name: str, rewards: list[float], **config: object) -> str:
        with gate.http(keys["ann"]) as client:
            session = gate.session_id(keys["ann"])
            metadata = {"name": name, "tags": "grpo", "config": json.dumps(config)}
            model = {"session_id": session, "model_seq_id": 0, "base_model": "tiny:full"}
            made = client.post("/api/v1/create_model", json=model | {"user_metadata": metadata})
            gate.retrieve(made.json()["request_id"])
            add_rewards(gate, made.json()["model_id"], rewards)
            return made.json()["model_id"]

    return make


def add_rewards(gate: Gate, run: str, rewards: list[float], first: int = 0) -> None:
    rows = [{"step": first + at, "values": {"reward": each}} for at, each in enumerate(rewards)]
    with gate.http() as client:
        client.post(f"{OWN}/runs/{run}/metrics", json={"rows": rows}).raise_for_status()


def test_named_runs_are_listed_shown_and_compared(tandem, record):
    warm = record("warm [b]🔥[/b]", [0.0, 0.75, 0.5], total_steps=6, optimizer={"lr": 0.1})
    cold = record("cold", [0.0, 0.25], optimizer={"lr": 0.01}, total_steps=6)
    row = next(
        line for line in tandem("runs", "list", "--tag", "grpo").splitlines() if warm in line
    )
    assert row.startswith("warm [b]🔥[/b]") and "reward 0.5" in row and "50 %" in row
    assert warm not in tandem("runs", "list", "--name", "COLD")
    assert "No such runs" in tandem("runs", "list", "--owner", "ben", key="ben")
    total = json.loads(tandem("runs", "list", "--limit", "1", "--json"))["total_count"]
    last = tandem("runs", "list", "--limit", "1").splitlines()[-1]
    assert total > 1 and last == f"1 of {total} runs (--limit, --all show more)"
    assert "show more" not in tandem("runs", "list", "--limit", "1", "--all")

    shown = tandem("runs", "show", "warm [b]🔥[/b]")
    assert shown.startswith("warm [b]🔥[/b]  [grpo]\n") and "step 2 of 6 (50 %" in shown
    assert "newest: reward 0.5" in shown and "  optimizer.lr = 0.1" in shown
    assert "reward, steps 0 to 2: 0 → 0.5" in shown
    assert "reward, steps 0 to 2" in tandem("runs", "show", warm, "--metric", "reward")
    told = json.loads(tandem("runs", "show", warm, "--metric", "reward", "--json"))
    assert told["metrics"]["reward"]["value"] == [0.0, 0.75, 0.5]

    compared = tandem("runs", "compare", warm[:14], "cold")
    lines = [" ".join(line.split()) for line in compared.splitlines()]
    assert "best reward 0.75 (step 1) 0.25 (step 1)" in lines and "optimizer.lr 0.1 0.01" in lines
    assert not [line for line in lines if line.startswith("total_steps")], "it is equal"
    told = json.loads(tandem("runs", "compare", warm, cold, "--json"))
    assert told["runs"][1]["name"] == "cold"
    assert told["config_differences"] == {"optimizer.lr": [0.1, 0.01]}
    assert told["best"]["reward"][0] == {"step": 1, "value": 0.75}
    with pytest.raises(UserError, match="name two to 26 runs"):
        tandem("runs", "compare", warm)
    for command in ("status", "usage"):
        assert tandem(command)
    assert f"{cold} cold" in tandem("status")


def test_eighty_columns_have_name_id_state_step_and_value(tandem, record, monkeypatch):
    run = record("wide", [0.5])
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None, emoji=False)
    for module in ("context", "tables"):
        monkeypatch.setattr(f"tandem.cli.{module}.out", console)
    tandem("runs", "list", "--name", "wide")
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and any(run in line for line in lines)
    assert lines[0].split()[:5] == ["name", "id", "state", "step", "newest"]


def test_a_run_is_renamed_by_its_owner_alone(tandem, record, tmp_path):
    run = record("draft", [])
    assert "has a new name and a new tags" in tandem(
        "runs", "set", "draft", "--name", "final", "--tags", "a, b"
    )
    assert json.loads(tandem("runs", "list", "--tag", "b", "--json"))["runs"][0]["id"] == run
    (tmp_path / "config.json").write_text('{"total_steps": 3}')
    tandem("runs", "set", "final", "--config", "@config.json")
    assert "  total_steps = 3" in tandem("runs", "show", "final")
    with pytest.raises(PermissionDenied):
        tandem("runs", "set", run, "--name", "x", key="reader")
    for given in (run, "final"):
        with pytest.raises(UnknownRun):
            tandem("runs", "set", given, "--name", "x", key="ben")
    for arguments, sentence in (
        (("--name", "x" * 201), "name"),
        (("--config", "{"), "--config is not JSON"),
        (("--config", "[1]"), "--config is not an object"),
        ((), "nothing to set"),
    ):
        with pytest.raises(UserError, match=sentence):
            tandem("runs", "set", run, *arguments)
    tandem("runs", "set", run, "--name", "", "--tags", "", "--config", "null")
    about = json.loads(tandem("runs", "show", run, "--json"))["run"]
    assert (about["name"], about["tags"], about["config"]) == ("", [], None)


def test_two_runs_of_one_name_are_named_with_their_ids(tandem, record):
    twins = [record("twin", []), record("twin", [])]
    with pytest.raises(UserError, match="'twin' means 2 runs") as caught:
        tandem("runs", "show", "twin")
    assert all(each in caught.value.message for each in twins)
    with pytest.raises(UserError, match="'s-' means"):
        tandem("runs", "show", "s-")
    for given in ("twi", "s-zz"):
        with pytest.raises(UnknownRun, match="no run has the name"):
            tandem("runs", "show", given)


def test_a_run_is_followed_while_it_goes_on(gate, tandem, record, monkeypatch):
    run = record("live", [0.0, 0.1])
    looks = iter(range(100))

    def grow(_seconds: float) -> None:
        look = next(looks)
        if look == 2:
            raise KeyboardInterrupt
        adding = threading.Thread(target=add_rewards, args=(gate, run, [0.5 + look], 2 + look))
        adding.start()
        adding.join()

    monkeypatch.setattr(context.time, "sleep", grow)
    said = tandem("runs", "show", "live", "--metric", "reward", "--follow")
    assert said.splitlines() == [
        "step 0  reward 0",
        "step 1  reward 0.1",
        "step 2  reward 0.5",
        "step 3  reward 1.5",
    ]


def test_curves_are_shown_in_the_order_of_the_given_names(gate, tandem, record):
    run = record("two curves", [0.5])
    with gate.http() as client:
        row = {"step": 0, "values": {"length": 7}}
        client.post(f"{OWN}/runs/{run}/metrics", json={"rows": [row]}).raise_for_status()
    said = tandem("runs", "show", run, "--metric", "reward", "--metric", "length")
    assert 0 <= said.index("reward, steps") < said.index("length, steps")


def test_a_metric_that_is_missing_is_refused_with_the_known_ones(tandem, record):
    record("metric", [0.0])
    with pytest.raises(UserError, match="the run has no metric 'x'; known: reward"):
        tandem("runs", "show", "metric", "--metric", "x")
    record("empty", [])
    with pytest.raises(UserError, match="no metric 'x'; known: none yet"):
        tandem("runs", "show", "empty", "--metric", "x")


def test_a_run_is_stopped_and_its_checkpoints_listed_by_its_name(tandem, record):
    run = record("short/lived", [])
    assert "served by 2 engines" in tandem("scale", "short/lived", "--replicas", "2")
    with pytest.raises(UnknownRun, match="no run has the name"):
        tandem("scale", f"{run}/lived", "--replicas", "2")
    assert "is stopped" in tandem("runs", "stop", "short/lived")
    assert "ended" in tandem("runs", "list", "--state", "ended", "--name", "short")
    assert run in tandem("checkpoints", "list", "--run", "short/lived", "--all")
    assert "tokens: 0 trained" in tandem("usage", "--run", "short/lived")
