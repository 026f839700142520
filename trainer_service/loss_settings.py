"""Checks `loss_fn_config` against the settings that a loss declares."""

from __future__ import annotations

import math

from tandem.errors import UnknownLossSetting
from tandem.wire.v1 import tinker_pb2 as wire
from trainer_service.losses.base import Loss, Setting, Settings, SettingValue


def read_settings(message: wire.ForwardBackwardRequest, loss: Loss) -> Settings:
    """Every setting of the loss, as given or by default. Raises `UnknownLossSetting`."""
    declared = {setting.name: setting for setting in loss.settings}
    values: dict[str, SettingValue] = {each.name: each.default for each in loss.settings}
    for name, value in _given(message).items():
        if name not in declared:
            known = ", ".join(sorted(declared)) or "none"
            raise UnknownLossSetting(
                f"{loss.name} has no setting {name[:100]!r}; its settings: {known}"
            )
        _check(value, declared[name], loss)
        values[name] = value
    settings = Settings(values)
    _check_bounds_in_order(settings, loss)
    loss.check(settings)
    return settings


def _given(message: wire.ForwardBackwardRequest) -> dict[str, SettingValue]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    # Clients write both maps; this one can hold text, too.
    return {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }


def _check(value: SettingValue, setting: Setting, loss: Loss) -> None:
    what = f"the setting {setting.name!r} of {loss.name}"
    if isinstance(setting.default, str):
        if not isinstance(value, str):
            raise UnknownLossSetting(f"{what} must be a text, not the number {value!r}")
        if setting.choices and value not in setting.choices:
            raise UnknownLossSetting(
                f"{what} must be one of {', '.join(setting.choices)}, not {value[:100]!r}"
            )
        return
    if isinstance(value, str) or not math.isfinite(value):
        given = value[:100] if isinstance(value, str) else value
        raise UnknownLossSetting(f"{what} must be a finite number, not {given!r}")
    low, high = setting.low, setting.high
    too_low = low is not None and (value < low or (setting.above and value == low))
    if too_low or (high is not None and value > high):
        raise UnknownLossSetting(f"{what} must be {_range(setting)}, not {value:g}")


def _range(setting: Setting) -> str:
    parts = []
    if setting.low is not None:
        parts.append(f"{'above' if setting.above else 'at least'} {setting.low:g}")
    if setting.high is not None:
        parts.append(f"at most {setting.high:g}")
    return " and ".join(parts)


def _check_bounds_in_order(settings: Settings, loss: Loss) -> None:
    """Settings that come as a pair of bounds, `…low…` and `…high…`, must be in that order."""
    for low_name in (each.name for each in loss.settings if "low" in each.name.split("_")):
        high_name = low_name.replace("low", "high")
        if not settings.has(high_name):
            continue
        low, high = settings.number(low_name), settings.number(high_name)
        if low > high:
            raise UnknownLossSetting(
                f"{low_name} ({low:g}) of {loss.name} is above {high_name} ({high:g})"
            )
