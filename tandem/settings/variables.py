"""The names of Tandem's environment variables, and their check at the start of a process.

`settings_by_name` has the settings, `OTHER_NAMES` the rest. An unknown name is a mistake that would
otherwise have no effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from difflib import get_close_matches

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from tandem.errors import UnknownSetting
from tandem.settings.gateway import GatewaySettings

_PREFIX = "TANDEM_"

OTHER_NAMES = {
    "TANDEM_BUILD": "Which libraries an image gets: cpu or gpu. An argument of its build.",
    "TANDEM_IMAGES": "The registry and folder before the names of docker-compose.yaml's images.",
    "TANDEM_IMAGE_VERSION": "The tag of an image, which its processes report.",
    "TANDEM_NODE_RANK": "The number of a trainer's node, where it has several.",
    "TANDEM_SAMPLER_ENVIRONMENT": "Marks a sampler that has set its environment.",
    "TANDEM_SHM_SIZE": "The shared memory of the workers in docker-compose.yaml.",
    "TANDEM_TMP_SIZE": "The temporary files of the workers in docker-compose.yaml.",
    "TANDEM_VERSION": "The tag of docker-compose.yaml's images.",
}
FREE_PREFIXES = {
    "TANDEM_TEST_": "Tandem's own tests.",
    "TANDEM_BACKEND_": "Trainer backends of other packages.",
}

_SERVICE = re.compile(
    r"TANDEM(_[A-Z0-9_]+)?"
    r"(_SERVICE_HOST|_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in each pod for each Service of its namespace."""
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
"""The start of the value of another such variable, NAME_PORT."""


def settings_by_name() -> Iterator[tuple[str, FieldInfo]]:
    """Yield each setting with the name of its environment variable."""
    for name, field in GatewaySettings.model_fields.items():
        part = field.annotation
        if isinstance(part, type) and issubclass(part, BaseSettings):
            prefix = str(part.model_config["env_prefix"])
            for inner, inner_field in part.model_fields.items():
                yield f"{prefix}{inner.upper()}", inner_field
        else:
            yield f"{_PREFIX}{name.upper()}", field


def check_environment(environment: MutableMapping[str, str]) -> None:
    """Raise `UnknownSetting` for an unknown variable that begins with TANDEM_ in any case.

    Variables that Kubernetes sets for Services are removed: TANDEM_PORT is an address if a Service
    is called tandem."""
    for name in [name for name in environment if _is_of_service(name, environment[name])]:
        del environment[name]
    known = {name for name, _ in settings_by_name()} | OTHER_NAMES.keys()
    unknown = [
        name
        for name in sorted(environment)
        if name.upper().startswith(_PREFIX)
        and name not in known
        and not name.startswith(tuple(FREE_PREFIXES))
    ]
    if unknown:
        raise UnknownSetting("; ".join(_question(name, known) for name in unknown))


def _is_of_service(name: str, value: str) -> bool:
    is_address = name.startswith("TANDEM_") and name.endswith("_PORT")
    return bool(
        _SERVICE.fullmatch(name) or (is_address and _SERVICE_ADDRESS.match(value) is not None)
    )


def _question(name: str, known: set[str]) -> str:
    suffixes = {each.removeprefix(_PREFIX) for each in known}
    near = get_close_matches(name.upper().removeprefix(_PREFIX), suffixes, n=1)
    if near:
        return f"{name} is unknown; did you mean {_PREFIX}{near[0]}?"
    return f"{name} is unknown; unset it, or look for its name in docs/operations.md#settings"
