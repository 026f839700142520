"""Short network cuts between clients and the gateway."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.gateway.running import KEY, running_gateway
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until

SESSIONS = 3
LONGEST_CUT, BETWEEN_HEARTBEATS = 45, 10


def batch() -> list[types.Datum]:
    tokens = types.ModelInput.from_ints([1, 2, 3])
    inputs = {
        "target_tokens": types.TensorData.from_numpy(np.array([2, 3, 4])),
        "weights": types.TensorData.from_numpy(np.ones(3, dtype=np.float32)),
    }
    return [types.Datum(model_input=tokens, loss_fn_inputs=inputs)]


@pytest.mark.parametrize("seconds", [20, LONGEST_CUT])
def test_sessions_and_runs_go_on_after_a_cut_amid_their_training(tmp_path, seconds):
    with running_gateway(tmp_path, session_ttl=60) as gate:
        proxy = Proxy(gate.url)
        services = [tinker.ServiceClient(base_url=proxy.url, api_key=KEY) for _ in range(SESSIONS)]
        runs = [s.create_lora_training_client("tiny:full").result() for s in services]
        begun = [run.forward_backward(batch(), "cross_entropy") for run in runs]
        before = gate.run(gate.gateway.sessions.all)
        proxy.cut()
        gate.age_sessions(seconds + BETWEEN_HEARTBEATS)
        assert gate.run(gate.gateway.sessions.overdue) == {}
        proxy.heal()
        for run, forward_backward in zip(runs, begun, strict=True):
            forward_backward.result()
            run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        assert gate.run(gate.gateway.sessions.all) == before
        assert {run.state for run in gate.gateway.runs.all()} == {"ready"}
        proxy.cut()


def test_a_client_that_stays_away_for_longer_ends_with_its_run(tmp_path):
    with running_gateway(tmp_path, session_ttl=60) as gate:
        proxy = Proxy(gate.url)
        service = tinker.ServiceClient(base_url=proxy.url, api_key=KEY)
        service.create_lora_training_client("tiny:full").result()
        proxy.cut()
        gate.age_sessions(61)
        wait_until(lambda: not gate.gateway.runs.all())
        proxy.heal()
