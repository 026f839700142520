from __future__ import annotations

import asyncio
import shutil
import threading

import pytest
from sqlalchemy import insert

from gateway.checkpoints.collector import GarbageCollector
from gateway.checkpoints.versions import WeightVersion
from gateway.identifiers import relative_version_folder
from gateway.storage.tables import sampling_sessions
from tandem.errors import CheckpointDamaged, UnknownWeights
from tests.support.gateway.checkpoint_store import PATH, RUN, Store, checkpoint, folder
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
async def store(tmp_path):
    store = Store(tmp_path)
    await store.database.open()
    yield store
    await store.database.close()


async def test_what_a_crash_left_without_a_name_goes_at_the_next_start(store):
    named = folder(store, "checkpoints/s-1_train_0/a-11111111")
    await store.checkpoints.put(checkpoint(store, "checkpoints/s-1_train_0/a-11111111"))
    version = WeightVersion(
        name=f"{RUN}/v000001-55555555", path="", run_id=RUN, step=0, base_model="tiny"
    )
    await store.versions.add_version(version)
    for left in (
        "checkpoints/s-1_train_0/.partial-c-33333333",
        "checkpoints/s-9_train_0/.partial-d-44444444",  # a copy for a run that was never created
        "weights/s-1_train_0/v000001-55555555",
        "weights/s-1_train_0/.partial-v000002-66666666",
        "weights/.trash/7777777777777777",  # moved away, killed before the removal
        "checkpoints/.trash/8888888888888888",
    ):
        folder(store, left)
    await store.collector.collect_all()
    await store.collector.empty_trash()
    found = [path for path in store.data_dir.rglob("*") if path.name == "file"]
    assert found == [named / "file"]
    assert not (store.data_dir / "checkpoints" / "s-9_train_0").exists()
    assert store.trash() == []


async def test_names_of_checkpoints_and_sampling_sessions_and_uses_keep_versions(store):
    names = {key: f"{RUN}/v00000{i}-{i}{i}{i}{i}{i}{i}{i}{i}" for i, key in enumerate("abcd")}
    for name in names.values():
        path = folder(store, f"weights/s-1_train_0/{name.rpartition('/')[2]}")
        version = WeightVersion(name=name, path=str(path), run_id=RUN, step=0, base_model="tiny")
        await store.versions.add_version(version)
    relative = f"weights/s-1_train_0/{names['a'].rpartition('/')[2]}"
    await store.checkpoints.put(
        checkpoint(store, relative, path=f"tinker://{RUN}/sampler_weights/a")
    )
    await store.database.write(
        insert(sampling_sessions).values(
            id="s-1:sample:0",
            session_id="s-1",
            kind="named",
            base_model="tiny",
            run_id=RUN,
            version=names["b"],
            state="active",
            created_at=0.0,
        )
    )
    with store.checkpoints.pins.pinned(relative_version_folder(names["c"])):
        assert await store.collector.collect(RUN) is False, "what is in use is worth another look"
        left = {p.name for p in (store.data_dir / "weights/s-1_train_0").iterdir()}
        assert left == {names[key].rpartition("/")[2] for key in "abc"}
        with pytest.raises(UnknownWeights):
            await store.versions.version(names["d"])
    assert await store.collector.collect(RUN) is True
    assert (await store.versions.version(names["b"])).name == names["b"]


async def test_what_is_read_stays_and_goes_when_the_reader_has_ended(store):
    path = folder(store, "checkpoints/s-1_train_0/a-11111111")
    saved = checkpoint(store, "checkpoints/s-1_train_0/a-11111111")
    await store.checkpoints.put(saved)
    async with store.reading(PATH) as reading:
        await store.checkpoints.delete(reading)
        assert await store.collector.collect(RUN) is False
        assert (path / "file").read_text() == "content"
    assert await store.collector.collect(RUN) is True
    assert not path.exists()
    with pytest.raises(UnknownWeights):
        async with store.reading(PATH):
            pass
    assert store.checkpoints.pins.folders() == set()
    assert not store.checkpoints.pins.is_resolving(RUN)


async def test_nothing_of_a_run_goes_while_one_of_its_names_is_looked_up(store):
    path = folder(store, "checkpoints/s-1_train_0/a-11111111")
    store.checkpoints.given_up[RUN].add("checkpoints/s-1_train_0/a-11111111")
    with store.checkpoints.pins.resolving(RUN), store.checkpoints.pins.resolving(RUN):
        assert await store.collector.collect(RUN) is False
    assert path.exists()
    assert store.checkpoints.take_marked() == [RUN], "it is looked at again"
    assert await store.collector.collect(RUN) is True
    assert not path.exists()


