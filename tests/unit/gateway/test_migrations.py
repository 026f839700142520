"""The database's migrations, as a whole."""

from __future__ import annotations

from pathlib import Path

from alembic.script import ScriptDirectory
from sqlalchemy import text

from gateway.storage import migrations
from gateway.storage.database import Database


def test_the_newest_revision_is_alembics_head_and_each_file_names_its_own():
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert migrations.newest_revision() == scripts.get_current_head()
    for script in scripts.walk_revisions():
        assert Path(script.path).stem.startswith(f"v{script.revision}_")


async def test_a_new_database_is_of_the_newest_revision(tmp_path):
    database = Database(url="", data_dir=tmp_path)
    await database.open()
    (row,) = await database.read(text("SELECT version_num FROM alembic_version"))
    assert row["version_num"] == migrations.newest_revision()
    await database.close()
