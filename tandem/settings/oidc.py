"""The page's sign-in at a provider of OpenID Connect. See `docs/security.md`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tandem.settings.chosen_names import OWNER_PATTERN
from tandem.settings.paths import OptionalPath

_FITTED = re.compile(r"group:\S.*|[^@\s]*@[^@\s]+")


class SignInRule(BaseModel):
    """The access of the people whom a rule fits: for `hours` after each sign-in, as `owner`, or
    without one as their e-mail address."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["admin", "maintainer", "member", "reader"]
    hours: float = Field(12.0, gt=0, le=24 * 90, allow_inf_nan=False)
    owner: Annotated[str, Field(pattern=OWNER_PATTERN)] | None = None


class OidcSettings(BaseModel):
    """`issuer` is the provider's URL. Without `client_secret_file`, Tandem is a public client. The
    keys of `rules` are addresses, `@DOMAIN` or `group:NAME`, and the first fitting one counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    issuer: str = Field(min_length=1)
    client_id: str = Field(min_length=1)
    client_secret_file: OptionalPath = None
    rules: dict[str, SignInRule] = Field(min_length=1)

    @field_validator("rules")
    @classmethod
    def _check_fitted(cls, rules: dict[str, SignInRule]) -> dict[str, SignInRule]:
        if wrong := [fitted for fitted in rules if not _FITTED.fullmatch(fitted)]:
            raise ValueError(
                f"{wrong[0][:80]!r} fits nobody; write an address, @DOMAIN or group:NAME"
            )
        return rules
