"""Shows the runs of a data directory from their records, without a gateway: `tandem view`.

The pages are the gateway's own, over a temporary database that is filled from the files. Nothing in
the data directory changes, and nobody signs in, so the server listens on this machine only."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from sqlalchemy import insert
from starlette.middleware.trustedhost import TrustedHostMiddleware

from gateway.api.errors import ErrorResponses
from gateway.api.openai.service import InferenceService
from gateway.api.pages import compare, rollouts, run, runs, sign_in
from gateway.api.pages.run_views import RunViews
from gateway.app import path_operations
from gateway.core import Gateway
from gateway.metrics import Metrics
from gateway.owners.auth.identity import Caller
from gateway.runs.record.reader import read_identity, read_index
from gateway.runs.stopping import Stop
from gateway.storage import tables
from gateway.workers.epoch import Epoch
from gateway.workers.launchers import make_launchers
from tandem.errors import InvalidRequest, TandemError, describe
from tandem.protocol.worker import TrainingSpec
from tandem.settings.gateway import GatewaySettings

_ROUTERS = (sign_in.router, runs.router, run.router, compare.router, rollouts.router)


def view_app(data_dir: Path, *, ready: Callable[[], None]) -> FastAPI:
    """Return the application for a data directory. It calls `ready` when all files are read. Raises
    `InvalidRequest` if there are no records."""
    data_dir = data_dir.absolute()
    folders = sorted(data_dir.glob("runs/*/record"))
    if not folders:
        raise InvalidRequest(
            f"{data_dir} has no records of runs (runs/*/record); name a data directory of Tandem"
        )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with tempfile.TemporaryDirectory(prefix="tandem-view-") as temporary:
            gateway = await _gateway(Path(temporary), data_dir)
            try:
                for folder in folders:
                    await _add_run(gateway, folder)
                app.state.gateway = gateway
                app.state.inference = InferenceService(gateway)
                app.state.run_views = RunViews(gateway)
                ready()
                yield
            finally:
                gateway.futures.release_waiters()
                await gateway.record.close()
                await gateway.database.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.files_only = True
    app.state.viewer = Caller(owner="viewer", key_id="none", role="admin")  # sees all runs
    for router in _ROUTERS:
        app.include_router(router)
    shown = (each for each in path_operations(app) if "GET" in each.methods)
    app.router.routes = [each for each in shown if each.path != "/sign-in"]
    ErrorResponses({}).register(app)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return app


async def _gateway(temporary: Path, data_dir: Path) -> Gateway:
    """Return the parts of a gateway that pages read. It starts no worker and removes nothing.
    `tandem view` has removed the gateway's settings from the environment."""
    (temporary / "runs").symlink_to(data_dir / "runs")
    settings = GatewaySettings(data_dir=temporary, models_dir=data_dir / "models")
    epoch = Epoch(number=1, superseded=lambda: None)
    gateway = Gateway(
        settings,
        launchers=make_launchers(settings, epoch),
        metrics=Metrics(),
        epoch=epoch,
        leadership=None,
        stop=Stop(hand_over=False),
    )
    await gateway.database.open()
    await gateway.models.discover_models()
    return gateway


async def _add_run(gateway: Gateway, folder: Path) -> None:
    """Add a run and the index of its record. A damaged one is named and left out."""
    try:
        row = await asyncio.to_thread(read_identity, folder)
        if row is None:
            raise ValueError("run.json is missing or damaged")
        TrainingSpec.model_validate(row["training"])
        known = {name: row[name] for column in tables.runs.columns if (name := column.name) in row}
        index, batches = await asyncio.to_thread(read_index, folder, str(row["id"]))
        statements = [insert(tables.runs).values(known)]
        statements.append(insert(tables.run_records).values(asdict(index)))
        statements += [insert(tables.rollout_batches).values(asdict(each)) for each in batches]
        await gateway.database.write_together(*statements)
    except (OSError, ValueError, KeyError, TandemError) as error:
        print(f"left out {folder.parent.name}: {describe(error)}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--port", type=int, default=0)
    asked = parser.parse_args()

    def ready() -> None:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        print(f"{address} shows {asked.data_dir}. Ctrl-C ends it.", flush=True)

    try:
        app = view_app(asked.data_dir, ready=ready)
        listening = socket.create_server(("127.0.0.1", asked.port))
    except (TandemError, OSError) as error:
        print(getattr(error, "message", error), file=sys.stderr)
        return 1
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after an orderly end
        uvicorn.Server(config).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
