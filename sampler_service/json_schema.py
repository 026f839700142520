"""Rewrites a client's JSON schema into keywords that llguidance implements.

- `format` gets a pattern if pydantic writes it (`json_formats`). An unknown format is only an
  annotation (JSON Schema 2020-12, section 7).
- `propertyNames` with an enum or pattern becomes a schema of properties without additional ones.
- `uniqueItems` of an enum's values becomes an enum of all arrangements.

Equivalents go into `allOf`. llguidance intersects its members, and refuses other keywords."""

from __future__ import annotations

import json
from itertools import accumulate, permutations
from math import perm

from sampler_service.json_formats import ASCII, BESIDE, IN_BYTES, NO_NUMBER, PATTERNS
from tandem.errors import StructuredOutputInvalid

Schema = dict[str, object]

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats that llguidance knows."""

_ONE = frozenset(
    {"items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not"}
    | {"if", "then", "else", "unevaluatedItems", "unevaluatedProperties"}
)
_SEVERAL = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""Keywords with schemas as values: one schema, a list, or schemas by name."""

_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "$comment", "type")
)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}
_MOST_ARRANGEMENTS = 4096
_MOST_REFERENCES = 32


def rewrite_schema(text: str) -> str:
    """Return an equivalent schema for llguidance. Raises `StructuredOutputInvalid`."""
    try:
        root = json.loads(text, strict=False)
        return json.dumps(_Rewriter(root).rewritten(root))
    except (ValueError, RecursionError) as error:
        raise StructuredOutputInvalid(f"the JSON schema is refused: {error}") from error


class _Rewriter:
    def __init__(self, root: object) -> None:
        self._root = root

    def rewritten(self, schema: object) -> object:
        if not isinstance(schema, dict):
            return schema  # true and false are schemas too
        found = {keyword: self._value(keyword, value) for keyword, value in schema.items()}
        equivalents = self._format(found)
        if isinstance(pattern := found.get("pattern"), str) and pattern.startswith(NO_NUMBER):
            found["pattern"] = f"^{pattern.removeprefix(NO_NUMBER)}"
            equivalents.append({"pattern": "[0-9]"})
        if "propertyNames" in found:
            equivalents += self._property_names(found.pop("propertyNames"))
        if "uniqueItems" in found and found.pop("uniqueItems") is True:
            equivalents += self._unique_items(found)
        if equivalents:
            members = found.get("allOf")
            found["allOf"] = [*(members if isinstance(members, list) else ()), *equivalents]
        return found

    def _value(self, keyword: str, value: object) -> object:
        if keyword in _NAMED and isinstance(value, dict):
            return {name: self.rewritten(one) for name, one in value.items()}
        if keyword in _SEVERAL and isinstance(value, list):
            return [self.rewritten(one) for one in value]
        return self.rewritten(value) if keyword in _ONE else value

    @staticmethod
    def _format(string: Schema) -> list[Schema]:
        """Return the pattern of a format, and drop the format if llguidance cannot use it.

        Values or a pattern beside the format are narrower, so it gets none."""
        name = string.get("format")
        if not isinstance(name, str):
            return []
        pattern = PATTERNS.get(name, BESIDE.get(name))
        if name in IN_BYTES and "maxLength" in string:
            pattern = ASCII
        if string.keys() & {"const", "enum", "pattern"}:
            pattern = None
        if name not in FORMATS or (pattern is not None and name not in BESIDE):
            del string["format"]
        return [] if pattern is None else [{"pattern": f"^(?:{pattern})$"}]

    def _property_names(self, names: object) -> list[Schema]:
        """Return the schemas of properties that equal a schema of names."""
        names = self._resolved(names)
        if names is True:
            return []
        if names is False:
            return [_only({})]
        if isinstance(names, dict):
            values = self._values(names)
            if values is not None:
                return [_only({name: True for name in values if isinstance(name, str)})]
            bounds = {key: value for key, value in names.items() if key not in _NOTES}
            pattern, other = bounds.pop("pattern", None), bounds.keys() - {"minLength", "maxLength"}
            if isinstance(pattern, str) and not bounds:
                return [_only({}, patterns={pattern: True})]
            if pattern is None and not other and names.get("type", "string") == "string":
                if not bounds:
                    return []
                least, most = bounds.get("minLength", 0), bounds.get("maxLength")
                if isinstance(least, int) and isinstance(most, int | None):
                    length = f"{least},{'' if most is None else most}"
                    return [_only({}, patterns={f"^(?s:.{{{length}}})$": True})]
        raise _refused(
            "propertyNames can be an enum, a pattern, or bounds of length; state other rules in "
            "properties or patternProperties"
        )

    def _unique_items(self, array: Schema) -> list[Schema]:
        """Return the enum of all arrays of different items, in place of the array's keywords.

        A grammar cannot compare items, so there must be few values."""
        least, most = array.get("minItems", 0), array.get("maxItems")
        values = self._values(self._resolved(array.get("items")))
        if values is None and "prefixItems" not in array and isinstance(most, int) and most <= 1:
            return []
        if values is not None and "prefixItems" not in array and isinstance(least, int):
            longest = min(len(values), most) if isinstance(most, int) else len(values)
            sizes = range(least, longest + 1)
            counts = accumulate(perm(len(values), size) for size in sizes)
            if all(count <= _MOST_ARRANGEMENTS for count in counts):
                for keyword in ("items", "minItems", "maxItems"):
                    array.pop(keyword, None)
                return [{"enum": [list(one) for n in sizes for one in permutations(values, n)]}]
        raise _refused(
            "uniqueItems needs items that are an enum of few values (up to "
            f"{_MOST_ARRANGEMENTS} arrangements); leave it out, and check the answer"
        )

    @staticmethod
    def _values(schema: object) -> list[object] | None:
        """Return the different values that a schema lists, or None."""
        if not isinstance(schema, dict):
            return None
        rules = {key: value for key, value in schema.items() if key not in _NOTES}
        listed = rules.get("enum")
        if rules.keys() == {"enum"} and isinstance(listed, list):
            values = listed
        elif rules.keys() == {"const"}:
            values = [rules["const"]]
        elif not rules and schema.get("type") == "boolean":
            values = [True, False]
        else:
            return None
        kind = _TYPES.get(str(schema.get("type")), object)
        fitting = (value for value in values if isinstance(value, kind))
        return list({json.dumps(value, sort_keys=True): value for value in fitting}.values())

    def _resolved(self, schema: object) -> object:
        """Follow a schema's references within `root`. Returns None if one leads nowhere."""
        for _ in range(_MOST_REFERENCES):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                return schema
            target = self._root
            for part in reference.removeprefix("#").split("/")[1:]:
                name = part.replace("~1", "/").replace("~0", "~")
                target = target.get(name) if isinstance(target, dict) else None
            schema = target
        return None


def _only(properties: Schema, *, patterns: Schema | None = None) -> Schema:
    return {
        "properties": properties,
        "patternProperties": patterns or {},
        "additionalProperties": False,
    }


def _refused(why: str) -> StructuredOutputInvalid:
    return StructuredOutputInvalid(f"the JSON schema is refused: {why}")
