"""The description of a blueprint: `blueprint.toml` in its folder."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from tandem.errors import InvalidField, InvalidRequest, UserError, describe

Value: TypeAlias = bool | int | float | str

FILE, PROGRAM = "blueprint.toml", "train.py"
_TYPES: Mapping[str, type[Value]] = {"int": int, "float": float, "str": str, "bool": bool}


class _DescriptionPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BlueprintNeeds(_DescriptionPart):
    """`devices` of the trainer and its sampler together, with `memory_gib` of each. `minutes` is
    the usual time on them. 0 devices means cores."""

    devices: int = Field(0, ge=0, le=1024)
    memory_gib: float = Field(0.0, ge=0)
    minutes: float = Field(gt=0)


class Bound(_DescriptionPart):
    """A range of finite numbers."""

    at_least: float | None = None
    at_most: float | None = None

    def allows(self, value: float) -> bool:
        low, high = self.at_least, self.at_most
        finite = abs(value) < math.inf  # and no NaN
        return finite and (low is None or value >= low) and (high is None or value <= high)

    def __str__(self) -> str:
        """Literal examples: "from 1 to 200", "at least 1", "any number"."""
        if self.at_least is not None and self.at_most is not None:
            return f"from {self.at_least:g} to {self.at_most:g}"
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return f"at most {self.at_most:g}" if self.at_most is not None else "any number"


class Parameter(_DescriptionPart):
    """A value that a user may choose, within bounds or from `choices`."""

    about: str
    type: Literal["int", "float", "str", "bool"]
    default: Value
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[Value, ...] = ()

    @model_validator(mode="after")
    def _accepts_its_default(self) -> Self:
        self.checked_value("default", self.default)
        return self

    def checked_value(self, name: str, value: object) -> Value:
        """Return a value in the parameter's type. Raises `InvalidField`."""
        try:
            found: Value = TypeAdapter(_TYPES[self.type]).validate_python(value)
        except ValidationError as error:
            raise InvalidField(
                f"{name} is {str(value)[:100]!r}, not of the type {self.type}", field=name
            ) from error
        if self.choices and found not in self.choices:
            known = ", ".join(map(str, self.choices))
            raise InvalidField(f"{name} is {str(found)[:100]!r}; choose one of {known}", field=name)
        if isinstance(found, str):
            return found
        if not self.range.allows(found):
            said = str(found)[:100]  # an integer may be too large for a float
            raise InvalidField(f"{name} is {said}; allowed: {self.range}", field=name)
        return found

    @property
    def range(self) -> Bound:
        return Bound(at_least=self.minimum, at_most=self.maximum)


class Blueprint(_DescriptionPart):
    """`models` are patterns of fitting base models, such as "Qwen/Qwen3-*". `metrics` has the
    bounds of the returned numbers."""

    name: str
    folder: Path
    title: str
    about: str
    needs: BlueprintNeeds
    models: tuple[str, ...] = ("*",)
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    metrics: dict[str, Bound] = Field(min_length=1)

    def fits(self, model: str) -> bool:
        return any(fnmatchcase(model, pattern) for pattern in self.models)

    def chosen_model(self, known: Sequence[str], *, asked: str = "") -> str:
        """Return `asked`, or the first fitting model of the gateway's. Raises `UserError`."""
        if asked and asked not in known:
            raise InvalidField(f"unknown model {asked!r}; known: {', '.join(known)}", field="model")
        fitting = [each for each in ([asked] if asked else known) if self.fits(each)]
        if not fitting:
            why = f"{asked} does not fit" if asked else "the gateway has no such base model"
            raise UserError(f"{self.name} is for {', '.join(self.models)}; {why}")
        return fitting[0]

    def values_of(self, given: Mapping[str, object]) -> dict[str, Value]:
        """Return the value of each parameter. Raises `InvalidField`."""
        for name in given:
            if name not in self.parameters:
                close = get_close_matches(name, self.parameters, n=1) or [*self.parameters]
                raise InvalidField(
                    f"{name[:100]!r} is no parameter of {self.name}; known: {', '.join(close)}",
                    field=name,
                )
        return {
            name: parameter.checked_value(name, given.get(name, parameter.default))
            for name, parameter in self.parameters.items()
        }


def about_blueprint(name: str, blueprint: Blueprint | str) -> dict[str, Any]:
    """Return a blueprint, or the reason why it is unusable, as JSON."""
    if isinstance(blueprint, str):
        return {"name": name, "reason": blueprint}
    return blueprint.model_dump(mode="json", exclude={"folder"}) | {"reason": ""}


def read_blueprint(folder: Path) -> Blueprint:
    """Read a blueprint's folder. Its name is that of the folder. Raises `InvalidRequest`."""
    file = folder / FILE
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        blueprint = Blueprint(**values, name=folder.name, folder=folder)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise InvalidRequest(f"{file}: {where}: {fault['msg']}") from error
    except (OSError, ValueError, TypeError, InvalidField) as error:
        raise InvalidRequest(f"{file} cannot be used: {describe(error)}") from error
    if not (folder / PROGRAM).is_file():
        raise InvalidRequest(f"{folder} has no {PROGRAM}")
    return blueprint
