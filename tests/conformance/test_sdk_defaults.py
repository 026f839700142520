"""Omitted settings have the SDK's documented defaults."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np
import pytest
from tinker import SamplingClient, ServiceClient, TrainingClient, types
from tinker.lib.public_interfaces.rest_client import RestClient

from tandem.wire.v1 import tinker_pb2 as wire
from tests.conformance.conform.calls import settled
from tests.conformance.conform.claims import proves
from tests.support.plain_http import Answer, PlainClient, message
from tests.support.sdk import batch, largest_difference, logprobs, sequences, supervised, train
from tests.support.stacks import TIED, TestStack

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8, 9, 10]
PROBE = sequences(1, seed=500)[0]


@pytest.fixture(scope="module")
def plain(stack: TestStack) -> Iterator[tuple[PlainClient, str]]:
    """A session without the SDK, which always sends its defaults."""
    client = PlainClient(stack.stack.endpoint)
    session_id = client.create_session()
    yield client, session_id
    client.finish(session_id)


class Log:
    """A run's operations in plain HTTP, with settings left out."""

    def __init__(self, client: PlainClient, session_id: str) -> None:
        self.client = client
        self.model_id = client.create_model(session_id, f"{TIED}:full")
        self._seq_id = 0

    def next(self) -> int:
        self._seq_id += 1
        return self._seq_id

    def forward_backward(self, *, forward_only: bool = False) -> Answer:
        request = message(self.model_id, self.next(), PROBE, forward_only=forward_only)
        return self.client.retrieve(self.client.forward_backward(request).json()["request_id"])

    def post(self, endpoint: str, /, **body: object) -> dict:
        request = {"model_id": self.model_id, "seq_id": self.next(), **body}
        return self.client.retrieve(self.client.post(endpoint, request)).json

    def after_steps(self, **adam: float) -> np.ndarray:
        """The logprobs after the run's first two steps."""
        self.post("load_weights", path=f"tinker://{self.model_id}/weights/begin", optimizer=False)
        for _ in range(2):
            self.forward_backward()
            self.post("optim_step", adam_params=adam)
        return self.forward_backward(forward_only=True).logprobs


@pytest.fixture(scope="module")
def log(plain: tuple[PlainClient, str]) -> Log:
    log = Log(*plain)
    log.post("save_weights", path="begin", overwrite=False)
    return log


@proves(
    "TrainingClient.optim_step",
    that="omitted settings have the defaults of AdamParams",
)
def test_adams_defaults_are_the_documented_ones(log: Log) -> None:
    documented = types.AdamParams().model_dump()
    documented["learning_rate"] = 0.01  # makes two steps visible
    explicit = log.after_steps(**documented)
    assert np.array_equal(log.after_steps(learning_rate=0.01), explicit)
    other = {"beta1": 0.5, "beta2": 0.5, "eps": 1e-2, "weight_decay": 0.3, "grad_clip_norm": 0.1}
    assert set(other) == set(documented) - {"learning_rate"}
    for name, value in other.items():
        changed = log.after_steps(**{**documented, name: value})
        assert not np.array_equal(changed, explicit), f"{name} makes a difference"


@proves(
    "SamplingClient.sample",
    that="omitted settings have the defaults of SamplingParams",
)
def test_samplings_defaults_are_the_documented_ones(
    plain: tuple[PlainClient, str],
) -> None:
    client, session_id = plain
    created = client.http.post(
        "create_sampling_session",
        json={"session_id": session_id, "sampling_session_seq_id": 0, "base_model": TIED},
    )
    sampler = created.json()["sampling_session_id"]
    numbers = iter(range(100))

    def sampled(**settings: object) -> list[list[int]]:
        request = {
            "sampling_session_id": sampler,
            "seq_id": next(numbers),
            "num_samples": 3,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            "sampling_params": {"max_tokens": 24, "seed": 3, **settings},
        }
        answer = client.retrieve(client.post("asample", request))
        found = wire.SampleResponse.FromString(answer.body)
        return [np.frombuffer(each.tokens, "<i4").tolist() for each in found.sequences]

    documented = {"temperature": 1, "top_k": -1, "top_p": 1}
    fields = types.SamplingParams.model_fields
    assert {name: fields[name].default for name in documented} == documented
    assert fields["stop"].default is None
    explicit = sampled(**documented)
    assert sampled() == sampled(stop=None) == explicit
    for name, value in {"temperature": 0.3, "top_k": 2, "top_p": 0.2}.items():
        assert sampled(**{**documented, name: value}) != explicit, f"{name} makes a difference"


LOSS_DEFAULTS = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
}
"""From Tinker's documentation of its losses. For gspo, from the paper."""


