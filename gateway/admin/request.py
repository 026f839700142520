"""A JSON request on standard input, and its JSON answer on standard output.

Arguments would show a secret to other users of the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from tandem.errors import TandemError, describe
from tandem.settings.gateway import GatewaySettings
from tandem.telemetry import configure_logging

Request = TypeVar("Request", bound=BaseModel)


def answer_request(
    kind: type[Request], answer: Callable[[Request, GatewaySettings], Mapping[str, object]]
) -> int:
    """Write the answer, or `{"error"}`. Return the exit status, which is 1 for an error."""
    configure_logging(service="gateway", level="warning")
    os.umask(0o077)  # as in the gateway: this may be the first process to create these files
    settings = GatewaySettings()
    settings = settings.model_copy(update={"data_dir": settings.data_dir.resolve()})
    try:
        said = answer(kind.model_validate_json(sys.stdin.buffer.read()), settings)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = first["loc"][-1] if first["loc"] else "request"
        said = {"error": f"{where}: {first['msg'].removeprefix('Value error, ')}"}
    except TandemError as error:
        said = {"error": error.message}
    except OSError as error:
        named = error.filename is not None
        said = {"error": f"{error.filename}: {error.strerror}" if named else describe(error)}
    sys.stdout.buffer.write(orjson.dumps(said))
    return 1 if "error" in said else 0
