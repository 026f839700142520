"""What is shown of settings."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.settings import GatewaySettings, without_password


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
