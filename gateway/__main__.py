"""`python -m gateway`: serves with the settings of the environment (`TANDEM_*`)."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is imported

from gateway.server import run
from tandem.settings import GatewaySettings

if __name__ == "__main__":
    settings = GatewaySettings()
    sys.exit(run(settings.model_copy(update={"data_dir": settings.data_dir.resolve()})))
