"""Trainer backends, under /api/tandem/v1."""

from __future__ import annotations

import asyncio

from pydantic import JsonValue

from gateway.api.dependencies import AccessDep
from gateway.api.fields import Answer
from gateway.api.routing import Router
from tandem.backends import BackendDescription
from tandem.backends.frameworks import installed_frameworks
from tandem.backends.registry import REFUSED, descriptions

router = Router("/api/tandem/v1", tag="Tandem")


class TrainerBackendEntry(Answer):
    """A trainer backend. `kind` is `step` (it computes a run's operations) or `job` (it trains a
    whole job). `version` is that of the framework where trainers run, or "" if it is not installed
    or not known. `configuration` is the JSON schema of a job's settings, or of a run's trained
    parameters. `reason` says why the backend is unusable, or is ""."""

    name: str
    kind: str
    framework: str
    version: str
    capabilities: list[str]
    configuration: dict[str, JsonValue]
    reason: str


class TrainerBackendList(Answer):
    """`refused` names frameworks that cannot be backends, each with the reason."""

    backends: list[TrainerBackendEntry]
    refused: dict[str, str]


@router.operation("GET", "/backends", role="reader")
async def list_backends(access: AccessDep) -> TrainerBackendList:
    """List the trainer backends with the schemas of their settings."""
    groups = access.gateway.groups()
    reported = {name: each.version for group in groups for name, each in group.frameworks.items()}
    return await asyncio.to_thread(_list, reported)


def _list(reported: dict[str, str]) -> TrainerBackendList:
    found = descriptions()
    frameworks = {each.framework for each in found.values() if isinstance(each, BackendDescription)}
    versions = {each.name: each.version for each in installed_frameworks(frameworks)} | reported
    entries = []
    for name, about in found.items():
        if isinstance(about, BackendDescription):
            entry = TrainerBackendEntry.of(
                about,
                capabilities=list(about.capabilities),
                version=versions.get(about.framework, ""),
                configuration=about.configuration.model_json_schema(),
                reason="",
            )
        else:
            entry = TrainerBackendEntry(
                name=name,
                kind="",
                framework="",
                version="",
                capabilities=[],
                configuration={},
                reason=about,
            )
        entries.append(entry)
    return TrainerBackendList(backends=entries, refused=REFUSED)
