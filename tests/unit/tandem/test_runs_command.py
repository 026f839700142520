"""`tandem runs`: names, filters, comparisons and following, with a gateway's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import StringIO
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.cli import run_show
from tandem.cli.main import app
from tandem.cli.run_charts import overlay_chart, points_of
from tandem.cli.run_names import run_id
from tandem.cli.run_values import done, flat, main_metric
from tandem.errors import ServerError, UnknownRun, UserError

MODULES = ("runs", "run_show", "run_compare", "run_names", "run_stop", "usage", "checkpoints")


def run_of(number: int, name: str = "", **about: object) -> dict:
    return {
        "id": f"s-00000000000{number}:train:0",
        "name": name,
        "tags": [],
        "state": "active",
        "reason": "",
        "created_at": "2026-07-13T09:30:00Z",
        "ended_at": None,
        "base_model": "Qwen/Qwen3-8B",
        "lora_rank": 8,
        "ranks": 1,
        "owner": "ann",
        "parent_run": None,
        "progress": None,
        "last_step": None,
        "last": {},
        "config": None,
        **about,
    }


def curve(values: list[object]) -> dict:
    return {"step": list(range(len(values))), "value": values, "at": [0.0] * len(values)}


PROGRESS = {
    "step": 42,
    "total_steps": 100,
    "percent": 42.9,
    "eta_seconds": 200.0,
    "last_updated_at": "2026-07-13T09:31:00Z",
}
WARM = run_of(
    1,
    "warm-up",
    tags=["grpo", "8b"],
    progress=PROGRESS,
    last={"reward": 0.5, "tandem/loss": 1.25, "x": "NaN"},
    config={"optimizer": {"lr": 0.001}, "seed": 1},
)
COLD = run_of(
    2, "cold", last={"reward": 0.25}, config={"optimizer": {"lr": 0.01}, "seed": 1, "layers": [1]}
)
TWIN, NAMELESS = run_of(3, "cold", state="ended"), run_of(4)
RUNS = [NAMELESS, TWIN, COLD, WARM]
CURVES = {
    WARM["id"]: {"reward": curve([0.0, 0.7, 0.5])},
    COLD["id"]: {"reward": curve([0.0, "NaN", 0.25])},
}
NO_TRAINER = {"weights": None, "memory": None, "engines": None, "before": None}


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, str, object]]:
    """A gateway with four runs. Its value is the list of requests."""
    found: list[tuple[str, str, object]] = []

    def call(_data_dir, method, path, *, body=None, **_):
        found.append((method, path, body))
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path == "runs":
            runs = [run for run in RUNS if query.get("name", "").lower() in run["name"].lower()]
            page = runs[int(query["offset"]) :][: int(query["limit"])]
            return {"runs": page, "total_count": len(runs)}
        _, name, *rest = url.path.split("/")
        run = next(run for run in RUNS if run["id"] == name)
        if rest == ["metrics"]:
            return {"metrics": CURVES.get(name, {})}
        if rest == ["steps"]:
            return {"run": run, "steps": [], **NO_TRAINER}
        return {**run, **(body or {})}

    for module in MODULES:
        monkeypatch.setattr(f"tandem.cli.{module}.call", call, raising=False)
    return found


def tandem(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["runs", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_runs_are_listed_with_name_progress_and_main_metric(asked):
    lines = tandem("list").splitlines()
    row = next(line for line in lines if line.startswith("warm-up"))
    for cell in (WARM["id"], "active", "42", "reward 0.5", "42 %, 3 min", "grpo, 8b", "ann"):
        assert cell in row
    assert tandem("list", "--limit", "3").splitlines()[-1] == (
        "3 of 4 runs (--limit, --all show more)"
    )
    assert "show more" not in tandem("list", "--limit", "3", "--all")
    assert orjson.loads(tandem("list", "--json"))["total_count"] == 4


def test_filters_reach_the_gateway(asked):
    tandem("list", "--name", "warm", "--tag", "grpo", "--state", "active", "--owner", "ann")
    assert asked[0][1] == "runs?name=warm&tag=grpo&state=active&owner=ann&limit=20&offset=0"
    assert tandem("list", "--name", "nobody").strip() == "No such runs."


def test_eighty_columns_have_name_id_state_step_and_value(asked, monkeypatch):
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None, emoji=False)
    for module in ("context", "tables"):
        monkeypatch.setattr(f"tandem.cli.{module}.out", console)
    tandem("list")
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:6] == ["name", "id", "state", "step", "newest", "done"]
    assert any(WARM["id"] in line for line in lines)


@pytest.mark.parametrize("given", [WARM["id"], "warm-up", "s-000000000001", "s-000000000001:"])
def test_a_run_is_found_by_id_name_and_beginning_of_an_id(asked, given):
    assert run_id(None, given) == WARM["id"]


def test_an_ambiguous_or_unknown_name_is_refused_with_the_candidates(asked):
    with pytest.raises(UserError, match="'cold' means 2 runs, give an id") as caught:
        run_id(None, "cold")
    assert TWIN["id"] in caught.value.message and "ended" in caught.value.message
    with pytest.raises(UserError, match="means 4 runs"):
        run_id(None, "s-0")
    for given in ("col", "s-9"):
        with pytest.raises(UnknownRun, match="no run has the name"):
            run_id(None, given)


def test_runs_are_compared_by_values_configuration_and_curves(asked):
    said = tandem("compare", "warm-up", COLD["id"])
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert f"A: warm-up, {WARM['id']}" in lines
    assert "best reward 0.7 (step 1) 0.25 (step 2)" in lines
    assert "optimizer.lr 0.001 0.01" in lines and "layers - [1]" in lines
    assert not [line for line in lines if line.startswith("seed")], "it is equal"
    assert "step 0" in said and "step 2" in said
    told = orjson.loads(tandem("compare", WARM["id"], COLD["id"], "--json"))
    assert told["config_differences"]["optimizer.lr"] == [0.001, 0.01]
    assert told["best"]["reward"][0] == {"step": 1, "value": 0.7}
    with pytest.raises(UserError, match="name two to 26 runs"):
        tandem("compare", "warm-up")
    with pytest.raises(UserError, match="no metric 'rewad'; known: reward, tandem/loss, x"):
        tandem("compare", "warm-up", COLD["id"], "--metric", "rewad")


def test_a_run_is_shown_with_its_record(asked):
    said = tandem("show", "warm-up")
    assert said.startswith("warm-up  [grpo, 8b]\n")
    assert "step 42 of 100 (42 %, 3 min), updated 2026-07-13 09:31" in said
    assert "newest: reward 0.5, x NaN" in said and "  optimizer.lr = 0.001" in said
    assert "reward, steps 0 to 2: 0 → 0.5" in said
    assert "reward, steps 0 to 2" in tandem("show", "warm-up", "--metric", "reward")
    told = orjson.loads(tandem("show", "warm-up", "--metric", "reward", "--json"))
    assert told["metrics"]["reward"]["value"] == [0.0, 0.7, 0.5]


def test_a_run_gets_a_name_tags_and_a_configuration(asked, tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"total_steps": 5}')
    tandem("set", "warm-up", "--name", "hot", "--tags", "a, b", "--config", f"@{file}")
    changes = {"name": "hot", "tags": ["a", "b"], "config": {"total_steps": 5}}
    assert asked[-1] == ("PATCH", f"runs/{WARM['id']}", changes)
    tandem("set", "warm-up", "--name", "", "--tags", "", "--config", "null")
    assert asked[-1][2] == {"name": "", "tags": [], "config": None}
    for wrong in ("{", "[1]"):
        with pytest.raises(UserError, match="--config is not"):
            tandem("set", "warm-up", "--config", wrong)
    with pytest.raises(UserError, match="nothing to set"):
        tandem("set", "warm-up")


def follow(monkeypatch, answers: Iterator[Callable[[str], object]], *arguments: str):
    """Run `show --follow` with one answer for each request."""
    monkeypatch.setattr(run_show.time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(run_show, "call", lambda _d, _m, path: next(answers)(path))
    return CliRunner().invoke(app, ["runs", "show", WARM["id"], "--follow", *arguments])


def about(step: int, state: str = "active") -> Callable[[str], object]:
    return lambda path: {
        **WARM,
        "last": {"reward": step},
        "state": state,
        "reason": "it is done",
        "path": path,
    }


def rewards(count: int) -> Callable[[str], object]:
    return lambda path: {"metrics": {"reward": curve(list(range(count)))}, "path": path}


def silent(_path: str) -> object:
    raise ServerError("the gateway does not answer")


def test_following_prints_each_step_once_over_a_restart_and_ends_with_the_run(monkeypatch):
    answers = iter(
        [
            about(1),
            rewards(2),  # for the curves that are known
            about(1),
            rewards(2),
            silent,
            silent,
            about(1),
            about(3),
            rewards(4),
            about(3, "ended"),
        ]
    )
    said = follow(monkeypatch, answers, "--last", "1")
    assert said.exit_code == 0, said.exception
    assert said.stdout.splitlines() == ["step 1  reward 1", "step 2  reward 2", "step 3  reward 3"]
    assert said.stderr.count("(waiting)") == 1 and "The run has ended: it is done" in said.stderr


def test_ctrl_c_ends_following_cleanly(monkeypatch):
    def interrupt(_path: str) -> object:
        raise KeyboardInterrupt

    said = follow(monkeypatch, iter([about(0), rewards(1), about(0), rewards(1), interrupt]))
    assert (said.exit_code, said.stdout) == (0, "step 0  reward 0\n")


def test_the_main_metric_is_a_reward_then_a_loss_and_the_user_s_first():
    assert main_metric({"tandem/loss": 1, "loss": 1, "env/mean_reward": 1}) == "env/mean_reward"
    assert main_metric({"tandem/loss": 1, "train_loss": 1}) == "train_loss"
    assert main_metric({"tandem/loss": 1, "tandem/kl_mean": 1}) == "tandem/loss"
    assert main_metric({"accuracy": 1, "tandem/kl_mean": 1}) == "accuracy"
    assert main_metric({}) == ""


def test_several_curves_share_a_chart_with_a_letter_each():
    chart = overlay_chart([[(0, 0.0), (100, 1.0)], [(0, 0.0), (50, 0.0)]]).splitlines()
    assert chart[0].endswith("A") and chart[0].split()[0] == "1"
    assert chart[11].split("│")[1][0] == "*" and chart[11].rstrip().endswith("B")
    assert chart[-1].split() == ["step", "0", "step", "100"]
    assert overlay_chart([[(7, 3.0)]]).count("A") == 1
    assert max(map(len, chart)) <= 80


def test_values_that_are_not_finite_are_left_out_of_charts():
    assert points_of(curve([1, "NaN", "Infinity", 2])) == [(0, 1.0), (3, 2.0)]


def test_a_configuration_is_flat_with_dotted_names():
    nested = {"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}]}
    assert flat(nested) == {"a.b": 1, "a.c": {}, "d": [1, {"e": 2}]}
    assert flat({}) == {}


def test_an_ended_run_has_no_time_left():
    assert done({"progress": PROGRESS, "state": "ended"}) == "42 %"
    assert done({"progress": None, "state": "active"}) == ""
