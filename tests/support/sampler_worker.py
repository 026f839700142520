"""A gRPC client of a real sampler process, and weight versions for it."""

from __future__ import annotations

import itertools
import shutil
import string
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tandem.protocol.fencing import LEASE_METADATA_KEY
from tandem.protocol.worker import WorkerSpec
from tandem.settings.workers import SamplerEnvironment, SamplerSettings
from tandem.v1 import common_pb2, sampler_pb2, sampler_pb2_grpc
from tandem.weights import (
    Canary,
    Manifest,
    PartialVersion,
    checksum_file,
    new_version_name,
    version_path,
)
from tandem.weights.sums import TensorSums
from tandem.wire.v1 import tinker_pb2 as wire
from tests.support.worker_process import (
    CALL_SECONDS,
    RUN,
    SECRET,
    SESSION,
    Started,
    WorkerClient,
    worker_process,
)

LENGTH = 512
"""The length of the models in `tests/component/sampler/conftest.py`."""
EOS = 1
PROMPT = [5, 9, 30, 41]
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " "


def text(tokens: Sequence[int]) -> str:
    """Return the tokens' text, without the end token."""
    return "".join(CHARACTERS[token - 3] for token in tokens if token != EOS)


def plain_distribution(model: Path, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Return logprobs [T-1, vocabulary] at tokens[1:], by plain transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([list(tokens)])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).numpy()


