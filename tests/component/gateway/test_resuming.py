"""The resuming script of docs/training.md, interrupted by Ctrl-C, a dying trainer, and gateway
restarts, within and between two of its runs."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from tinker import types

from tests.support.gateway.fake_launcher import FakeLauncher
from tests.support.gateway.running import KEY, make_model, running_gateway
from tests.support.ports import known_port
from tests.support.waiting import PATIENCE, wait_until

PAGE = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
SCRIPT = next(s for s in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "newest_state" in s)
BATCH = [
    types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[2, 3], dtype="int64", shape=[2]),
            "weights": types.TensorData(data=[1.0, 1.0], dtype="float32", shape=[2]),
        },
    )
]


class Batches:
    """The script's `data`. Calls `happens` at the nth iteration."""

    def __init__(self, at: int = -1, happens=lambda: None) -> None:
        self.taken, self._at, self._happens = 0, at, happens

    def __iter__(self):
        self.taken += 1
        if self.taken == self._at:
            self._happens()
        return iter(BATCH)

    def __len__(self) -> int:
        return len(BATCH)

    def __getitem__(self, index):
        return BATCH[index]


@pytest.fixture
def start(tmp_path, monkeypatch):
    port = known_port()
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    launcher = FakeLauncher()

    def started(**changes):
        launcher.servicers.clear()
        return running_gateway(tmp_path, launcher=launcher, session_ttl=600, port=port, **changes)

    return started


def run_script(gate, batches: Batches) -> None:
    model = make_model(gate.settings.data_dir.parent / "model")
    gate.run(gate.gateway.models.add(name="my/model", path=str(model)))
    # The SDK shares a RestClient()'s connections in this process, but each test has its own
    # gateway.
    script = SCRIPT.replace("RestClient()", f"RestClient(base_url={gate.url!r})")
    exec(compile(script, "training.md", "exec"), {"data": batches})


def last_step(gate) -> int:
    name = [name for name in gate.launcher.servicers if name.startswith("trainer")][-1]
    return gate.launcher.servicers[name].step


def test_after_a_ctrl_c_it_goes_on_from_the_last_save_and_no_step_is_made_twice(start):
    with start() as gate:

        def interrupt():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_script(gate, Batches(at=4, happens=interrupt))  # three steps, two of them saved
        assert last_step(gate) == 3
        assert wait_until(lambda: not gate.gateway.sessions.all() or None) is True
        batches = Batches()
        run_script(gate, batches)
        assert (last_step(gate), batches.taken) == (6, 4)
        run_script(gate, again := Batches())
        assert again.taken == 0, "all is done"


def test_after_a_restart_of_the_gateway_the_next_start_goes_on(start):
    with start() as gate, pytest.raises(RuntimeError, match="the power is lost"):

        def fail():
            raise RuntimeError("the power is lost")

        run_script(gate, Batches(at=6, happens=fail))
    with start() as gate:
        batches = Batches()
        run_script(gate, batches)
        assert (last_step(gate), batches.taken) == (6, 2)


def test_a_trainer_that_dies_costs_the_script_nothing(start, capsys):
    with start() as gate:

        def die():
            worker, _ = gate.worker("trainer")
            gate.run(gate.launcher.kill(worker, "it was killed by SIGKILL"))

        batches = Batches(at=4, happens=die)
        run_script(gate, batches)
        assert last_step(gate) == 6
        assert batches.taken == 6
        assert "worker_died" not in capsys.readouterr().out


def test_a_trainer_that_dies_unrestored_costs_the_steps_since_the_last_save(start, capsys):
    with start(recovery={"enabled": False}) as gate:

        def die():
            worker, _ = gate.worker("trainer")
            gate.run(gate.launcher.kill(worker, "it was killed by SIGKILL"))

        batches = Batches(at=4, happens=die)
        run_script(gate, batches)
        assert last_step(gate) == 6
        assert batches.taken == 3 + 1 + 4
        assert "worker_died" in capsys.readouterr().out


def test_a_gateway_that_restarts_under_the_script_costs_it_nothing(start, capsys):
    stop, stopped = threading.Event(), threading.Event()
    done = []

    def restart():
        stop.set()
        assert stopped.wait(PATIENCE)

    batches = Batches(at=4, happens=restart)

    def script(gate):
        try:
            run_script(gate, batches)
            done.append(True)
        except Exception as error:  # noqa: BLE001 - the test reads it
            done.append(error)

    with start() as gate:
        thread = threading.Thread(target=script, args=(gate,), daemon=True)
        thread.start()
        assert stop.wait(PATIENCE)
    with start() as gate:
        stopped.set()
        thread.join(2 * PATIENCE)
        assert (done, last_step(gate), batches.taken) == ([True], 6, 6)
    assert "gateway_restarted" not in capsys.readouterr().out
