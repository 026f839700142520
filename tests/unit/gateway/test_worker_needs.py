"""The needs of workers follow from the size of their model."""

from __future__ import annotations

from dataclasses import replace

from gateway.workers.groups import WorkerGroup
from gateway.workers.needs import Needs, engine_needs, job_needs, trainer_needs
from tandem.backends.memory import ModelSize
from tandem.protocol.worker import LoraSpec, TrainingSpec
from tandem.settings.workers import SamplerSettings, TrainerSettings

GIB = 2**30
H100 = 80 * GIB
MODEL = ModelSize(  # 1.5 billion parameters
    parameters=1_500_000_000,
    adapter_width=1_500_000,
    blocks=(46_000_000,) * 28,
    width=28 * 50_000,
    vocabulary=152_000,
    hidden=1536,
)
SMALL = replace(MODEL, parameters=10**7, blocks=(10**6,) * 4, width=4 * 4_000, vocabulary=4096)
BOTH = frozenset({"trainer", "engine"})
GPU = WorkerGroup(name="gpu", kinds=BOTH, devices=("cuda:0",), awake=2, device_bytes=H100)
CORES = WorkerGroup(name="cpu", kinds=BOTH, awake=0, on_host=True, most_ranks=2)


def of_trainer(model=MODEL, *, group=GPU, training=None, ranks=1) -> Needs:
    return trainer_needs(
        model,
        group=group,
        trainer=TrainerSettings(ranks=ranks),
        training=training or TrainingSpec(),
        snapshots=True,
        runs=8,
    )


def of_engine(model=MODEL, *, group=GPU, **settings) -> Needs:
    return engine_needs(model, group=group, sampler=SamplerSettings(**settings))


def test_a_trainer_and_an_engine_of_a_small_model_fit_side_by_side_on_one_gpu():
    trainer, engine = of_trainer().device_bytes, of_engine().device_bytes
    assert trainer > 16 * MODEL.parameters, "weights, gradients and two moments in float32"
    assert engine > 2 * MODEL.parameters + 4 * GIB
    assert trainer + engine + 2 * GPU.context_bytes < H100


def test_two_trainers_of_all_parameters_of_that_model_do_not():
    assert 2 * of_trainer().device_bytes + 2 * GPU.context_bytes > H100


def test_a_larger_gpu_gives_an_engine_a_larger_cache():
    larger = replace(GPU, device_bytes=2 * H100)
    assert of_engine(group=larger).device_bytes - of_engine().device_bytes == H100 // 8
    unknown = replace(GPU, device_bytes=0)
    assert of_engine(group=unknown).device_bytes < of_engine().device_bytes


def test_adapters_need_less_than_all_parameters():
    lora = TrainingSpec(lora=LoraSpec(rank=32))
    assert of_trainer(training=lora).device_bytes < of_trainer().device_bytes
    assert of_engine(max_lora_rank=32).device_bytes > of_engine().device_bytes


def test_host_memory_bounds_places_only_where_all_workers_stay_awake():
    assert of_trainer().host_bytes == of_engine().host_bytes == 0
    awake = replace(GPU, awake=0)
    assert of_trainer(group=awake).host_bytes > 12 * MODEL.parameters, "a snapshot"
    assert of_engine(group=awake).host_bytes > 2 * MODEL.parameters, "the next version"


def test_on_cores_each_rank_has_its_share_of_the_host():
    one, two = of_trainer(SMALL, group=CORES), of_trainer(SMALL, group=CORES, ranks=2)
    assert one.host_bytes == one.device_bytes < 4 * GIB
    assert two.host_bytes == 2 * two.device_bytes
    cache = of_engine(SMALL, group=CORES, kv_cache_bytes=2 * GIB).host_bytes
    assert cache - of_engine(SMALL, group=CORES, kv_cache_bytes=GIB).host_bytes >= GIB


def test_needs_of_several_groups_cover_each():
    one, other = Needs(device_bytes=1, host_bytes=4), Needs(device_bytes=2, host_bytes=3)
    assert one.or_more(other) == Needs(device_bytes=2, host_bytes=4)


def test_each_rank_of_a_job_has_the_whole_model_in_the_memory_of_its_pod():
    def bytes_of(group: WorkerGroup, ranks: int, training: TrainingSpec) -> int:
        return job_needs(MODEL, group=group, ranks=ranks, training=training).host_bytes

    gpus, cores = replace(GPU, pool="train"), replace(CORES, pool="train")
    weights = 4 * MODEL.parameters
    for group in (gpus, cores):
        assert bytes_of(group, 2, TrainingSpec()) > 2 * weights
    assert bytes_of(cores, 1, TrainingSpec()) > bytes_of(cores, 1, TrainingSpec(lora=LoraSpec()))
    assert bytes_of(cores, 1, TrainingSpec()) > 5 * weights, "with state and a reference model"
    assert bytes_of(CORES, 1, TrainingSpec()) == 0, "on a host"