def plain_logprobs(model: Path, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """See `plain_distribution`."""
    distribution = plain_distribution(model, tokens, temperature)
    return np.take_along_axis(distribution, np.asarray(tokens[1:])[:, None], axis=1)[:, 0]


def publish(
    weights_of: Path, data_dir: Path, *, number: int, canary: Sequence[int] = (5, 9, 7, 20, 33, 4)
) -> common_pb2.WeightVersion:
    """Publish a model directory's weights like a trainer with two ranks."""
    from safetensors.torch import load_file, save_file

    name = new_version_name(run_id=RUN, number=number)
    partial = PartialVersion(version_path(data_dir, name))
    partial.create()
    tensors = {
        k: v for file in weights_of.glob("*.safetensors") for k, v in load_file(file).items()
    }
    names, sums = sorted(tensors), TensorSums("float32")
    tensors = dict(sums.summing(tensors.items()))
    files = []
    for rank in range(2):
        file = partial.path / f"model-{rank + 1:05d}-of-00002.safetensors"
        save_file({key: tensors[key] for key in names[rank::2]}, file)
        files.append(checksum_file(file))
    logprobs = plain_logprobs(weights_of, canary).tolist()
    manifest = Manifest(
        version=name,
        run_id=RUN,
        step=number,
        dtype="float32",
        tensors=len(tensors),
        sums=sums.by_tensor(),
        created="2026-01-01T00:00:00Z",
        files=files,
        canary=Canary(tokens=list(canary), logprobs=logprobs),
    )
    partial.commit(manifest)
    return common_pb2.WeightVersion(name=name, path=str(partial.final), run_id=RUN, step=number)


def publish_adapter(
    adapter: Path,
    data_dir: Path,
    *,
    number: int,
    merged: Path,
    canary: Sequence[int] = (5, 9, 7, 20, 33, 4),
) -> common_pb2.WeightVersion:
    """`merged` holds the equivalent plain weights."""
    name = new_version_name(run_id=RUN, number=number)
    partial = PartialVersion(version_path(data_dir, name))
    partial.create()
    for file in adapter.iterdir():
        shutil.copy(file, partial.path)
    manifest = Manifest(
        version=name,
        run_id=RUN,
        step=number,
        adapter=True,
        dtype="float32",
        tensors=1,
        created="2026-01-01T00:00:00Z",
        files=[checksum_file(file) for file in sorted(partial.path.iterdir())],
        canary=Canary(tokens=list(canary), logprobs=plain_logprobs(merged, canary).tolist()),
    )
    partial.commit(manifest)
    return common_pb2.WeightVersion(
        name=name, path=str(partial.final), run_id=RUN, step=number, adapter=True
    )


def rewrite_manifest(version: common_pb2.WeightVersion, **changes: object) -> None:
    """Change a manifest and update its checksums."""
    path = Path(version.path)
    manifest = Manifest.model_validate_json((path / "manifest.json").read_bytes())
    files = [checksum_file(path / entry.name) for entry in manifest.files]
    changed = manifest.model_copy(update={"files": files, **changes})
    (path / "manifest.json").write_text(changed.model_dump_json())


@dataclass(frozen=True)
class Sample:
    tokens: list[int]
    logprobs: np.ndarray
    stopped: bool
    topk: wire.TopkLogprobs | None = None


@dataclass(frozen=True)
class Sampled:
    version: str
    samples: list[Sample]
    prompt_logprobs: np.ndarray | None
    message: wire.SampleResponse
    reply: sampler_pb2.SampleReply


def decoded(reply: sampler_pb2.SampleReply) -> Sampled:
    assert not reply.HasField("failure"), reply.failure
    message = wire.SampleResponse.FromString(reply.response)
    return Sampled(
        version=message.tandem_weight_version,
        samples=[
            Sample(
                tokens=np.frombuffer(each.tokens, "<i4").tolist(),
                logprobs=np.frombuffer(each.logprobs, "<f4"),
                stopped=each.stop_reason == wire.STOP_REASON_STOP,
                topk=each.topk_sampled_logprobs if each.HasField("topk_sampled_logprobs") else None,
            )
            for each in message.sequences
        ],
        prompt_logprobs=(
            np.frombuffer(message.prompt_logprobs, "<f4")
            if message.HasField("prompt_logprobs")
            else None
        ),
        message=message,
        reply=reply,
    )


def assert_computed_by(weights: Path, prompt: Sequence[int], answer: Sampled) -> None:
    """Assert that sampled and prompt logprobs equal a plain forward pass."""
    for sample in answer.samples:
        expected = plain_logprobs(weights, [*prompt, *sample.tokens])[len(prompt) - 1 :]
        assert np.abs(expected - sample.logprobs).max() < 1e-4
    if answer.prompt_logprobs is not None:
        difference = answer.prompt_logprobs[1:] - plain_logprobs(weights, prompt)
        assert np.abs(difference).max() < 1e-4


def tokens_of(answer: Sampled) -> list[list[int]]:
    return [sample.tokens for sample in answer.samples]


def same(one: Sampled, other: Sampled) -> bool:
    """Compare bit by bit: tokens, logprobs, prompt logprobs, top-k."""
    pairs = zip(one.message.sequences, other.message.sequences, strict=True)
    return all(a == b for a, b in pairs) and (
        one.message.prompt_logprobs == other.message.prompt_logprobs
    )


class Answer:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def result(self) -> sampler_pb2.SampleReply:
        (replies,) = self._stream
        (reply,) = replies.replies
        return reply

    def cancel(self) -> None:
        self._stream.cancel()


class SamplerClient(WorkerClient):
    def __init__(self, started: Started, model: Path) -> None:
        super().__init__(started)
        self.base = common_pb2.WeightVersion(name="base/tiny", path=str(model))
        self.stub = sampler_pb2_grpc.SamplerStub(self.channel)
        self.numbers = itertools.count()
        self.token = 0

    def describe(self) -> sampler_pb2.DescribeSamplerReply:
        return self.stub.Describe(
            sampler_pb2.DescribeSamplerRequest(), metadata=self.metadata, timeout=CALL_SECONDS
        )

    def load(
        self,
        version: common_pb2.WeightVersion,
        *,
        in_flight: bool = False,
        handoff: common_pb2.Handoff | None = None,
    ) -> sampler_pb2.LoadReply:
        return self.stub.Load(
            sampler_pb2.LoadRequest(version=version, in_flight=in_flight, handoff=handoff),
            metadata=self.metadata,
            timeout=CALL_SECONDS,
        )

    def lease(self, token: int) -> None:
        secret = [(key, value) for key, value in self.metadata if key != LEASE_METADATA_KEY]
        self.metadata = (*secret, (LEASE_METADATA_KEY, str(token)))
        self.token = token

    def sleep(self, level: int = 1) -> common_pb2.SwitchReply:
        """Put it to sleep with the next token."""
        return self.send_sleep(level).result()

    def send_sleep(self, level: int = 1) -> Any:
        self.lease(self.token + 1)
        return self.stub.Sleep.future(
            common_pb2.SleepRequest(level=level), metadata=self.metadata, timeout=CALL_SECONDS
        )

    def wake(self, version: common_pb2.WeightVersion | None = None) -> common_pb2.SwitchReply:
        """Wake it with the next token."""
        return self.send_wake(version).result()

    def send_wake(self, version: common_pb2.WeightVersion | None = None) -> Any:
        self.lease(self.token + 1)
        return self.stub.Wake.future(
            common_pb2.WakeRequest(version=version), metadata=self.metadata, timeout=CALL_SECONDS
        )

    def request(
        self,
        prompt: Sequence[int],
        *,
        version: common_pb2.WeightVersion | None = None,
        n: int = 1,
        max_tokens: int | None = 8,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] | Sequence[int] | None = None,
        prompt_logprobs: bool = False,
        topk: int = 0,
        prompt_topk: int = 0,
        last_n: int | None = None,
        targets: wire.Tensor | None = None,
        draws: int = 0,
        structured: sampler_pb2.StructuredOutput | None = None,
        in_flight: bool = False,
    ) -> sampler_pb2.SampleRequest:
        """Build a request like the gateway. `stop` has the SDK's meaning."""
        number = next(self.numbers)
        return sampler_pb2.SampleRequest(
            operation_id=f"op-{number}",
            session_id=SESSION,
            seq_id=number,
            version=version or self.base,
            prompt_tokens=np.asarray(prompt, "<i4").tobytes(),
            num_samples=n,
            params=sampler_pb2.SamplingParams(
                max_tokens=max_tokens,
                seed=seed,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                stop_given=stop is not None,
                stop_strings=[s for s in stop or () if isinstance(s, str)],
                stop_token_ids=[s for s in stop or () if isinstance(s, int)],
            ),
            prompt_logprobs=prompt_logprobs,
            topk_sample_logprobs=topk,
            topk_prompt_logprobs=prompt_topk,
            prompt_logprobs_last_n=last_n,
            target_prompt_tokens=b"" if targets is None else targets.SerializeToString(),
            prompt_alt_tokens_k=draws,
            structured=structured,
            in_flight=in_flight,
        )

    def send(self, request: sampler_pb2.SampleRequest) -> Any:
        """On a separate stream. Returns a future."""
        return Answer(
            self.stub.Sample(
                iter([sampler_pb2.SampleRequests(requests=[request])]),
                metadata=self.metadata,
                timeout=CALL_SECONDS,
            )
        )

    def sample_all(self, requests: Sequence[sampler_pb2.SampleRequest]) -> list[Sampled]:
        return [decoded(call.result()) for call in [self.send(each) for each in requests]]

    def sample(self, prompt: Sequence[int], **arguments: Any) -> Sampled:
        return decoded(self.send(self.request(prompt, **arguments)).result())

    def refusal(self, request: sampler_pb2.SampleRequest) -> common_pb2.Failure:
        reply = self.send(request).result()
        assert reply.HasField("failure"), "the request was answered"
        return reply.failure

    def assert_serves(self, version: common_pb2.WeightVersion, weights: Path) -> None:
        """Assert that a version answers itself, with the logprobs of these weights."""
        answer = self.sample(
            PROMPT, version=version, seed=2, max_tokens=20, stop=[], prompt_logprobs=True
        )
        assert answer.version == version.name
        assert answer.prompt_logprobs is not None
        assert_computed_by(weights, PROMPT, answer)

    def metric(self, name: str) -> float:
        host = self.report.address.rpartition(":")[0]
        url = f"http://{host}:{self.report.metrics_port}/metrics"
        metrics = urllib.request.urlopen(url, timeout=CALL_SECONDS).read().decode()
        (line,) = [line for line in metrics.splitlines() if line.startswith(f"{name} ")]
        return float(line.rpartition(" ")[2])

    @property
    def resident_bytes(self) -> int:
        """Include the engine's own process."""
        sampler = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in (sampler, *sampler.children(recursive=True)))


@contextmanager
def sampler_process(
    model: Path,
    *,
    wait: bool = True,
    lease: int = 0,
    devices: tuple[str, ...] = (),
    **settings: Any,
) -> Iterator[SamplerClient]:
    """Start a sampler with these `SamplerSettings`."""
    chosen = {"device": "cpu", "kv_cache_bytes": 64 * 2**20, **settings}
    spec = WorkerSpec(
        worker_id="sampler-test",
        kind="sampler",
        secret=SECRET,
        model_name="tiny",
        model_path=str(model),
        session_id=SESSION,
        lease=lease,
        devices=devices,
        sampler=SamplerSettings.of(SamplerEnvironment(), **chosen),
    )
    with worker_process(spec) as started, SamplerClient(started, model) as client:
        if lease:
            client.lease(lease)
        if wait:
            client.wait_until_serving()
        yield client
