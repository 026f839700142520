"""Write the settings of docs/operations.md, and the ways to share devices of docs/sharing.md, from
their classes: `python -m scripts.settings_table`.

The lines between `<!-- settings -->` or `<!-- sharing -->` and `<!-- end -->` are replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

from pydantic.fields import FieldInfo

from tandem.settings.sharing import Sharing
from tandem.settings.variables import settings_by_name

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"
SHARING_PAGE = PAGE.with_name("sharing.md")
_SUBJECTS = {
    "Addresses, keys and logs": (
        "HOST PORT PUBLIC_URL API_KEY BOOTSTRAP_KEY_FILE TLS_DIR OIDC AGENTS LAUNCHER LOG_LEVEL"
    ),
    "Directories and databases": (
        "DATA_DIR PRIVATE_DIR MODELS_DIR SPILL_DIR DATABASE_URL DATABASE_URL_FILE LEADER_TIMEOUT "
        "MIN_FREE_BYTES"
    ),
    "Models, devices and memory": (
        "MODELS MODEL_DEFAULTS GROUPS CLAIM_POOLS HOST_MEMORY_BYTES POOL_*"
    ),
    "Trainers": "TRAINER_* RECOVERY_*",
    "Samplers": (
        "SAMPLER_DEVICE SAMPLER_DTYPE SAMPLER_RANKS SAMPLER_ENGINE_PROCESS SAMPLER_M* SAMPLER_KV_* "
        "SAMPLER_GPU_* WEIGHTS_HANDOFF COMPRESS_PAYLOADS"
    ),
    "Sharing": "SHARING_*",
    "Limits": "LIMIT_* MAX_PAYLOAD_BYTES",
    "Times": (
        "SESSION_TTL RESULT_TTL SAMPLER_IDLE_TTL OPENAI_IDLE_TTL HISTORY_TTL "
        "WORKER_* OPERATION_TIMEOUT STOP_TIMEOUT"
    ),
    "Playground": "PLAYGROUND_*",
    "Kubernetes": "KUBERNETES_*",
}
"""Names without TANDEM_. A star stands for any suffix."""
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"))


def with_settings(page: str) -> str:
    """Return the page with the current settings. Raises `ValueError` for a setting without a
    sentence or a subject."""
    return _with_lines(page, "settings", _settings())


def with_sharing(page: str) -> str:
    return _with_lines(page, "sharing", _ways_to_share())


def _with_lines(page: str, name: str, lines: Iterable[str]) -> str:
    block, text = rf"(<!-- {name} -->\n).*?(<!-- end -->)", "\n".join(lines)
    return re.sub(block, lambda found: f"{found[1]}{text}\n{found[2]}", page, flags=re.DOTALL)


def _ways_to_share() -> Iterator[str]:
    yield "| value | meaning | strategy of the claim |"
    yield "|---|---|---|"
    for each in Sharing:
        strategy = each.strategy(memory_bytes=1)
        shown = f"`{strategy['strategy']}`" if strategy is not None else ""
        yield f"| `{each}` | {each.meaning} | {shown} |"


def _settings() -> Iterator[str]:
    left = dict(settings_by_name())
    for subject, names in _SUBJECTS.items():
        yield from ("", f"### {subject}", "", "| variable | default | meaning |")
        yield "|---|---|---|"
        for pattern in names.split():
            expression = re.compile("TANDEM_" + pattern.replace("*", ".*"))
            found = [name for name in left if expression.fullmatch(name)]
            if not found:
                raise ValueError(f"no setting is called {pattern}")
            for name in found:
                yield _row(name, left.pop(name))
    if left:
        raise ValueError(f"these settings have no subject: {', '.join(left)}")
    yield ""


def _row(name: str, field: FieldInfo) -> str:
    if not field.description or not field.description.endswith("."):
        raise ValueError(f"{name} has no sentence")
    cells = (f"`{name}`", _default(name, field), field.description)
    return f"| {' | '.join(cells)} |"


def _default(name: str, field: FieldInfo) -> str:
    """Return the default, before the other choices if there are any."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value in ("", [], {}):
        return ""
    if name.endswith("_BYTES") and value:
        size, unit = next(each for each in _UNITS if value % each[0] == 0)
        return f"{value // size} {unit}"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"{value:.10g}"
    if not isinstance(value, str | Path):
        return str(value)
    others = [each for each in get_args(field.annotation) if each != value]
    return f"`{value}`" + "".join(f", `{each}`" for each in others)


if __name__ == "__main__":
    PAGE.write_text(with_settings(PAGE.read_text()))
    SHARING_PAGE.write_text(with_sharing(SHARING_PAGE.read_text()))
