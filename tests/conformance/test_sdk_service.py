"""ServiceClient: clients, continuing from checkpoints, copies, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker
from tinker import ServiceClient, TrainingClient, types
from tinker.lib.public_interfaces.rest_client import RestClient

from tests.conformance.conform.calls import (
    Call,
    refused_training,
    rest_client,
    service_client,
    settled,
)
from tests.conformance.conform.claims import proves, proves_both
from tests.conformance.conform.surface import NEWEST
from tests.support.plain_http import PlainClient
from tests.support.plain_model import plain_logprobs
from tests.support.sdk import largest_difference, logprobs, refusal, sequences, supervised, train
from tests.support.stacks import MAX_LENGTH, TIED, TestStack

pytestmark = pytest.mark.slow

PROBES = sequences(3, seed=70)
DATA = [supervised(tokens) for tokens in sequences(4, seed=71)]


def next_losses(run: TrainingClient) -> list[float]:
    found = []
    for _ in range(3):
        computed = run.forward_backward(DATA, "cross_entropy")
        settled(run.optim_step(types.AdamParams(learning_rate=3e-3)))
        found.append(settled(computed).metrics["loss:sum"])
    return found


@pytest.fixture(scope="module")
def branch(stack: TestStack) -> Iterator[ServiceClient]:
    """A separate session for further trainers."""
    with service_client(display_name="Branches") as service:
        yield service


CONTINUATIONS = (
    "create_training_client_from_state",
    "create_training_client_from_state_with_optimizer",
)


@pytest.fixture(scope="module")
def continued(
    branch: ServiceClient, runs: dict[str, TrainingClient]
) -> dict[tuple[str, str], tuple[TrainingClient, list, list[float]]]:
    """Every way to continue from a checkpoint: (client, saved logprobs, next losses).

    Plain calls use the LoRA run's checkpoint, async ones the full run's."""
    saved = {}
    # Older releases continue from LoRA checkpoints alone: the rank must be a number.
    second = "full" if tinker.__version__ == NEWEST else "lora"
    for variant, run in {"sync": runs["lora"], "async": runs[second]}.items():
        train(run, seed=72, steps=3)
        path = settled(run.save_state(f"branch-{variant}")).path
        saved[variant] = (path, logprobs(run, PROBES), next_losses(run))
    wanted = [
        (variant, method)
        for variant in saved
        for method in CONTINUATIONS
        if hasattr(branch, method if variant == "sync" else f"{method}_async")
    ]

    def created(each: tuple[str, str]) -> TrainingClient:
        variant, method = each
        return Call(variant)(branch, method, saved[variant][0], user_metadata={"from": variant})

    with ThreadPoolExecutor(len(wanted)) as threads:
        clients = list(threads.map(created, wanted))
    return {
        each: (client, *saved[each[0]][1:]) for each, client in zip(wanted, clients, strict=True)
    }


@pytest.mark.core
@proves_both(
    "ServiceClient.create_training_client_from_state_with_optimizer",
    that="the new run continues exactly as the saved one, with its moments",
)
def test_with_the_optimizer_training_goes_on_exactly(call: Call, continued) -> None:
    run, saved, expected = continued[call.variant, CONTINUATIONS[1]]
    assert largest_difference(logprobs(run, PROBES), saved) == 0
    assert next_losses(run) == expected


@pytest.mark.core
@proves_both(
    "ServiceClient.create_training_client_from_state",
    that="the new run has exactly the saved weights, and an optimizer that starts afresh",
)
def test_without_the_optimizer_its_moments_start_afresh(call: Call, continued) -> None:
    run, saved, expected = continued[call.variant, CONTINUATIONS[0]]
    assert largest_difference(logprobs(run, PROBES), saved) == 0
    losses = next_losses(run)
    assert losses[0] == expected[0]
    assert losses[1:] != expected[1:]


@pytest.mark.core
@proves_both(
    "ServiceClient.create_lora_training_client",
    that="a LoRA run starts as the base model; the same seed and rank train to the same bits on a "
    "CPU, and with the layers chosen",
)
def test_a_lora_run_starts_as_the_base_model(call: Call, branch: ServiceClient, base) -> None:
    arguments = {"rank": 2, "seed": 11, "train_unembed": False}
    run = call(branch, "create_lora_training_client", TIED, **arguments)
    assert largest_difference(logprobs(run, PROBES), plain_logprobs(base, PROBES)) < 1e-5
    assert run.get_info().lora_rank == 2
    train(run, seed=73, steps=2)
    trained = logprobs(run, PROBES)
    assert largest_difference(trained, plain_logprobs(base, PROBES)) > 1e-3
    twin = call(branch, "create_lora_training_client", TIED, **arguments)
    train(twin, seed=73, steps=2)
    assert largest_difference(logprobs(twin, PROBES), trained) == 0
    path = settled(twin.save_state(f"lora-{call.variant}")).path
    info = settled(rest_client().get_weights_info_by_tinker_path(path))
    assert (info.base_model, info.is_lora, info.lora_rank) == (TIED, True, 2)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, False)


@pytest.mark.core
@proves_both(
    "ServiceClient.get_server_capabilities", that="names the models that the gateway serves"
)
@proves(
    "RestClient.get_server_capabilities",
    that="names the models that the gateway serves, with their context length",
)
def test_capabilities_name_the_models(call: Call, service: ServiceClient, rest: RestClient) -> None:
    for answer in (
        call(service, "get_server_capabilities"),
        settled(rest.get_server_capabilities()),
    ):
        (model,) = [each for each in answer.supported_models if each.model_name == TIED]
        assert model.max_context_length == MAX_LENGTH
        assert (model.trainable, model.sampleable) == (True, True)


@proves(
    "ServiceClient.get_server_capabilities_async", that="answers several that ask at the same time"
)
def test_capabilities_can_be_asked_for_at_the_same_time(service: ServiceClient) -> None:
    async def ask() -> list[types.GetServerCapabilitiesResponse]:
        return await asyncio.gather(*(service.get_server_capabilities_async() for _ in range(5)))

    assert all(TIED in {m.model_name for m in a.supported_models} for a in asyncio.run(ask()))


@pytest.mark.core
@proves(
    "ServiceClient.copy_weights",
    that="the copy is in the client's project, has the same weights, and cannot be trained",
)
def test_copied_weights_are_the_same_weights(
    stack: TestStack, service: ServiceClient, rest: RestClient, checkpoints: dict[str, str]
) -> None:
    path = checkpoints["sampler_weights"]
    copy = settled(service.copy_weights(path))
    kind, _name = path.split("/")[-2:]
    assert copy != path
    assert copy.split("/")[-2] == kind
    run_id = copy.split("/")[2]
    assert "copy" in refused_training(stack, run_id).message
    listed = settled(rest.list_training_runs(limit=1000, project_id="conformance"))
    assert run_id in {run.training_run_id for run in listed.training_runs}

    def read(each: str) -> list[float | None]:
        sampler = settled(service.create_sampling_client(model_path=each))
        return settled(sampler.compute_logprobs(types.ModelInput.from_ints(PROBES[0])))

    assert read(copy) == read(path)


@pytest.mark.core
@proves("ServiceClient.create_rest_client", that="talks to the same gateway, as the same owner")
def test_a_rest_client_sees_the_session(
    service: ServiceClient, session_id: str, runs: dict[str, TrainingClient]
) -> None:
    session = settled(service.create_rest_client().get_session(session_id))
    assert {run.model_id for run in runs.values()} <= set(session.training_run_ids)


@proves("ServiceClient.get_console_url", that="is an address that names the session")
def test_the_console_address_names_the_session(service: ServiceClient, session_id: str) -> None:
    assert service.get_console_url().endswith(f"/sessions/{session_id}")


@pytest.mark.core
@proves("ServiceClient.close", that="ends the session at once")
def test_a_closed_session_takes_no_work(stack: TestStack) -> None:
    service = ServiceClient()
    session_id = service.holder.get_session_id()
    settled(service.close("success"))
    plain = PlainClient(stack.stack.endpoint)
    answer = plain.http.post(
        "create_sampling_session",
        json={"session_id": session_id, "sampling_session_seq_id": 0, "base_model": TIED},
    )
    assert answer.json()["type"] == "session_finished"


@pytest.mark.parametrize(
    ("how", "reason"),
    [("close", "interrupted"), ("exit", "success"), ("raise", "errored")],
)
@proves(
    "ServiceClient.close",
    that="keeps reason and detail; the end of a `with` block closes, too",
)
def test_closing_keeps_the_reason(rest: RestClient, how: str, reason: str) -> None:
    service = ServiceClient(display_name=f"Ended by {how}")
    session_id = service.holder.get_session_id()
    if how == "close":
        settled(service.close(reason, detail="enough"))
        settled(service.close("success", detail="too late"))
    elif how == "exit":
        with service:
            pass
    else:
        with pytest.raises(ZeroDivisionError), service:
            _ = 1 / 0
    with pytest.raises(RuntimeError, match="closed"):
        service.create_sampling_client(base_model=TIED)
    request = types.SessionSearchRequest(session_id=session_id)
    (found,) = settled(rest.search_sessions(request)).sessions
    assert (found.status.type, found.status.reason.type) == ("client_finished", reason)
    assert found.status.detail == ("enough" if how == "close" else None)


@proves(
    "ServiceClient.get_telemetry",
    "TrainingClient.get_telemetry",
    "SamplingClient.get_telemetry",
    "RestClient.get_telemetry",
    "AdminClient.get_telemetry",
    that="sends the client's events, and the gateway accepts them",
)
def test_telemetry_is_accepted(
    service: ServiceClient,
    runs: dict[str, TrainingClient],
    base_sampler: tinker.SamplingClient,
    rest: RestClient,
    admin: tinker.AdminClient,
) -> None:
    for client in (service, runs["lora"], base_sampler, rest, admin):
        telemetry = client.get_telemetry()
        assert telemetry is not None
        telemetry.log("conformance", event_data={"client": type(client).__name__})
        telemetry._trigger_flush()
        drained = service.holder.run_coroutine_threadsafe(telemetry._wait_until_drained())
        assert drained.result(timeout=240), "the gateway took what was sent"


@pytest.mark.core
@proves_both(
    "ServiceClient.create_sampling_client",
    that="samples the base model, and refuses what it does not know with a typed error",
)
def test_a_base_sampler_is_the_base_model(call: Call, service: ServiceClient, base) -> None:
    sampler = call(service, "create_sampling_client", base_model=TIED)
    found = settled(sampler.compute_logprobs(types.ModelInput.from_ints(PROBES[0])))
    assert found[1:] == pytest.approx(plain_logprobs(base, PROBES[:1])[0].tolist(), abs=1e-4)
    unknown = refusal(
        lambda: call(service, "create_sampling_client", base_model="nobody/has-this-model")
    )
    assert "nobody/has-this-model" in unknown.message
    with pytest.raises(ValueError, match="must be provided"):
        call(service, "create_sampling_client")
