"""Charts, names and values of `tandem runs`. tests/component has the commands with a gateway."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from tandem.cli import context, run_show, run_values
from tandem.cli.main import app
from tandem.cli.run_charts import bar_chart, overlay_chart, points_of
from tandem.cli.run_values import done, full_name
from tandem.errors import ServerError, UserError
from tandem.tracking.names import flat, main_metric

RUN = "s-000000000001:train:0"


def curve(values: list[object]) -> dict:
    return {"step": list(range(len(values))), "value": values, "at": [0.0] * len(values)}


def about(step: int, state: str = "active") -> Callable[[], object]:
    last = {"reward": step}
    return lambda: {"last": last, "progress": None, "state": state, "reason": "it is done"}


def rewards(count: int) -> Callable[[], object]:
    return lambda: {"metrics": {"reward": curve(list(range(count)))}}


def silent() -> object:
    raise ServerError("the gateway does not answer")


def test_following_prints_each_step_once_over_a_restart_and_ends_with_the_run(monkeypatch):
    answers = iter(
        [
            about(1),  # for the metric's name
            *(about(1), rewards(2)),
            silent,
            silent,
            about(1),
            *(about(3), rewards(4)),
            about(3, "ended"),
        ]
    )
    monkeypatch.setattr(context.time, "sleep", lambda _seconds: None)
    for module in (run_show, run_values):
        monkeypatch.setattr(module, "call", lambda _folder, _method, _path: next(answers)())
    said = CliRunner().invoke(app, ["runs", "show", RUN, "--follow", "--last", "1"])
    assert said.exit_code == 0, said.exception
    assert said.stdout.splitlines() == ["step 1  reward 1", "step 2  reward 2", "step 3  reward 3"]
    assert said.stderr.count("(waiting)") == 1 and "The run has ended: it is done" in said.stderr


def test_the_main_metric_is_a_reward_then_a_loss_and_the_user_s_first():
    assert main_metric({"tandem/loss": 1, "loss": 1, "env/mean_reward": 1}) == "env/mean_reward"
    assert main_metric({"tandem/loss": 1, "train_loss": 1}) == "train_loss"
    assert main_metric({"tandem/loss": 1, "tandem/kl_mean": 1}) == "tandem/loss"
    assert main_metric({"accuracy": 1, "tandem/kl_mean": 1}) == "accuracy"
    assert main_metric(["Loss", "Reward/mean", "rewarded"]) == "Reward/mean"
    assert main_metric({}) == ""


def test_a_metric_may_come_later_to_a_follower():
    assert full_name("reward", {}, later=True) == "reward"
    assert full_name("kl_mean", {"tandem/kl_mean": 0.1}, later=True) == "tandem/kl_mean"
    with pytest.raises(UserError, match="none yet"):
        full_name("reward", {})


@pytest.mark.parametrize("values", [(-1.016e-09, 3.387e-10), (-1.234e-100, 0.0), (1.0, 2.0)])
def test_the_bars_of_a_chart_begin_in_one_column_however_long_the_numbers_are(values):
    assert len({line.index("│") for line in bar_chart(values).splitlines()}) == 1


def test_a_diverged_metric_still_has_a_chart():
    huge = [1.7e308, -1.7e308] * 200
    assert "1.7e+308" in bar_chart(huge[:2])
    assert "│" in bar_chart(huge)
    assert "A" in overlay_chart([list(enumerate(huge))])


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
    progress = {"percent": 42.9, "eta_seconds": 200.0}
    assert done({"progress": progress, "state": "active"}) == "42 %, 3 min"
    assert done({"progress": progress, "state": "ended"}) == "42 %"
    assert done({"progress": None, "state": "active"}) == ""
