"""Each migration has a test here, with rows of the tables of the release before."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Column, MetaData, String, event, insert, inspect, select, text

from gateway.checkpoints.base_models import BaseModels
from gateway.checkpoints.versions import WeightVersion
from gateway.storage import migrations
from gateway.storage.database import Database
from gateway.storage.tables import (
    metadata,
    released_folders,
    runs,
    sampling_sessions,
    sessions,
    weight_versions,
)
from tandem.errors import UnknownSchema
from tests.support.gateway.checkpoint_store import RUN, Store, checkpoint, whole
from tests.support.gateway.running import make_model
from tests.support.postgres import url_for

STATE = "checkpoints/s-1_train_0/a-11111111"
VERSION = "weights/s-1_train_0/v000001-22222222"
RELEASED = "checkpoints/s-1_train_0/b-33333333"


pytestmark = pytest.mark.usefixtures("each_database")


def base_models(store):
    models_dir = store.data_dir / "models"
    return BaseModels(database=store.database, data_dir=store.data_dir, models_dir=models_dir)


def schema_of(engine):
    with engine.connect() as connection:
        found = inspect(connection)
        return {
            table: {
                "columns": [
                    {**column, "type": str(column["type"])} for column in found.get_columns(table)
                ],
                "key": found.get_pk_constraint(table)["constrained_columns"],
                "indexes": sorted(
                    (
                        index["name"],
                        index["column_names"],
                        index["unique"],
                        sorted(map(str, index.get("dialect_options", {}).values())),
                    )
                    for index in found.get_indexes(table)
                ),
            }
            for table in found.get_table_names()
            if table != "alembic_version"
        }


async def opened(data_dir):
    data_dir.mkdir(exist_ok=True)
    database = Database(url=url_for(data_dir), data_dir=data_dir)
    await database.open()
    return database


def test_the_newest_revision_is_alembics_head_and_each_file_names_its_own():
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert migrations.newest_revision() == scripts.get_current_head()
    for script in scripts.walk_revisions():
        assert Path(script.path).stem == f"v{script.revision}"


async def test_a_new_database_has_all_tables_and_the_newest_revision(tmp_path):
    database = await opened(tmp_path)
    (row,) = await database.read(text("SELECT version_num FROM alembic_version"))
    assert row["version_num"] == migrations.newest_revision()
    assert schema_of(database._engine).keys() == metadata.tables.keys()
    await database.close()


async def test_a_database_that_was_migrated_opens_again(tmp_path):
    for _ in range(2):
        await (await opened(tmp_path)).close()


async def test_a_first_start_that_ends_in_the_middle_leaves_an_empty_database(tmp_path):
    def fail(*_args, **_options):
        raise OSError("killed")

    sixth = metadata.sorted_tables[5]
    event.listen(sixth, "before_create", fail)
    try:
        with pytest.raises(OSError, match="killed"):
            await opened(tmp_path)
    finally:
        event.remove(sixth, "before_create", fail)
    await (await opened(tmp_path)).close()


@pytest.mark.parametrize("revision", ["0001", "0015", "9999_later"])
async def test_a_database_of_an_unknown_schema_is_refused_and_not_changed(tmp_path, revision):
    database = await opened(tmp_path)
    await database.write(text(f"UPDATE alembic_version SET version_num = '{revision}'"))
    before = schema_of(database._engine)
    await database.close()
    other = Database(url=url_for(tmp_path), data_dir=tmp_path)
    with pytest.raises(UnknownSchema, match=f"'{revision}'.*TANDEM_DATABASE_URL, TANDEM_DATA_DIR"):
        await other.open()
    assert schema_of(other._engine) == before
    await other.close()


PLAYGROUND_TABLES = {"trials", "playground_closed"}
JOB_TABLES = PLAYGROUND_TABLES | {"jobs"}
RANGE_COLUMNS = {"sessions": {"engine_ranges"}}
LOOP_COLUMNS = {"sampling_sessions": {"min_version", "max_staleness", "updates"}}
RECORD_TABLES = {"run_records", "rollout_batches", "worker_use", "page_sessions", "owner_limits"}
RECORD_COLUMNS = {"runs": {"name", "tags", "config", "parent_run", "parent_step", "ending"}}


def tables_without(tables, columns):
    """The tables of an earlier schema: today's without these tables and columns, and with bases of
    deltas."""
    old = MetaData()
    for table in metadata.sorted_tables:
        if table.name not in tables:
            copy = table.to_metadata(old)
            for name in columns.get(table.name, ()):
                copy._columns.remove(copy.c[name])
    base = Column("delta_of", String(200), nullable=False, default="")
    old.tables["weight_versions"].append_column(base)
    return old


def tables_before_whole_versions():
    return tables_without((), {})


def tables_before_the_playground():
    return tables_without(PLAYGROUND_TABLES, {})


def tables_before_jobs():
    return tables_without(JOB_TABLES, {})


def tables_before_ranges():
    return tables_without(JOB_TABLES, RANGE_COLUMNS)


def tables_before_the_loop():
    return tables_without(JOB_TABLES, RANGE_COLUMNS | LOOP_COLUMNS)


def tables_of_0_2():
    """The tables before the record of runs."""
    return tables_without(JOB_TABLES | RECORD_TABLES, RANGE_COLUMNS | LOOP_COLUMNS | RECORD_COLUMNS)


async def migrated(tmp_path, table, row, *, old, revision):
    """Write a row into the tables of an earlier revision, and open them. Return the table's row."""
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    fresh = await opened(tmp_path / "new")
    database = Database(url=url_for(tmp_path / "old"), data_dir=tmp_path / "old")
    with database._engine.begin() as connection:
        old.create_all(connection)
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
        connection.execute(text(f"INSERT INTO alembic_version VALUES ('{revision}')"))
        connection.execute(insert(old.tables[table.name]).values(row))
    await database.open()
    assert by_name(schema_of(database._engine)) == by_name(schema_of(fresh._engine))
    (found,) = await database.read(select(table))
    await database.close()
    await fresh.close()
    return found


