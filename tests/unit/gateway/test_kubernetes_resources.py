from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gateway.admin.pod_resources import table
from gateway.workers.declared_groups import group_of_claim, groups_of
from gateway.workers.launchers.kubernetes.resources import pod_request, resources_of
from gateway.workers.model_sizes import known_size, read_ahead, read_size
from gateway.workers.needs import Needs, engine_needs, trainer_needs
from gateway.workers.request_maker import RequestMaker
from gateway.workers.requests import WorkerRequest
from gateway.workers.run_options import RunOptions
from tandem.agent.host import Host
from tandem.backends.memory import ModelSize
from tandem.errors import InvalidRequest
from tandem.protocol.worker import Layout, LoraSpec, TrainingSpec, WorkerSpec
from tandem.settings.cluster import ClaimPoolSettings
from tandem.settings.gateway import GatewaySettings
from tandem.settings.workers import SamplerSettings, TrainerSettings
from tests.support.model_files import write_weights

GIB = 2**30
LARGE = ModelSize(
    parameters=8 * 10**9,
    adapter_width=3 * 10**6,
    blocks=(190 * 10**6,) * 36,
    width=36 * 76_000,
    tensors=(2 * 10**8,) * 40,
    vocabulary=150_000,
    hidden=4096,
)
SMALL = ModelSize(
    parameters=10**8,
    adapter_width=10**5,
    blocks=(9 * 10**6,) * 8,
    width=8 * 10_000,
    tensors=(10**6,) * 100,
    vocabulary=50_000,
    hidden=512,
)
LORA = TrainingSpec(lora=LoraSpec(rank=32))


def a_pool(**changes: object) -> ClaimPoolSettings:
    about = {"name": "p", "roles": ["trainer", "sampler"], "device_class": "gpu", "devices": 8}
    return ClaimPoolSettings.model_validate(about | changes)


def requested(
    kind="trainer",
    model: ModelSize | None = LARGE,
    *,
    pool=None,
    ranks=1,
    trainer=None,
    training=None,
    sampler=None,
    host_memory=0,
    settings=None,
):
    """Return what the pods of a worker request, whose user said `host_memory`, or nothing."""
    pool, settings = pool or a_pool(), settings or GatewaySettings()
    group = group_of_claim(pool, 0)
    trainer = trainer or TrainerSettings(ranks=ranks)
    sampler = sampler or SamplerSettings()

    def needs() -> Needs:
        assert model is not None
        if kind == "sampler":
            return engine_needs(model, group=group, sampler=sampler)
        return trainer_needs(
            model,
            group=group,
            trainer=trainer,
            training=training or TrainingSpec(),
            snapshots=settings.recovery_enabled,
            runs=8,
        )

    spec = WorkerSpec(
        worker_id="w",
        kind=kind,
        secret="",
        model_name="m",
        model_path="m",
        session_id="s",
        trainer=trainer if kind == "trainer" else None,
        sampler=sampler if kind == "sampler" else None,
    )
    request = WorkerRequest(
        key="w",
        kind="trainer" if kind == "trainer" else "engine",
        owner="",
        session="s",
        ranks=trainer.ranks if kind == "trainer" else sampler.ranks,
        host_bytes=host_memory,
    )
    memory = pod_request(request, needs, [pool]).host_bytes
    spec = spec.model_copy(update={"host_memory": memory})
    return resources_of(spec, pool=pool, settings=settings)


def test_a_trainer_that_may_sleep_needs_its_state_on_the_host():
    weights = LARGE.parameters * 4
    asleep = requested().memory
    assert asleep >= 7 * weights  # weights, gradients, two moments, and three copies for a snapshot
    assert requested(training=LORA).memory < asleep
    assert requested(pool=a_pool(awake=0)).memory < asleep


def test_states_in_bfloat16_need_half_and_moments_on_the_host_are_there_awake_too():
    settings = GatewaySettings(recovery_enabled=False)
    awake = {"pool": a_pool(awake=0), "settings": settings}
    whole, half = requested().memory, requested(training=TrainingSpec(states="bfloat16")).memory
    assert whole - half >= 3 * LARGE.parameters * 4
    on_host = requested(training=TrainingSpec(offload="moments"), **awake).memory
    assert on_host >= requested(**awake).memory + LARGE.parameters * 4
    assert on_host >= 2 * LARGE.parameters * 4
    small = requested(training=TrainingSpec(states="bfloat16", offload="moments"), **awake).memory
    assert on_host - small >= LARGE.parameters * 4
    weights = requested(training=TrainingSpec(offload="weights"), **awake).memory
    assert weights >= on_host + (LARGE.parameters + LARGE.pinned(1)) * 4, "with pinned gradients"
    frozen = requested(training=LORA.model_copy(update={"offload": "weights"}), **awake).memory
    assert frozen >= requested(training=LORA, **awake).memory + LARGE.parameters


