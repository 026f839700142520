"""An administrator's pod templates for trainers and samplers.

`trainer-pod.yaml` and `sampler-pod.yaml` are Pods without the worker's own fields, which the
gateway adds. Unknown fields are refused. The worker's container has the template of its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeAlias

import yaml

from gateway.workers.launchers.kubernetes.names import Role
from tandem.errors import InvalidRequest, describe
from tandem.settings.cluster import KubernetesSettings

Object: TypeAlias = dict[str, Any]

ROLES: tuple[Role, ...] = ("trainer", "sampler")
_NAMED = ("containers", "initContainers", "volumes", "env", "resourceClaims", "claims")
_QUANTITIES = ("limits", "requests", "overhead")
_PARAMETERIZED = re.compile(r"(List|Dict)\[(?:str, )?(.+)\]")
_PRIMITIVES: Mapping[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,)}


@dataclass(frozen=True)
class Template:
    """`body` is a Pod without the worker's fields. `source` is its file."""

    source: str
    body: Object

    def fault(self, path: str, what: str) -> InvalidRequest:
        """Example: "trainer-pod.yaml: spec.restartPolicy: the gateway sets it"."""
        return InvalidRequest(f"{self.source}: {path}: {what}")


def read_templates(settings: KubernetesSettings) -> dict[Role, Template]:
    """Return the administrator's templates, or the package's. Raises `InvalidRequest` for an
    invalid template."""
    return {role: _read(f"{role}-pod.yaml", settings) for role in ROLES}


def _read(name: str, settings: KubernetesSettings) -> Template:
    own = settings.templates / name if settings.templates is not None else None
    chosen = own if own is not None and own.exists() else files(__package__) / "defaults" / name
    try:
        body = yaml.safe_load(chosen.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(describe(error).split())
        raise InvalidRequest(f"{chosen} cannot be read: {said}") from error
    template = Template(source=str(own) if chosen is own else name, body=body)
    _check(template)
    return template


# --- Putting together ---------------------------------------------------------------------------


def merged(template: Template, pod: Object) -> Object:
    """Merge a pod with its template. Raises `InvalidRequest` for a field in both."""
    return _merged(template.body, pod, path="", template=template)


def _merged(own: Object, added: Object, *, path: str, template: Template) -> Object:
    both = {**own, **added}
    for key in own.keys() & added.keys():
        here, mine, ours = f"{path}.{key}".lstrip("."), own[key], added[key]
        if isinstance(mine, dict) and isinstance(ours, dict):
            both[key] = _merged(mine, ours, path=here, template=template)
        elif isinstance(mine, list) and isinstance(ours, list) and isinstance(ours[0], dict):
            both[key] = _merged_lists(mine, ours, path=here, template=template)
        elif path or key not in ("apiVersion", "kind"):
            raise template.fault(here, "the gateway sets it")
    return both


def _merged_lists(
    own: list[Object], added: list[Object], *, path: str, template: Template
) -> list[Object]:
    key = "mountPath" if path.endswith("volumeMounts") else "name"
    ours, together = {each[key]: each for each in added}, []
    for each in own:
        if (same := ours.pop(each.get(key), None)) is None:
            together.append(each)
            continue
        here = f"{path}[{each[key]}]"
        if path != "spec.containers":
            raise template.fault(here, f"the gateway adds one with this {key}")
        rest = {name: value for name, value in same.items() if name != key}
        together.append(_merged(each, rest, path=here, template=template))
    return [*ours.values(), *together]


# --- Checks -------------------------------------------------------------------------------------


def _check(template: Template) -> None:
    body = template.body
    if not isinstance(body, dict):
        raise InvalidRequest(f"{template.source} is no Pod")
    for key, value in (("apiVersion", "v1"), ("kind", "Pod")):
        if body.get(key) != value:
            raise template.fault(key, f"it is {body.get(key)!r}; a template is a Pod of v1")
    if "status" in body:
        raise template.fault("status", "a template has none")
    if not isinstance(body.get("spec"), dict):
        raise template.fault("spec", "it is missing; a template has one, {} at least")
    _check_value(body, "V1Pod", path="", template=template)
    for key in body.get("metadata", {}):
        if key not in ("labels", "annotations"):
            raise template.fault(f"metadata.{key}", "a template may have labels and annotations")


def _check_value(value: object, type_: str, *, path: str, template: Template) -> None:
    """Check a part of a template against the client's model."""
    if value is None:
        raise template.fault(path, "it is empty")
    if found := _PARAMETERIZED.fullmatch(type_):
        shape, inner = found.groups()
        if shape == "List":
            _check_list(value, inner, path=path, template=template)
        else:
            quantities = path.rpartition(".")[2] in _QUANTITIES
            for key, each in _mapping(value, path, template).items():
                if not (quantities and isinstance(each, (int, float))):
                    _check_value(each, inner, path=f"{path}.{key}", template=template)
    elif type_ in _PRIMITIVES:
        if not isinstance(value, _PRIMITIVES[type_]) or (
            isinstance(value, bool) and type_ == "int"
        ):
            raise template.fault(path, f"it is {value!r}; it must be of the type {type_}")
    elif (fields := _fields(type_)) is not None:
        for key, each in _mapping(value, path, template).items():
            here = f"{path}.{key}".lstrip(".")
            if key not in fields:
                raise template.fault(here, "there is no such field")
            _check_value(each, fields[key], path=here, template=template)


def _check_list(value: object, inner: str, *, path: str, template: Template) -> None:
    if not isinstance(value, list):
        raise template.fault(path, "it must be a list")
    seen, named = set(), path.rpartition(".")[2] in _NAMED
    for number, each in enumerate(value):
        name = each.get("name", number) if isinstance(each, dict) else number
        if named and name == number:
            raise template.fault(f"{path}[{number}]", "it has no name")
        if named and name in seen:
            raise template.fault(path, f"two are named {name}")
        seen.add(name)
        _check_value(each, inner, path=f"{path}[{name}]", template=template)


def _mapping(value: object, path: str, template: Template) -> Object:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise template.fault(path, "it must be an object with named fields")
    return value


def _fields(type_: str) -> dict[str, str] | None:
    from kubernetes.aio.client import models  # slow

    model = getattr(models, type_, None)
    if model is None:
        return None
    return {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
