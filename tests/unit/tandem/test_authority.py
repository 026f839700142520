from __future__ import annotations

import stat

import pytest

from tandem.errors import InvalidRequest
from tandem.protocol.authority import Authority, write_certificate
from tandem.protocol.certificate import AGENT_NAME, read_certificate
from tandem.protocol.worker import WorkerSpec

WORKER = "trainer-s-0123456789ab-0"


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("tls") / "authority")


def test_what_was_written_is_read_again_and_is_for_its_user_alone(authority, tmp_path):
    made = authority.issue(AGENT_NAME)
    write_certificate(tmp_path / "agent", made)
    assert read_certificate(tmp_path / "agent") == made
    assert stat.S_IMODE((tmp_path / "agent" / "tls.key").stat().st_mode) == 0o600
    with pytest.raises(InvalidRequest, match=r"there is already a .*tls\.crt"):
        write_certificate(tmp_path / "agent", made)
    assert made.key not in repr(made)


def test_a_folder_that_is_no_authority_is_refused_with_what_to_do(authority, tmp_path):
    with pytest.raises(InvalidRequest, match="tandem tls create"):
        Authority.read(tmp_path / "missing")
    with pytest.raises(InvalidRequest, match="tandem tls issue"):
        read_certificate(tmp_path / "missing")
    folder = tmp_path / "mixed"
    Authority.create(folder)
    (folder / "tls.key").write_text(authority.issue(AGENT_NAME).key)
    with pytest.raises(InvalidRequest, match=r"not the key of its tls\.crt"):
        Authority.read(folder)
    (folder / "tls.key").write_text("nonsense")
    with pytest.raises(InvalidRequest, match="no certificate authority"):
        Authority.read(folder)


def test_no_worker_listens_to_others_without_a_certificate(authority):
    about = {
        "worker_id": WORKER,
        "kind": "trainer",
        "secret": "a secret",
        "model_name": "tiny",
        "model_path": "/models/tiny",
        "session_id": "s-0123456789ab",
        "host": "0.0.0.0",
    }
    with pytest.raises(ValueError, match="needs a certificate"):
        WorkerSpec.model_validate(about)
    spec = WorkerSpec.model_validate(about | {"tls": authority.issue(WORKER).model_dump()})
    assert spec.tls is not None and spec.tls.key not in repr(spec)