def test_the_host_of_a_trainer_that_is_always_awake_never_has_the_model():
    awake = requested(pool=a_pool(awake=0), training=LORA)
    assert awake.memory >= LARGE.vocabulary * LARGE.hidden * 4
    assert awake.memory < LARGE.parameters * 4
    assert awake.memory < requested(training=LORA, pool=a_pool(awake=1), ranks=1).memory


def test_state_is_divided_among_nodes():
    one = requested(ranks=2, pool=a_pool(devices=2)).memory
    two = requested(ranks=2, pool=a_pool(devices=1, nodes=2, roles=["trainer"])).memory
    assert two < one
    copies = requested(
        ranks=2,
        pool=a_pool(devices=1, nodes=2, roles=["trainer"]),
        training=TrainingSpec(layout=Layout(replicas=2)),
    ).memory
    assert copies - two >= LARGE.parameters * 4 * 7 // 2, "each node has all, with a snapshot"


def test_no_rank_loads_the_whole_model():
    settings = GatewaySettings(recovery_enabled=False)
    awake = requested(ranks=8, pool=a_pool(awake=0), training=LORA, settings=settings)
    assert awake.memory < 2 * 4 * LARGE.parameters


def test_an_engine_that_may_sleep_keeps_its_weights_on_the_host():
    asleep, awake = requested("sampler"), requested("sampler", pool=a_pool(awake=0))
    assert asleep.memory - awake.memory >= LARGE.parameters * 2
    assert awake.memory > LARGE.parameters * 2, "the next version is read beforehand"
    adapters = requested("sampler", sampler=SamplerSettings(max_lora_rank=64))
    assert adapters.memory > asleep.memory


def test_on_a_cpu_the_cache_and_the_weights_are_the_host_s():
    pool = a_pool(device_class="")
    engine = requested("sampler", SMALL, pool=pool, sampler=SamplerSettings(kv_cache_bytes=GIB))
    assert engine.memory > GIB + 4 * SMALL.parameters
    small = requested(model=SMALL, pool=pool, trainer=TrainerSettings(micro_batch_tokens=64))
    large = requested(model=SMALL, pool=pool, trainer=TrainerSettings(micro_batch_tokens=8192))
    assert small.memory > SMALL.parameters * 16
    assert large.memory > small.memory + 8128 * SMALL.hidden * len(SMALL.blocks) * 4


def test_on_a_cpu_the_logits_of_a_chunk_are_the_host_s_whatever_a_micro_batch_has():
    def of(tokens: int, logits_bytes: int) -> int:
        trainer = TrainerSettings(micro_batch_tokens=tokens, logits_bytes=logits_bytes)
        model = replace(SMALL, blocks=(), width=0)
        return requested(model=model, pool=a_pool(device_class=""), trainer=trainer).memory

    assert of(10_000, GIB) == of(1_000_000, GIB)
    assert of(1_000_000, 2 * GIB) >= of(1_000_000, GIB) + 3 * GIB


def test_an_engine_on_several_devices_has_a_process_and_shared_memory_for_each():
    def on(ranks: int, **pool: object):
        sampler = SamplerSettings(ranks=ranks, kv_cache_bytes=4 * GIB)
        return requested("sampler", SMALL, pool=a_pool(awake=0, **pool), sampler=sampler)

    one, four = on(1), on(4)
    assert (one.cpu, four.cpu) == ("4", "16")
    assert four.shared_memory > one.shared_memory
    assert one.memory < four.memory < 4 * one.memory, "they divide the weights"
    cache = 4 * GIB
    assert on(2, device_class="").memory - on(1, device_class="").memory > cache


def test_what_a_session_says_counts_instead():
    assert requested(host_memory=3 * GIB).memory == 3 * GIB
    assert requested("sampler", None, host_memory=3 * GIB).memory == 3 * GIB
    tiny = requested(host_memory=2**20)
    assert tiny.shared_memory <= tiny.memory


def test_cores_are_for_each_rank_and_may_be_parts():
    def of(cpus: float) -> GatewaySettings:
        return GatewaySettings(kubernetes={"cpus": cpus})

    assert requested(ranks=8, settings=of(4)).cpu == "32"
    two_nodes = a_pool(roles=["trainer"], devices=4, nodes=2)
    assert requested(ranks=6, settings=of(4), pool=two_nodes).cpu == "12"
    assert requested("sampler", settings=of(0.5)).cpu == "500m"
    assert requested("sampler", settings=of(0.0001)).cpu == "1m"


def a_model(folder: Path, **tensors: list[int]) -> Path:
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 2})
    )
    for name, shape in tensors.items():
        write_weights(folder, name, shape)
    return folder


