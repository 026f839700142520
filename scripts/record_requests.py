"""Records requests of clients with their outcomes: `tests/golden/requests/`.

    python -m scripts.record_requests            # replays the requests, and writes their outcomes
    python -m scripts.record_requests --clients  # records the SDKs and our own routes anew

Afterwards CHANGELOG.md must name the new fingerprint, which the script prints. Releases of the SDK
besides the installed one go into `build/sdk` (`make conformance SDK=0.27.2` installs one)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_LATE_SECONDS = 3.0
"""Replicas start after the answer to the first sample."""
_OLD_SDK = "0.27.2"
_FOLDER = "RECORDED_SDK"
if _other := os.environ.get(_FOLDER):  # before the first import of tinker
    sys.path.insert(0, _other)
sys.path.insert(0, str(_ROOT))


def _record_clients() -> None:
    old = _ROOT / "build" / "sdk" / _OLD_SDK
    if not (old / "tinker").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "--target", str(old), f"tinker=={_OLD_SDK}"], check=True)
    for folder in ("", str(old)):
        command = [sys.executable, "-m", "scripts.record_requests", "--sdk"]
        subprocess.run(command, check=True, cwd=_ROOT, env=os.environ | {_FOLDER: folder})
    _record("tandem")


def _record(name: str) -> None:
    from tests.support.gateway.recorded_clients import use_routes, use_sdk
    from tests.support.gateway.recordings import Recorder, replaying_gateway, write_lines

    recorder = Recorder()
    with replaying_gateway() as gate, recorder.listening():
        use_routes(gate.url) if name == "tandem" else use_sdk(gate.url)
    write_lines(name, recorder.lines)


def _replay_all() -> None:
    from tests.support.gateway import recordings

    for name in recordings.names():
        with recordings.replaying_gateway() as gate:
            replay = recordings.Replay(gate, recordings.read_lines(name))
            time.sleep(_LATE_SECONDS)
            recordings.write_lines(f"{name}.workers", replay.workers())
        recordings.write_lines(name, replay.lines)
    print(f"CHANGELOG.md must name the recorded requests: {recordings.fingerprint()}")


if __name__ == "__main__":
    if "--sdk" in sys.argv:
        import tinker

        _record(f"sdk-{tinker.__version__}")
    else:
        if "--clients" in sys.argv:
            _record_clients()
        _replay_all()