async def test_a_save_that_is_named_while_the_collector_looks_stays(tmp_path):
    """The collector saw the folder before the save got its name and unpinned it."""
    seen, go_on = asyncio.Event(), asyncio.Event()

    class Slow(GarbageCollector):
        async def _named(self, run_id):
            seen.set()
            await go_on.wait()
            return await super()._named(run_id)

    store = Store(tmp_path, collector=Slow)
    await store.database.open()
    pins = store.checkpoints.pins
    relative = "checkpoints/s-1_train_0/a-11111111"
    path = folder(store, relative)
    pins.pin(relative)
    collecting = asyncio.create_task(store.collector.collect(RUN))
    await asyncio.wait_for(seen.wait(), 60)
    await store.checkpoints.put(checkpoint(store, relative))
    pins.unpin(relative)
    go_on.set()
    await collecting
    assert path.exists()
    await store.database.close()


async def test_the_newest_states_stay_after_the_clock_went_back(store):
    for name, at in (("c", 100.0), ("b", 50.0), ("a", 50.0)):
        path = f"tinker://{RUN}/weights/{name}"
        saved = checkpoint(store, f"checkpoints/{name}", path=path, created_at=at)
        await store.checkpoints.put(saved)
    await store.checkpoints.release_states(RUN, keep=2)
    (left,) = [batch async for batch in store.checkpoints.of_run(RUN)]
    assert [each.path.name for each in left] == ["b", "a"]


async def test_an_overwrite_leaves_the_old_or_the_new_and_never_neither(store):
    for leaf in ("a-11111111", "a-22222222"):
        folder(store, f"checkpoints/s-1_train_0/{leaf}")
    await store.checkpoints.put(checkpoint(store, "checkpoints/s-1_train_0/a-11111111"))
    stop = asyncio.Event()
    seen = set()

    async def read() -> None:
        while not stop.is_set():
            async with store.reading(PATH) as found:
                assert (store.data_dir / found.folder / "file").exists()
                seen.add(found.relative_folder[-1])

    reader = asyncio.create_task(read())
    overwrites = 0
    async with asyncio.timeout(60):
        while overwrites < 40 or seen != {"1", "2"}:
            leaf = ("a-22222222", "a-11111111")[overwrites % 2]
            await store.checkpoints.put(checkpoint(store, f"checkpoints/s-1_train_0/{leaf}"))
            overwrites += 1
    stop.set()
    await reader


async def test_what_the_disk_refuses_to_remove_is_tried_again(store, monkeypatch):
    def refuse(trash):
        raise PermissionError("no")

    path = folder(store, "checkpoints/s-1_train_0/a-11111111")
    store.checkpoints.given_up[RUN].add("checkpoints/s-1_train_0/a-11111111")
    with monkeypatch.context() as broken:
        broken.setattr("shutil.rmtree", refuse)
        await store.collector.collect(RUN)
        await store.collector.empty_trash()
    assert not path.exists()
    assert len(store.trash()) == 1
    await store.collector.empty_trash()
    assert store.trash() == []


async def test_a_large_removal_holds_up_no_other_collection(store, monkeypatch):
    """Nor the end of a session, which waits for the collection of its runs."""
    removing, go_on, remove = threading.Event(), threading.Event(), shutil.rmtree

    def slow(path):
        removing.set()
        assert go_on.wait(PATIENCE)
        remove(path)

    monkeypatch.setattr("shutil.rmtree", slow)
    large = folder(store, "checkpoints/s-1_train_0/a-11111111")
    other = folder(store, "checkpoints/s-2_train_0/b-22222222")
    for run_id, path in ((RUN, large), ("s-2:train:0", other)):
        store.checkpoints.given_up[run_id].add(str(path.relative_to(store.data_dir)))
    try:
        first = asyncio.create_task(store.collector.collect(RUN, ended=True))
        assert await asyncio.to_thread(removing.wait, PATIENCE)
        async with asyncio.timeout(PATIENCE):
            assert await store.collector.collect("s-2:train:0", ended=True) is True
            assert await first is True
        assert not other.parent.exists()
        assert not large.exists()
        assert len(store.trash()) == 2
    finally:
        go_on.set()
    await store.collector.empty_trash()
    assert store.trash() == []


async def test_a_checkpoint_that_cannot_be_read_is_named_without_its_folder(store):
    lost = checkpoint(store, "checkpoints/s-1_train_0/a-11111111")
    with pytest.raises(CheckpointDamaged, match=r"directory: 'checkpoint\.json'"):
        await store.versions.files(lost)