async def test_a_database_of_0_2_gets_the_record_and_keeps_its_runs(tmp_path):
    row = {
        "id": RUN,
        "session_id": "s-1",
        "base_model": "tiny",
        "training": {},
        "owner": "ann",
        "state": "ended",
        "user_metadata": {"name": "kept"},
        "created_at": 1.0,
    }
    found = await migrated(tmp_path, runs, row, old=tables_of_0_2(), revision="0001_first")
    assert (found["id"], found["user_metadata"]) == (RUN, {"name": "kept"})
    assert (found["name"], found["tags"], found["config"], found["parent_run"]) == (None,) * 4


async def test_a_database_before_the_loop_keeps_its_sampling_sessions_without_bounds(tmp_path):
    row = {
        "id": "s-1:sample:0",
        "session_id": "s-1",
        "kind": "snapshot",
        "base_model": "tiny",
        "run_id": RUN,
        "version": f"{RUN}/v000001-22222222",
        "state": "active",
        "created_at": 1.0,
    }
    old = tables_before_the_loop()
    found = await migrated(tmp_path, sampling_sessions, row, old=old, revision="0002_record")
    assert (found["id"], found["version"]) == (row["id"], row["version"])
    assert (found["min_version"], found["max_staleness"], found["updates"]) == (None,) * 3


async def test_a_database_before_ranges_keeps_its_sessions_without_a_range(tmp_path):
    row = {"id": "s-1", "state": "active", "owner": "ann", "created_at": 1.0}
    old = tables_before_ranges()
    found = await migrated(tmp_path, sessions, row, old=old, revision="0003_loop")
    assert (found["id"], found["owner"], found["engine_ranges"]) == ("s-1", "ann", None)


async def test_a_database_before_jobs_keeps_its_sessions_and_gets_their_table(tmp_path):
    row = {"id": "s-1", "state": "active", "owner": "ann", "created_at": 1.0}
    old = tables_before_jobs()
    found = await migrated(tmp_path, sessions, row, old=old, revision="0004_engine_ranges")
    assert (found["id"], found["owner"]) == ("s-1", "ann")


async def test_a_database_before_the_playground_keeps_its_sessions_and_gets_its_tables(tmp_path):
    row = {"id": "s-1", "state": "active", "owner": "ann", "created_at": 1.0}
    old = tables_before_the_playground()
    found = await migrated(tmp_path, sessions, row, old=old, revision="0005_jobs")
    assert (found["id"], found["owner"]) == ("s-1", "ann")


async def test_a_database_with_deltas_keeps_its_runs_and_versions_without_them(tmp_path):
    run = {
        "id": RUN,
        "session_id": "s-1",
        "base_model": "tiny",
        "training": {},
        "asks": {"ranks": 2, "delta": "auto"},
        "owner": "ann",
        "state": "active",
        "user_metadata": {},
        "created_at": 1.0,
    }
    version = {
        "name": f"{RUN}/v000002-33333333",
        "run_id": RUN,
        "base_model": "tiny",
        "path": "weights/s-1_train_0/v000002-33333333",
        "delta_of": f"{RUN}/v000001-22222222",
        "step": 3,
        "bytes": 12,
        "created_at": 1.0,
    }
    found = []
    for table, row in ((runs, run), (weight_versions, version)):
        folder = tmp_path / table.name
        folder.mkdir()
        old = tables_before_whole_versions()
        found.append(await migrated(folder, table, row, old=old, revision="0006_playground"))
    assert (found[0]["id"], found[0]["asks"]) == (RUN, {"ranks": 2})
    assert (found[1]["name"], found[1]["bytes"]) == (version["name"], 12)


def by_name(schema):
    """A migrated table has its new columns at the end."""
    return {
        name: {**table, "columns": sorted(table["columns"], key=lambda column: column["name"])}
        for name, table in schema.items()
    }


async def test_a_data_directory_can_be_moved(tmp_path):
    first = Store(tmp_path / "first")
    first.data_dir.mkdir()
    await first.database.open()
    for relative in (STATE, VERSION, RELEASED):
        whole(first, relative)
    await first.checkpoints.put(checkpoint(first, STATE))
    await first.database.write(
        insert(released_folders).values(folder=RELEASED, run_id=RUN),
    )
    version = WeightVersion(
        name=f"{RUN}/v000001-22222222",
        path=first.versions.path_of(f"{RUN}/v000001-22222222"),
        run_id=RUN,
        step=0,
        base_model="tiny",
    )
    await first.versions.add_version(version)
    model = str(make_model(first.data_dir / "models" / "tiny"))
    await base_models(first).add(name="tiny", path=model)
    await first.database.close()

    moved = first.data_dir.rename(tmp_path / "second")
    second = Store(moved, url=url_for(first.data_dir))
    await second.database.open()
    assert (await second.versions.version(version.name)).path == str(second.data_dir / VERSION)
    models = base_models(second)
    await models.read_models()
    assert models.get("tiny").path == str(second.data_dir / "models" / "tiny")
    await second.collector.find_unknown()
    assert second.collector.unknown == set()
    for table in metadata.sorted_tables:
        for row in await second.database.read(select(table)):
            assert not [value for value in row.values() if str(tmp_path) in str(value)]
    await second.database.close()
