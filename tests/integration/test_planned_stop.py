"""A gateway that is asked to stop, with its workers or without them: its runs go on as if it had
never been away."""

from __future__ import annotations

from pathlib import Path

from tests.support.plain_http import PlainClient, message
from tests.support.stacks import TIED, running
from tests.support.waiting import wait_until


class Script:
    """A run that is trained without waiting for results, of which one may be asked for later."""

    def __init__(self, client: PlainClient, session_id: str, *, number: int = 0) -> None:
        self.client = client
        self.id = client.create_model(session_id, f"{TIED}:full", number=number)

    def train(self, *numbers: int) -> None:
        for number in numbers:
            self.client.forward_backward(message(self.id, 2 * number - 1, [1, 2, 3 + number]))
            step = {"model_id": self.id, "seq_id": 2 * number, "adam_params": {}}
            self.client.post("optim_step", step)

    def logprobs(self, number: int) -> list[float]:
        return self.client.retrieve(f"{self.id}:{2 * number - 1}").logprobs.tolist()


def test_a_gateway_that_is_asked_to_end_hands_its_trainers_over(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with running(tmp_path, models=models) as stack:
        client = PlainClient(stack.stack.endpoint)
        session_id = client.create_session()
        disturbed = Script(client, session_id)
        disturbed.train(1)
        first = disturbed.logprobs(1)
        trainer, ended = stack.worker("trainer", session_id=session_id), stack.stack.process
        disturbed.train(2, 3)  # and none of these results is waited for
        ended.terminate()
        wait_until(lambda: stack.stack.endpoint.pid != ended.pid, what="there is another gateway")
        assert ended.returncode == 0
        disturbed.train(4)
        results = [first, *(disturbed.logprobs(number) for number in (2, 3, 4))]
        assert stack.worker("trainer", session_id=session_id)["pid"] == trainer["pid"]
        (row,) = [each for each in stack.status()["runs"] if each["id"] == disturbed.id]
        assert row["restored"] == 0

        undisturbed = Script(client, session_id, number=1)
        undisturbed.train(1, 2, 3, 4)
        assert results == [undisturbed.logprobs(number) for number in (1, 2, 3, 4)]