@pytest.mark.parametrize("loss", LOSS_DEFAULTS)
@proves(
    "TrainingClient.forward_backward",
    "TrainingClient.forward",
    that="omitted loss settings have their documented defaults",
)
def test_a_losss_defaults_are_the_documented_ones(
    runs: dict[str, TrainingClient], loss: str
) -> None:
    run = runs["full"]
    tokens = sequences(4, seed=501)
    data = batch(loss, tokens, old=logprobs(run, tokens), seed=502)
    if loss == "gspo":
        for datum in data:
            length = len(datum.loss_fn_inputs["target_tokens"].data)
            mask = types.TensorData.from_numpy(np.ones(length, np.float32))
            datum.loss_fn_inputs["sequence_ratio_mask"] = mask
    documented = LOSS_DEFAULTS[loss]

    def value(config: dict[str, float] | None) -> float:
        return settled(run.forward(data, loss, config)).metrics["loss:sum"]

    explicit = value(documented)
    assert value(None) == explicit
    for name in documented:
        assert value({name: documented[name]}) == explicit
        other = 2.5 if name == "beta" else 1.05 if name.startswith("clip_high") else 0.97
        assert value({**documented, name: other}) != explicit, f"{name} makes a difference"
    settled(run.forward_backward(data, loss))
    settled(run.optim_step(types.AdamParams(learning_rate=0.0)))


@proves(
    "ServiceClient.create_lora_training_client",
    that="the defaults are the documented ones: rank 32, all kinds of layers, Adam",
)
def test_a_lora_runs_defaults_are_the_documented_ones(
    plain: tuple[PlainClient, str], rest: RestClient
) -> None:
    signature = inspect.signature(ServiceClient.create_lora_training_client).parameters
    layers = ("train_mlp", "train_attn", "train_unembed")
    assert signature["rank"].default == 32
    assert all(signature[layer].default is True for layer in layers)
    client, session_id = plain
    # The wire's own defaults: lora_config requires only its rank.
    answer = client.http.post(
        "create_model",
        json={
            "session_id": session_id,
            "model_seq_id": 1,
            "base_model": TIED,
            "lora_config": {"rank": signature["rank"].default},
        },
    )
    model_id = client.retrieve(answer.json()["request_id"]).json["model_id"]
    saved = client.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "defaults"})
    info = settled(rest.get_weights_info_by_tinker_path(client.retrieve(saved).json["path"]))
    assert (info.is_lora, info.lora_rank) == (True, 32)
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (True, True, True)
    assert info.optimizer_config.type == "adamw"


@proves(
    "TrainingClient.save_state",
    that="by default, a checkpoint has no expiry and no metadata, and does not overwrite",
)
def test_a_checkpoints_defaults_are_the_documented_ones(log: Log, rest: RestClient) -> None:
    path = log.post("save_weights", path="defaults")["path"]
    listed = settled(rest.list_checkpoints(log.model_id)).checkpoints
    (found,) = [each for each in listed if each.tinker_path == path]
    assert (found.expires_at, found.public, found.user_metadata or {}) == (None, False, {})


@proves(
    "TrainingClient.save_weights_and_get_sampling_client",
    that="the default kind is a snapshot",
)
def test_a_sampler_is_a_snapshot_unless_asked_otherwise(
    runs: dict[str, TrainingClient],
) -> None:
    run = runs["lora"]
    sampler: SamplingClient = settled(run.save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints(PROBE)
    before = settled(sampler.compute_logprobs(prompt))
    train(run, seed=503, steps=2)
    settled(run.save_weights_and_get_sampling_client(kind="inflight"))
    assert settled(sampler.compute_logprobs(prompt)) == pytest.approx(before, abs=1e-5, nan_ok=True)


@proves(
    "TrainingClient.forward_backward",
    that="cross_entropy without weights counts every token once",
)
def test_left_out_weights_are_ones(runs: dict[str, TrainingClient]) -> None:
    run = runs["full"]
    tokens = sequences(3, seed=504)
    weighted = [supervised(each) for each in tokens]
    bare = [
        types.Datum(
            model_input=each.model_input,
            loss_fn_inputs={"target_tokens": each.loss_fn_inputs["target_tokens"]},
        )
        for each in weighted
    ]
    with_ones, without = (settled(run.forward(data, "cross_entropy")) for data in (weighted, bare))
    assert without.metrics["loss:sum"] == with_ones.metrics["loss:sum"]
    assert (
        largest_difference(
            [np.array(each["logprobs"].data) for each in without.loss_fn_outputs],
            [np.array(each["logprobs"].data) for each in with_ones.loss_fn_outputs],
        )
        == 0
    )
