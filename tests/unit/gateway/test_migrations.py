"""The database's migrations, from that of revision 0006 on."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import insert, select, text

from gateway.checkpoints.base_models import BaseModels
from gateway.checkpoints.versions import WeightVersion
from gateway.identifiers import parse_checkpoint_path
from gateway.storage import migrations
from gateway.storage.database import Database
from gateway.storage.pairing import check_pair
from gateway.storage.tables import metadata, released_folders, runs
from tests.support.gateway.checkpoint_store import RUN, Store, checkpoint, whole
from tests.support.gateway.running import make_model
from tests.support.postgres import url_for

SCHEMA_0006 = Path(__file__).parents[2] / "support" / "gateway" / "schema_0006.sql"
STATE = "checkpoints/s-1_train_0/a-11111111"
VERSION = "weights/s-1_train_0/v000001-22222222"
RELEASED = "checkpoints/s-1_train_0/b-33333333"


pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
def old(tmp_path):
    """A data directory whose database is of revision 0006."""
    folder = tmp_path / "old"
    folder.mkdir()
    schema = SCHEMA_0006.read_text()
    if url_for(folder):
        schema = schema.replace("BLOB", "BYTEA")
    execute(folder, *schema.split(";")[:-1])
    return folder


def execute(data_dir, *statements):
    with create_engine(data_dir).begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def create_engine(data_dir):
    return Database(url=url_for(data_dir), data_dir=data_dir)._engine


def base_models(store):
    models_dir = store.data_dir / "models"
    return BaseModels(database=store.database, data_dir=store.data_dir, models_dir=models_dir)


def test_the_newest_revision_is_alembics_head_and_each_file_names_its_own():
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert migrations.newest_revision() == scripts.get_current_head()
    for script in scripts.walk_revisions():
        assert Path(script.path).stem.startswith(f"v{script.revision}_")


async def test_a_new_database_is_of_the_newest_revision(tmp_path):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    (row,) = await database.read(text("SELECT version_num FROM alembic_version"))
    assert row["version_num"] == migrations.newest_revision()
    await database.close()


async def test_a_migrated_database_has_the_tables_of_a_new_one(old):
    database = Database(url=url_for(old), data_dir=old)
    await database.open()
    await database.close()
    with create_engine(old).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": False})
        assert compare_metadata(context, metadata) == []


@pytest.mark.parametrize("moved", ["before the migration", "after it"])
async def test_what_an_old_database_names_is_found_after_its_directory_was_moved(
    old, tmp_path, moved
):
    absolute = {
        "checkpoints": f"""('tinker://{RUN}/weights/a', '{RUN}', 'weights', 'tiny', '{old / STATE}',
            '', 0, 7, true, 'local', false, NULL, 1.0, NULL, NULL)""",
        "released_folders": f"('{old / RELEASED}', '{RUN}')",
        "models": f"('in', '{old}/models/tiny', 64, 1.0), ('out', '/srv/tiny', 64, 1.0)",
        "weight_versions": f"""('{RUN}/v000001-22222222', '{RUN}', 'tiny', '{old / VERSION}', '',
            1, 7, false, 1.0, NULL)""",
    }
    execute(old, *(f"INSERT INTO {table} VALUES {rows}" for table, rows in absolute.items()))
    before = Store(old)
    for relative in (STATE, VERSION, RELEASED):
        whole(before, relative)
    make_model(old / "models" / "tiny")
    if moved == "after it":
        await before.database.open()
        await before.database.close()
    new = old.rename(tmp_path / "new")

    store = Store(new, url=url_for(old))
    await store.database.open()
    found = await store.checkpoints.find(parse_checkpoint_path(f"tinker://{RUN}/weights/a"))
    assert list(await store.versions.files(found)) == ["checkpoint.json", "file"]
    version = await store.versions.version(f"{RUN}/v000001-22222222")
    assert version.path == str(new / VERSION)
    assert await store.collector.unknown_folders() == []
    await store.collector.collect_all()
    assert (new / STATE).is_dir()
    assert not (new / RELEASED).exists(), "it was released, and the database still knows that"
    assert store.quarantine.folders() == []
    models = base_models(store)
    await models.open()
    assert models.get("out").path == "/srv/tiny"
    if moved == "after it":
        assert models.get("in").path == str(new / "models" / "tiny")
    await store.collector.close()
    await store.database.close()


@pytest.mark.parametrize(("moments", "offload"), [("host", "moments"), ("device", "none")])
async def test_a_run_keeps_its_moments_where_it_kept_them(tmp_path, moments, offload):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    said = {"states": "bfloat16", "moments": moments}
    about = dict.fromkeys(("session_id", "base_model", "owner", "project_id", "state"), "x")
    about |= {"error_type": "", "reason": "", "created_at": 1.0}
    await database.write(
        insert(runs),
        {"id": "old", "training": said, "asks": said, **about},
        {"id": "bare", "training": None, "asks": None, **about},
    )
    await database.close()
    execute(tmp_path, "UPDATE alembic_version SET version_num = '0014'")
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    found = {row["id"]: row for row in await database.read(select(runs))}
    await database.close()
    assert found["old"]["training"] == found["old"]["asks"]
    assert found["old"]["asks"] == {"states": "bfloat16", "offload": offload}
    assert (found["bare"]["training"], found["bare"]["asks"]) == (None, None)


async def test_a_data_directory_can_be_moved(tmp_path):
    first = Store(tmp_path / "first")
    first.data_dir.mkdir()
    await first.database.open()
    await check_pair(first.database, first.data_dir)
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
    assert await check_pair(second.database, second.data_dir)
    assert (await second.versions.version(version.name)).path == str(second.data_dir / VERSION)
    models = base_models(second)
    await models.open()
    assert models.get("tiny").path == str(second.data_dir / "models" / "tiny")
    assert await second.collector.unknown_folders() == []
    for table in metadata.sorted_tables:
        for row in await second.database.read(select(table)):
            assert not [value for value in row.values() if str(tmp_path) in str(value)]
    await second.database.close()
