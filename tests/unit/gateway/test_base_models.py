from __future__ import annotations

import shutil

import pytest
from structlog.testing import capture_logs

from gateway.checkpoints.base_models import BaseModels
from gateway.storage.database import Database
from tandem.errors import InvalidRequest, UnknownModel
from tandem.weights.model_store import RECORD_NAME, ModelRecord
from tests.support.gateway.running import make_model
from tests.support.postgres import url_for

pytestmark = pytest.mark.usefixtures("each_database")

RECORD = ModelRecord(repository="a/b", revision="main", commit="c", bytes=1, added_at=0.0)


@pytest.fixture
async def database(tmp_path):
    database = Database(url=url_for(tmp_path), data_dir=tmp_path)
    await database.open()
    yield database
    await database.close()


@pytest.fixture
def place(tmp_path):
    return tmp_path / "models"


def downloaded(place, name: str):
    folder = make_model(place / name)
    (folder / RECORD_NAME).write_text(RECORD.model_dump_json())
    return folder


async def opened(database, place) -> BaseModels:
    models = BaseModels(database=database, data_dir=place.parent, models_dir=place)
    await models.read_models()
    return models


def paths(models: BaseModels) -> dict[str, str]:
    return {entry.name: entry.path for entry in models.all()}


async def test_what_has_a_record_is_found_and_nothing_else(database, place):
    models = await opened(database, place)
    assert paths(models) == {}, "there is no such directory"
    make_model(place / "org/begun")
    (place / ".locks").mkdir()
    found = {name: str(downloaded(place, name)) for name in ("org/a", "org/a/variant", "plain")}
    downloaded(place, "org/.hidden")
    await models.discover_models()
    assert paths(models) == found
    assert models.get("org/a").max_length == 64
    assert paths(await opened(database, place)) == found


async def test_a_model_that_is_removed_keeps_its_files_and_stays_removed(database, place):
    folder = downloaded(place, "org/a")
    models = await opened(database, place)
    await models.remove("org/a")
    await models.discover_models()
    assert paths(models) == paths(await opened(database, place)) == {}
    assert (folder / "config.json").exists()
    downloaded(place, "org/a")
    await models.add(name="org/a", path=str(folder))
    assert paths(models) == {"org/a": str(folder)}
    await models.remove("org/a")
    assert paths(await opened(database, place)) == {}, "it had no row either"


async def test_a_registered_name_stays_where_it_was_registered(database, place, tmp_path):
    models = await opened(database, place)
    elsewhere = str(make_model(tmp_path / "elsewhere"))
    await models.add(name="org/a", path=elsewhere)
    folder = downloaded(place, "org/a")
    await models.discover_models()
    assert paths(models) == {"org/a": elsewhere}
    await models.add(name="org/a", path=str(folder))
    assert paths(models) == paths(await opened(database, place)) == {"org/a": str(folder)}


async def test_a_filesystem_that_is_away_takes_no_model_along(database, place):
    downloaded(place, "org/a")
    models = await opened(database, place)
    shutil.rmtree(place)
    await models.discover_models()
    assert models.get("org/a")
    await models.remove("org/a")
    with pytest.raises(UnknownModel):
        models.get("org/a")


async def test_what_is_no_model_is_logged_once(database, place):
    (downloaded(place, "org/a") / "config.json").write_text("{}")
    with capture_logs() as lines:
        models = await opened(database, place)
        await models.discover_models()
    assert [(line["event"], line["model"]) for line in lines] == [("model_unfit", "org/a")]
    assert paths(models) == {}
    make_model(place / "org/a")
    await models.discover_models()
    assert list(paths(models)) == ["org/a"]


@pytest.mark.parametrize("exists", [True, False], ids=["empty folder", "no folder"])
async def test_a_folder_without_a_config_is_refused_by_the_name_of_the_file(
    database, place, tmp_path, exists
):
    models = await opened(database, place)
    if exists:
        (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=r"empty is not a model .* it has no config.json"):
        await models.add(name="org/a", path=str(tmp_path / "empty"))


async def test_a_config_that_cannot_be_read_is_refused_with_the_reason(database, place, tmp_path):
    models = await opened(database, place)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InvalidRequest, match=r"config.json cannot be read: Is a directory"):
        await models.add(name="org/a", path=str(tmp_path))


async def test_a_record_that_cannot_be_removed_is_said_to_be_so(database, place):
    folder = downloaded(place, "org/a")
    models = await opened(database, place)
    (folder / RECORD_NAME).unlink()
    (folder / RECORD_NAME).mkdir()
    with pytest.raises(InvalidRequest, match="cannot be removed"):
        await models.remove("org/a")
    assert models.get("org/a")


async def test_a_sequence_is_as_long_as_the_model_and_its_engine_allow(database, place):
    models = await opened(database, place)
    downloaded(place, "org/a")
    await models.discover_models()
    entry = models.get("org/a")
    assert models.context_length(entry) == entry.max_length == 64
    models.note_longest("org/a", 48)
    assert models.context_length(entry) == 48
    models.note_longest("org/a", 4096)
    assert models.context_length(entry) == 64
