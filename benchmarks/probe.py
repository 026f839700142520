"""One running stack that measures on command: `python probe.py MODEL`, with PYTHONPATH a checkout.

It answers each line, the name of a measurement, with a line of JSON. It imports nothing of
`benchmarks`, so that it can measure another commit's checkout (`versus.py`)."""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path

import tinker
from tinker import types

from tandem.protocol.own_machine import http_client
from tandem.stack import Stack
from tandem.wire.v1 import tinker_pb2


class Probe:
    def __init__(self, stack: Stack, service: tinker.ServiceClient) -> None:
        self._stack = stack
        self._client = service.create_lora_training_client("bench/model:full").result()
        self._sampler = self._client.save_weights_and_get_sampling_client().result()
        self._service = service
        self._seq_id = 0
        self._seed = 0

    @cached_property
    def _plain_run(self) -> tinker.TrainingClient:
        """A run without a sampler."""
        return self._service.create_lora_training_client("bench/model:full").result()

    def empty_operation_ms(self) -> float:
        """Median of 100 operations that do nothing: accepted, logged, refused, fetched."""
        samples, run_id = [], self._plain_run.get_info().model_id
        headers = {"X-API-Key": self._stack.endpoint.api_key}
        with http_client(f"{self._stack.endpoint.url}/api/v1", headers=headers) as http:
            for _ in range(100):
                self._seq_id += 1
                body = {
                    "model_id": run_id,
                    "seq_id": self._seq_id,
                    "adam_params": {"learning_rate": 1e-4},
                }
                started = time.perf_counter()
                accepted = http.post("optim_step", json=body).raise_for_status().json()
                http.post(
                    "retrieve_future", json={"request_id": accepted["request_id"]}, timeout=60
                )
                samples.append(time.perf_counter() - started)
        return statistics.median(samples) * 1e3

    def gateway_cpu_ms_per_empty_operation(self) -> float:
        """The gateway's processor time over such 100 operations."""
        before = self._gateway_cpu_seconds()
        self.empty_operation_ms()
        return (self._gateway_cpu_seconds() - before) / 100 * 1e3

    def gateway_cpu_ms_per_32_mib(self) -> float:
        """The gateway's processor time per forward_backward of 32 MiB, over eight of them.

        The sequence is too long for the model, so the trainer refuses it at once."""
        run_id = self._plain_run.get_info().model_id
        message = tinker_pb2.ForwardBackwardRequest(model_id=run_id, loss_fn="cross_entropy")
        message.data.add().model_input.add().encoded_text.tokens = bytes(32 * 2**20)
        headers = {"X-API-Key": self._stack.endpoint.api_key}
        protobuf = {"Content-Type": "application/x-protobuf"}
        before = self._gateway_cpu_seconds()
        with http_client(f"{self._stack.endpoint.url}/api/v1", headers=headers) as http:
            for _ in range(8):
                self._seq_id += 1
                message.seq_id = self._seq_id
                http.post(
                    "forward_backward", content=message.SerializeToString(), headers=protobuf
                ).raise_for_status()
                http.post("retrieve_future", json={"request_id": f"{run_id}:{self._seq_id}"})
        return (self._gateway_cpu_seconds() - before) / 8 * 1e3

    def forward_backward_tokens_per_second(self) -> float:
        """One request of 64 × 128 tokens."""
        data = [_datum(_tokens(129, seed)) for seed in range(64)]
        started = time.perf_counter()
        self._client.forward_backward(data, "cross_entropy").result()
        return 64 * 128 / (time.perf_counter() - started)

    def updates_per_second(self) -> float:
        """20 forward_backwards of 64 × 8 tokens, each with its optim_step, pipelined."""
        data = [_datum(_tokens(9, seed)) for seed in range(64)]
        started = time.perf_counter()
        futures = []
        for _ in range(20):
            futures.append(self._client.forward_backward(data, "cross_entropy"))
            futures.append(self._client.optim_step(types.AdamParams(learning_rate=1e-6)))
        for future in futures:
            future.result()
        return 20 / (time.perf_counter() - started)

    def gateway_cpu_ms_per_update(self) -> float:
        """The gateway's processor time over such 20 updates."""
        before = self._gateway_cpu_seconds()
        self.updates_per_second()
        return (self._gateway_cpu_seconds() - before) / 20 * 1e3

    def publish_to_served_seconds(self) -> float:
        started = time.perf_counter()
        self._sampler = self._client.save_weights_and_get_sampling_client().result()
        return time.perf_counter() - started

    def sampled_tokens_per_second(self) -> float:
        """64 requests of one sample of 64 tokens."""
        return self._sample(requests=64, samples=1, tokens=64)

    def short_samples_per_second(self) -> float:
        """100 requests of 8 samples of 4 tokens."""
        return self._sample(requests=100, samples=8, tokens=4) / 4

    def _sample(self, *, requests: int, samples: int, tokens: int) -> float:
        started = time.perf_counter()
        futures = []
        for index in range(requests):
            self._seed += 1
            params = types.SamplingParams(max_tokens=tokens, seed=self._seed, stop=[])
            prompt = types.ModelInput.from_ints([20 + index % 10, 30 + index // 10 % 10, 40, 21])
            futures.append(self._sampler.sample(prompt, samples, params))
        found = sum(len(s.tokens) for future in futures for s in future.result().sequences)
        return found / (time.perf_counter() - started)

    def _gateway_cpu_seconds(self) -> float:
        pid = json.loads((self._stack.data_dir / "gateway.json").read_text())["pid"]
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


def _tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 98) for _ in range(count)]


def _datum(tokens: list[int]) -> types.Datum:
    targets = types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1])
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": targets},
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        settings = {"port": "0", "trainer_ranks": "1"}
        with Stack(data_dir=Path(work) / "data", settings=settings) as stack:
            stack.add_model(name="bench/model", path=Path(sys.argv[1]))
            endpoint = stack.endpoint
            with tinker.ServiceClient(base_url=endpoint.url, api_key=endpoint.api_key) as service:
                probe = Probe(stack, service)
                print(json.dumps("ready"), flush=True)
                for line in sys.stdin:
                    print(json.dumps(getattr(probe, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
