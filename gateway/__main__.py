"""`python -m gateway`: serves with the settings of the environment (`TANDEM_*`)."""

from __future__ import annotations

import gc
import os
import sys

# grpc reads both variables at import.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# uvloop forks to start processes. With gRPC's fork support, handlers start threads in the child,
# and one child in four dies of a segmentation fault before its exec. The child needs no gRPC.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def main() -> int:
    # Collections would find nothing, and take a seventh of the start. The server turns them on when
    # it listens.
    gc.disable()
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from gateway.app import run
    from tandem.errors import UnknownSetting
    from tandem.protocol.worker import end_with_supervisor
    from tandem.settings.gateway import GatewaySettings, settings_fault
    from tandem.settings.variables import check_environment
    from tandem.stack import SENTENCE

    end_with_supervisor()
    try:
        check_environment(os.environ)
        settings = GatewaySettings()
    except UnknownSetting as error:
        print(f"{SENTENCE}{error.message}", file=sys.stderr)
        return 2
    except (ValidationError, SettingsError) as error:
        print(f"{SENTENCE}{settings_fault(error)}", file=sys.stderr)
        return 1
    return run(settings.model_copy(update={"data_dir": settings.data_dir.resolve()}))


if __name__ == "__main__":
    sys.exit(main())
