from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.settings.gateway import GatewaySettings, settings_fault, without_password
from tandem.settings.variables import settings_by_name


@pytest.mark.parametrize(
    "url, shown",
    [
        ("postgresql://ann:se@cret@host:5432/tandem", "postgresql://…@host:5432/tandem"),
        ("postgresql://host/tandem?user=ann&password=secret", "postgresql://host/tandem"),
        ("postgresql://ann:secret@/tandem?host=/run", "postgresql://…@/tandem"),
        ("sqlite:///srv/tandem.db", "sqlite:///srv/tandem.db"),
        ("", ""),
    ],
)
def test_the_url_of_a_database_is_shown_without_its_password(monkeypatch, url, shown):
    assert without_password(url) == shown
    monkeypatch.setenv("TANDEM_DATABASE_URL", url)
    assert "cret" not in repr(GatewaySettings())
    for arguments in (["config"], ["config", "--json"]):
        said = CliRunner().invoke(app, arguments).stdout
        assert shown in said
        assert "cret" not in said


def test_the_url_of_a_database_may_be_in_a_file(monkeypatch, tmp_path):
    (tmp_path / "url").write_text("postgresql://ann:secret@host/tandem\n")
    monkeypatch.setenv("TANDEM_DATABASE_URL_FILE", str(tmp_path / "url"))
    settings = GatewaySettings()
    assert settings.database_url == "postgresql://ann:secret@host/tandem"
    assert "secret" not in repr(settings)
    for arguments in (["config"], ["config", "--json"]):
        assert "secret" not in CliRunner().invoke(app, arguments).stdout


def test_an_empty_variable_names_the_usual_data_directory(monkeypatch):
    monkeypatch.setenv("TANDEM_DATA_DIR", "")
    assert GatewaySettings().data_dir == Path(".tandem")


def test_an_empty_variable_names_no_path(monkeypatch):
    paths = {name for name, field in settings_by_name() if field.annotation == Path | None}
    assert {"TANDEM_DATABASE_URL_FILE", "TANDEM_PRIVATE_DIR", "TANDEM_TLS_DIR"} <= paths
    for name in paths:
        monkeypatch.setenv(name, "")
    emptied = GatewaySettings()
    for name in paths:
        monkeypatch.delenv(name)
    assert emptied == GatewaySettings()


def test_config_prints_values_that_the_environment_takes(monkeypatch):
    monkeypatch.setenv("TANDEM_RECOVERY_ENABLED", "0")
    monkeypatch.setenv("TANDEM_MODELS", '{"my/model": "/data/model"}')
    configured = GatewaySettings()
    printed = CliRunner().invoke(app, ["config"]).stdout.splitlines()
    assert "TANDEM_RECOVERY_ENABLED=false" in printed
    assert "TANDEM_PRIVATE_DIR=" in printed
    for line in printed:
        monkeypatch.setenv(*line.split("=", 1))
    assert GatewaySettings() == configured


@pytest.mark.parametrize(
    ("written", "url", "fault"),
    [
        (None, "", "cannot be read: No such file"),
        (b"", "", "is empty"),
        (b" \n", "", "is empty"),
        (b"\xff\xfe", "", "cannot be read: it is not text"),
        (
            b"postgresql://host/tandem",
            "postgresql://ann:secret@host/b",
            "both set; set one of them",
        ),
    ],
)
def test_a_file_without_a_url_is_refused_with_a_sentence(
    monkeypatch, tmp_path, written, url, fault
):
    if written is not None:
        (tmp_path / "url").write_bytes(written)
    monkeypatch.setenv("TANDEM_DATABASE_URL", url)
    monkeypatch.setenv("TANDEM_DATABASE_URL_FILE", str(tmp_path / "url"))
    with pytest.raises(ValidationError) as caught:
        GatewaySettings()
    said = settings_fault(caught.value)
    assert said.startswith("TANDEM_DATABASE_URL")
    assert fault in said
    assert "secret" not in said
