"""Write docs/api.md, below its introduction, from the OpenAPI document: `make api-docs`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from gateway.api.routing import OPEN_ROLES, ROLE, RULES, PathOperation
from gateway.app import create_app, path_operations
from gateway.owners.auth.keys import Role
from tandem.settings.gateway import GatewaySettings

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_GENERATED = "<!-- Generated from here on by `make api-docs`; do not edit. -->\n"
_TITLES = {
    "SDK": "The routes of the SDK",
    "OpenAI": "The routes for OpenAI's clients",
    "Anthropic": "The route for Anthropic's clients",
    "Agents": "The routes of a recorded agent",
    "Tandem": "Tandem's own routes",
    "Traces": "The routes of a trace",
}
_RIGHTS = """\
The cells name the things that a key of the role reaches: those of `all` owners, those of its `own`
owner, or those in its own sessions of `blueprints`. `open` routes need no key, or a signed address.
Without a word, the route refuses the key."""
_BOUNDS = ("minimum", "maximum", "minLength", "maxLength", "maxItems")
Json = dict[str, Any]


def page() -> str:
    """Return the whole page."""
    app = create_app(GatewaySettings(data_dir=Path("/nonexistent")))
    whole = app.openapi()
    parts = [PAGE.read_text().partition(_GENERATED)[0] + _GENERATED, _rights(path_operations(app))]
    for tag, title in _TITLES.items():
        parts.append(f"## {title}\n")
        for path, item in sorted(whole["paths"].items()):
            for method, operation in sorted(item.items()):
                if operation["tags"] == [tag]:
                    parts.append(_operation(f"{method.upper()} {path}", operation))
    parts.append("## Bodies\n")
    parts += [_schema(name, schema) for name, schema in whole["components"]["schemas"].items()]
    return "\n".join(parts)


def _rights(operations: Iterable[PathOperation]) -> str:
    """Return the table of routes and roles."""
    roles = get_args(Role)
    rows = [("route", *roles), ("---",) * (len(roles) + 1)]
    for each in sorted(operations, key=lambda each: (each.path_format, each.method)):
        open_to_all = "open" if each.role in OPEN_ROLES else ""
        cells = (open_to_all or each.reach_of(role) or "" for role in roles)
        rows.append((f"`{each.method} {each.path_format}`", *cells))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"## Routes and roles\n\n{_RIGHTS}\n\n{table}\n"


def _operation(title: str, operation: Json) -> str:
    lines = [f"### {title}\n", operation["description"], "", f"- Needs: {operation[ROLE]}"]
    lines += [f"- {rule}" for rule in operation.get(RULES, ())]
    for parameter in operation.get("parameters", ()):
        optional = "" if parameter["required"] else ", optional"
        kind = _type(parameter["schema"])
        lines.append(f"- `{parameter['name']}` ({parameter['in']}{optional}): {kind}")
    if body := operation.get("requestBody"):
        lines.append(f"- Takes: {_contents(body)}")
    for status, response in sorted(operation["responses"].items()):
        about = [_contents(response), response["description"].replace("Successful Response", "")]
        lines.append(f"- {status}: {' — '.join(filter(None, about)) or 'nothing'}")
    return "\n".join(lines) + "\n"


def _contents(holder: Json) -> str:
    return "; or ".join(
        (f"`{media}`: " if media != "application/json" else "") + _type(content["schema"])
        for media, content in holder.get("content", {}).items()
    )


def _schema(name: str, schema: Json) -> str:
    lines = [f"### {name}\n"] + ([schema["description"], ""] if "description" in schema else [])
    for field, about in schema.get("properties", {}).items():
        said = f" — {about['description']}" if "description" in about else ""
        optional = "" if field in schema.get("required", ()) else "?"
        lines.append(f"- `{field}`{optional}: {_type(about)}{said}")
    return "\n".join(lines) + "\n"


def _type(schema: Json) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return " with ".join([f"[{name}](#{name.lower()})", *map(_type, schema.get("allOf", ()))])
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(map(_type, schema.get("anyOf") or schema["oneOf"]))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("format") == "binary":
        return str(schema["description"])
    of = f" of {_type(schema['items'])}" if "items" in schema else ""
    bounds = ", ".join(f"{bound} {schema[bound]}" for bound in _BOUNDS if bound in schema)
    return f"{schema.get('type', 'anything')}{of}{f' ({bounds})' if bounds else ''}"


if __name__ == "__main__":
    PAGE.write_text(page())
