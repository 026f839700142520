"""`python -m gateway`: serves with the settings of the environment (`TANDEM_*`)."""

from __future__ import annotations

import sys

from gateway.server import run
from tandem.settings import GatewaySettings

if __name__ == "__main__":
    settings = GatewaySettings()
    sys.exit(run(settings.model_copy(update={"data_dir": settings.data_dir.resolve()})))
