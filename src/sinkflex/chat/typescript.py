"""Tool schemas as the TypeScript-like namespace that gpt-oss models read in their developer message.

The layout is, character for character, that of the ``openai-harmony`` library, whose rendering the models were
trained on; its oddities (a nested object's description stands twice, the second time before the brace) included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sinkflex.types import JSONObject, ToolSchema

_INDENT = "    "
_WORDS = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def tool_namespace(name: str, tools: Sequence[ToolSchema]) -> str:
    """Write tools as one namespace.

    Args:
        name: the namespace, ``"functions"`` for tools the caller supplies.
        tools: their JSON schemas. Types, enums, lists, nested objects, unions by type list, titles, examples,
            defaults and descriptions are written out; what the notation has no word for (``anyOf``, ``$ref``)
            becomes ``any``.
    """
    lines = [f"## {name}", "", f"namespace {name} {{", ""]
    for tool in tools:
        lines += [f"// {line}" for line in tool.description.splitlines()]
        lines += [f"type {tool.name} = (_: {_type(tool.parameters, indent='', is_root=True)}) => any;", ""]
    return "\n".join([*lines, f"}} // namespace {name}"])


def _fields(schema: JSONObject, *, indent: str) -> str:
    required = schema.get("required", ())
    lines: list[str] = []
    for name, field in schema.get("properties", {}).items():
        lines += [f"{indent}// {line}".rstrip() for line in _comments(field)]
        mark = "" if name in required else "?"
        comment = f" // default: {_default(field)}" if "default" in field else ""
        lines.append(f"{indent}{name}{mark}: {_type(field, indent=indent)},{comment}")
    return "".join(line + "\n" for line in lines)


def _comments(field: JSONObject) -> list[str]:
    lines = [field["title"], ""] if field.get("title") else []
    lines += [field["description"]] if field.get("description") else []
    examples = [example for example in field.get("examples", ()) if isinstance(example, str)]
    lines += ["Examples:", *(f"- {_json(example)}" for example in examples)] if examples else []
    return lines


def _default(field: JSONObject) -> str:
    default = field["default"]
    return default if isinstance(default, str) and "enum" in field else _json(default)


def _type(schema: JSONObject, *, indent: str, is_root: bool = False) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_WORDS.get(word, word) for word in map(str, kind))
    if kind == "object":
        inner = indent if is_root else indent + _INDENT
        comment = f"{inner}// {schema['description']}\n" if schema.get("description") else ""
        written = f"{comment}{{\n{_fields(schema, indent=inner)}{inner}}}"
    elif kind == "array":
        written = f"{_type(schema['items'], indent=indent)}[]" if "items" in schema else "Array<any>"
    elif kind == "string" and schema.get("enum"):
        written = " | ".join(f'"{choice}"' for choice in schema["enum"])
    else:
        written = _WORDS.get(str(kind), "any")
    return f"{written} | null" if schema.get("nullable") else written


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
