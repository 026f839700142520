"""Writes docs/api.md out of the application's own routes: `make api-docs`.

`python -m scripts.api_docs --check` says by its exit status whether the file is up to date.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from gateway.api.description.document import Json, Operation, document
from gateway.api.description.served import OPENAPI, described_operations
from gateway.app import create_app
from tandem.settings import GatewaySettings

PAGE = Path(__file__).parents[1] / "docs" / "api.md"

_NEEDS = {
    "nothing": "no key",
    "signature": "a signed address",
    "look": "any key",
    "change": "a key with the role member or admin",
    "admin": "a key with the role admin",
}
_TAGS = {
    "SDK": "The routes of the SDK",
    "OpenAI": "The side entrance for OpenAI's clients",
    "Tandem": "Tandem's own routes",
}
_INTRO = f"""# The routes of the gateway

Made by `make api-docs` out of the application's own routes; do not edit. The same description
in OpenAPI 3.1, with all schemas, is served as `{OPENAPI}`. It is open to the machine that the
gateway runs on; from elsewhere, and through a proxy, it needs a key, as `/metrics` does.

A key comes as `X-API-Key: KEY` or as `Authorization: Bearer KEY`, and so does a token that was
exchanged for one. Roles are explained in [security.md](security.md). Bodies are JSON unless
something else is said, and may be compressed (`Content-Encoding: zstd`). Fields that are not
named are ignored where a route does not say that it refuses them.

A request that is refused is answered with
`{{"error": sentence, "type": word, "category": "user" | "server"}}`; limits say more in `limit`,
`limit_value`, `used`, `retry_after_seconds` and `queue_position`. An accepted operation that fails
is answered by `retrieve_future` with 200 and the same three fields. Every route can also answer
405 (`unknown_endpoint`, with `Allow`), 408 and 431 for headers that come too slowly or are too
long, and 429 (`overloaded`, with `Retry-After`). Another owner's thing is a thing that does not
exist. Things that a route names but that are not listed below are refused with 404.
"""


def page() -> str:
    """The whole page. It depends on the code alone."""
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(GatewaySettings(data_dir=Path(folder)))
        found = described_operations(app)
    whole = document(found)
    parts = [_INTRO]
    for tag, title in _TAGS.items():
        chosen = [o for o in found if o.described.tag == tag]
        parts.append(f"## {title}\n")
        parts += [_section(operation, whole) for operation in chosen]
    parts.append("## Bodies\n\nAs JSON schemas; `?` marks a field that may be left out.\n")
    schemas = _fields(_fields(whole["components"])["schemas"])
    parts += [_schema(name, _fields(schema)) for name, schema in schemas.items()]
    return "\n".join(parts)


def _section(operation: Operation, whole: Json) -> str:
    item = _fields(_fields(_fields(whole["paths"])[operation.path])[operation.method.lower()])
    lines = [f"### {operation.method} {operation.path}\n", f"{item['summary']}"]
    if "description" in item:
        lines.append(f"{item['description']}")
    lines += ["", f"- Needs: {_NEEDS[operation.need]}"]
    for parameter in cast(Sequence[Json], item.get("parameters", ())):
        lines.append(f"- {_parameter(parameter)}")
    if "requestBody" in item:
        body = _fields(item["requestBody"])
        lines.append(f"- Takes: {_contents(body)}{'' if body['required'] else ', or nothing'}")
    for status, response in _fields(item["responses"]).items():
        about = _fields(response)
        shown = _contents(about) if "content" in about else ""
        said = " ".join(f"{about['description']}".split()).replace("As asked.", "")
        lines.append(f"- {status}: {' — '.join(filter(None, (shown, said)))}")
    return "\n".join(lines) + "\n"


def _parameter(parameter: Json) -> str:
    about = parameter.get("description", "")
    optional = "" if parameter["required"] else ", optional"
    said = f": {about}" if about else ""
    schema = _type(_fields(parameter["schema"]))
    return f"`{parameter['name']}` ({parameter['in']}{optional}; {schema}){said}"


def _contents(holder: Json) -> str:
    shown = []
    for media, content in _fields(holder["content"]).items():
        schema = _fields(_fields(content)["schema"])
        binary = schema.get("format") == "binary"
        shown.append(f"`{media}`: {schema['description']}" if binary else _type(schema))
    return "; or ".join(shown)


def _schema(name: str, schema: Json) -> str:
    lines = [f"### {name}\n"]
    if "description" in schema:
        lines.append(" ".join(str(schema["description"]).split()) + "\n")
    if "properties" not in schema:
        return "\n".join([*lines, _type(schema), ""])
    required = cast(Sequence[str], schema.get("required", ()))
    for field, of in _fields(schema["properties"]).items():
        about = _fields(of)
        said = f" — {about['description']}" if "description" in about else ""
        optional = "" if field in required else "?"
        lines.append(f"- `{field}`{optional}: {_type(about)}{said}")
    return "\n".join(lines) + "\n"


def _type(schema: Json) -> str:
    """A schema in a few words."""
    return " ".join(filter(None, [_kind(schema), *_bounds(schema)]))


def _kind(schema: Json) -> str:
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for joint, word in (("anyOf", " or "), ("oneOf", " or "), ("allOf", " with ")):
        if joint in schema:
            return word.join(_type(each) for each in cast(Sequence[Json], schema[joint]))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in cast(Sequence[object], schema["enum"]))
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"array of {_type(_fields(schema.get('items', {})))}"
    more = schema.get("additionalProperties")
    if kind == "object" and isinstance(more, dict) and more:
        return f"object of {_type(cast(Json, more))}"
    return f"{kind} ({schema['format']})" if "format" in schema else kind


_BOUNDS: Mapping[str, str] = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "of {} characters or more",
    "maxLength": "of {} characters at most",
    "minItems": "of {} items or more",
    "maxItems": "of {} items at most",
    "default": "(default {})",
}


def _bounds(schema: Json) -> Iterator[str]:
    for key, form in _BOUNDS.items():
        value = schema.get(key)
        if value is not None and value != "":
            yield form.format(value if not isinstance(value, str) else f"`{value}`")


def _fields(value: object) -> Json:
    assert isinstance(value, dict)
    return cast(Json, value)


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
