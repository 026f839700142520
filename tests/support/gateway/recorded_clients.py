"""The clients whose requests are recorded: the SDK, and programs that call our own routes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import httpx
import tinker
from tinker import types

from gateway.workers.run_options import RunOptions
from tests.support.gateway.running import KEY

DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={
        "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3]),
        "weights": types.TensorData(data=[1.0, 1.0, 0.5], dtype="float32", shape=[3]),
    },
)


def _settled(found: Any) -> Any:
    return found.result() if hasattr(found, "result") else found


def use_sdk(url: str) -> None:
    """One session: adapters and all parameters, a step, checkpoints, samplers, and a mistake."""
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    with service if hasattr(service, "__enter__") else nullcontext():
        lora = _settled(service.create_lora_training_client("tiny", rank=8, seed=1))
        full = _settled(service.create_lora_training_client("tiny:full"))
        for run in (lora, full):
            run.forward_backward([DATUM], "cross_entropy").result()
            run.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        state = lora.save_state("first").result().path
        _settled(service.create_training_client_from_state(state))
        weights = lora.save_weights_for_sampler("served").result().path
        prompt = types.ModelInput.from_ints([1, 2])
        for sampler in (
            service.create_sampling_client(model_path=weights),
            service.create_sampling_client(base_model="tiny"),
        ):
            few = types.SamplingParams(max_tokens=2, seed=1)
            _settled(sampler).sample(prompt=prompt, num_samples=2, sampling_params=few).result()
        try:
            _settled(service.create_lora_training_client("another model"))
        except tinker.NotFoundError:
            return


_RUNS: tuple[dict[str, object], ...] = (
    {},
    {
        "ranks": 4,
        "shards": 2,
        "tensor_parallel": 2,
        "dtype": "bfloat16",
        "states": "bfloat16",
        "offload": "moments",
        "compile": "on",
        "backend": "fsdp2",
        "group": "train",
        "sampler": "none",
        "memory": "20GiB",
        "host_memory": "30GiB",
        "start_timeout": 900,
        "priority": 3,
        "deadline": 3600,
        "keep_states": 2,
        "recovery": "off",
        "share": "never",
        "sharing": "exclusive",
    },
    {
        "sampler_group": "serve",
        "sampler_memory": "8GiB",
        "sampler_host_memory": "9GiB",
        "sampler_ranks": 2,
        "replicas": 2,
        "min_replicas": 1,
        "max_replicas": 2,
        "share": "always",
    },
    {"ranks": 3, "shards": 2},
    {"unknown": 1},
)
"""The options of each recorded run, without `tandem.`. The last two are refused."""


def recorded_options() -> set[str]:
    return {name for run in _RUNS for name in run}


def known_options() -> set[str]:
    return {*RunOptions.model_fields, "recovery"}


def use_routes(url: str) -> None:
    """Our own routes, and runs with each of the `tandem.` names."""
    headers = {"X-API-Key": KEY, "Accept": "application/json"}
    with httpx.Client(base_url=url, headers=headers, timeout=60, verify=False) as client:

        def ask(method: str, path: str, **body: object) -> dict[str, Any]:
            """Return the answer, or that of its future."""
            answer = client.request(method, path, json=body or None)
            told = answer.json() if "json" in answer.headers.get("content-type", "") else {}
            if isinstance(told, dict) and (request_id := told.get("request_id")):
                answer = httpx.Response(408)
                while answer.status_code == 408:
                    question = {"request_id": request_id}
                    answer = client.post("/api/v1/retrieve_future", json=question)
                return told | answer.json()
            return told

        def sample(sampler_id: str) -> None:
            ask(
                "POST",
                "/api/v1/asample",
                sampling_session_id=sampler_id,
                seq_id=0,
                prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                sampling_params={"max_tokens": 2},
            )

        runs = []
        for number, options in enumerate(_RUNS):
            session = ask("POST", "/api/v1/create_session", tags=[], sdk_version="0.38.0")
            adapters = number == 2
            lora = {"lora_config": {"rank": 4, "seed": 7}} if adapters else {}
            told = ask(
                "POST",
                "/api/v1/create_model",
                session_id=session["session_id"],
                model_seq_id=0,
                base_model="tiny" if adapters else "tiny:full",
                user_metadata={f"tandem.{name}": value for name, value in options.items()},
                **lora,
            )
            runs.append(told.get("model_id"))
        served = ask(
            "POST",
            "/api/v1/save_weights_for_sampler",
            model_id=runs[2],
            seq_id=1,
            sampling_session_seq_id=0,
        )
        sample(served["sampling_session_id"])
        run, session_id = runs[0], runs[0].partition(":")[0]
        sampler = ask(
            "POST",
            "/api/v1/create_sampling_session",
            session_id=session_id,
            sampling_session_seq_id=0,
            base_model="tiny",
        )
        sample(sampler["sampling_session_id"])
        own = "/api/tandem/v1"
        ask("PATCH", f"{own}/runs/{run}", name="first", tags=["recorded"])
        ask("POST", f"{own}/runs/{run}/metrics", rows=[{"step": 0, "values": {"loss": 1.0}}])
        ask("POST", f"{own}/logprobs", model="tiny", sequences=[[1, 2, 3]])
        ask("PUT", f"{own}/samplers/{session_id}/replicas", replicas=1)
        ask("POST", f"{own}/groups/serve-3/drain")
        ask("DELETE", f"{own}/groups/serve-3/drain")
        ask("POST", f"{own}/keys", owner="ann", role="member")
        ask("PATCH", f"{own}/owners/ann", runs=3)
        row = json.dumps({"prompt": "2 + 2 =", "completion": " 4"})
        job: dict[str, Any] = {"backend": "trl", "model": "tiny", "data": {"train": row}}
        for settings in ({"method": "sft", "steps": 3}, {"method": "sft", "rate": 1}):
            ask("POST", f"{own}/jobs", **job, processes=2, configuration=settings)
        for path in ("runs", f"runs/{run}", f"runs/{run}/events", "models", "groups", "status"):
            ask("GET", f"{own}/{path}")
        ask("POST", f"{own}/runs/{run}/stop", save=False)