def test_the_size_of_a_model_is_read_from_the_headers_of_its_files(tmp_path):
    blocks = {"h.0.weight": [3, 5], "h.0.experts.1.weight": [2, 3, 5], "h.1.norm": [7]}
    size = read_size(a_model(tmp_path, head=[9, 4], **blocks))
    assert size == ModelSize(
        parameters=36 + 15 + 30 + 7,
        adapter_width=13 + 8 + 2 * 8,
        blocks=(45, 7),
        width=8 + 2 * 8,
        tensors=(30, 15, 7, 36),
        vocabulary=9,
        hidden=4,
    )


def test_a_model_whose_size_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="has no safetensors"):
        read_size(tmp_path)
    for header in (b"not json", b"[]", b'{"w": []}', b'{"w": {"shape": 3}}', b'{"w": {}}'):
        length = len(header).to_bytes(8, "little")
        (tmp_path / "model.safetensors").write_bytes(length + header)
        with pytest.raises(InvalidRequest, match=r"the size of the model .* cannot be read"):
            read_size(tmp_path)


@pytest.mark.parametrize("config", ["[]", "null", "not json"])
def test_a_model_whose_configuration_is_no_object_is_refused(tmp_path, config):
    path = a_model(tmp_path, weight=[3, 5])
    (path / "config.json").write_text(config)
    with pytest.raises(InvalidRequest, match=r"the size of the model .* cannot be read"):
        read_size(path)


async def test_the_size_of_a_model_that_was_replaced_is_read_before_the_next_run(tmp_path):
    settings = GatewaySettings(launcher="kubernetes")
    path = a_model(tmp_path, weight=[3, 5])
    await read_ahead(str(path), settings)
    assert known_size(path).parameters == 15
    a_model(tmp_path, weight=[3, 7])
    await read_ahead(str(path), settings)
    assert known_size(path).parameters == 15  # cached, as for each sample
    await read_ahead(str(path), settings, anew=True)
    assert known_size(path).parameters == 21
    (path / "model-weight.safetensors").unlink()
    await read_ahead(str(path), settings, anew=True)
    with pytest.raises(InvalidRequest, match="has no safetensors"):
        known_size(path)
    a_model(tmp_path, weight=[3, 7])
    await read_ahead(str(path), settings)
    assert known_size(path).parameters == 21


def pods(*pools: dict[str, object], **settings: object) -> GatewaySettings:
    return GatewaySettings(launcher="kubernetes", claim_pools=list(pools), **settings)


def test_the_request_of_a_run_that_says_nothing_covers_each_group_that_it_may_get(tmp_path):
    path = a_model(tmp_path, weight=[4096, 4096])
    cpus = {"name": "cpu", "roles": ["trainer", "sampler"], "devices": 4}
    gpus = cpus | {"name": "gpu", "device_class": "gpu.nvidia.com"}
    settings = pods(cpus, gpus, kubernetes={"placement": "shared"})
    host = Host("cluster", cores=(), memory_bytes=0)
    maker = RequestMaker(
        settings=settings,
        groups=lambda: groups_of(settings, host),
        prepare=partial(pod_request, pools=settings.claim_pools),
    )
    about = {"key": "", "owner": "", "session": "", "model": str(path)}

    def of_trainer(**options) -> int:
        made = maker.trainer(
            **about, options=RunOptions(**options), training=TrainingSpec(), engines=()
        )
        return made.host_bytes

    def of_engine(**options) -> int:
        return maker.engine(
            **about, sampler="", options=RunOptions(**options), max_lora_rank=0
        ).host_bytes

    with pytest.raises(InvalidRequest, match=r"the size of the model .* is not known"):
        of_trainer()
    read_size(path)
    assert of_trainer() > of_trainer(group="cpu-0") > 0
    assert of_engine() > of_engine(sampler_group="cpu") > 0
    assert of_engine() < of_engine(sampler_ranks=2)
    assert of_trainer(host_memory=GIB) == GIB
    assert of_engine(host_memory=GIB) == of_engine()


def test_the_table_has_each_worker_of_each_pool(tmp_path):
    path = a_model(tmp_path, weight=[64, 64])
    trainers, samplers = {"name": "t", "roles": ["trainer"]}, {"name": "s", "roles": ["sampler"]}
    rows = table(path, pods(trainers, samplers))
    assert [(row["pool"], str(row["worker"]).split()[0]) for row in rows] == [
        ("t", "trainer"),
        ("t", "trainer"),
        ("s", "sampler"),
    ]
    assert {row["pool"] for row in table(path, GatewaySettings())} == {"cpu"}


def test_a_model_whose_size_cannot_be_read_is_named_without_its_folder(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "model.safetensors").mkdir()
    with pytest.raises(InvalidRequest, match="the size of the model tiny cannot be read") as caught:
        read_size(tmp_path / "tiny")
    assert str(tmp_path) not in caught.value.message
