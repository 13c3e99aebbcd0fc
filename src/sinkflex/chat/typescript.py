"""Tool schemas as the TypeScript-like namespace that gpt-oss models read in their developer message."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sinkflex.types import JSONObject, ToolSchema

_INDENT = "    "


def tool_namespace(name: str, tools: Sequence[ToolSchema]) -> str:
    """Write tools as one namespace.

    Args:
        name: the namespace, ``"functions"`` for tools the caller supplies.
        tools: their JSON schemas. Types, enums, lists, nested objects, unions by type list, defaults and
            descriptions are written out; what the notation has no word for (``anyOf``, ``$ref``) becomes ``any``.
    """
    lines = [f"## {name}", "", f"namespace {name} {{", ""]
    for tool in tools:
        lines += [f"// {line}" for line in tool.description.splitlines()]
        if tool.parameters.get("properties") is None:
            lines.append(f"type {tool.name} = () => any;")
        else:
            lines.append(f"type {tool.name} = (_: {{")
            lines += _fields(tool.parameters, indent="")
            lines.append("}) => any;")
        lines.append("")
    return "\n".join([*lines, f"}} // namespace {name}"])


def _fields(schema: JSONObject, *, indent: str) -> list[str]:
    required = schema.get("required", ())
    lines = []
    for name, field in schema.get("properties", {}).items():
        if field.get("description"):
            lines.append(f"{indent}// {field['description']}")
        mark = "" if name in required else "?"
        comment = f" // default: {_default(field)}" if "default" in field else ""
        lines.append(f"{indent}{name}{mark}: {_type(field, indent=indent)},{comment}")
    return lines


def _default(field: JSONObject) -> str:
    default = field["default"]
    return (
        default if isinstance(default, str) and "enum" in field else json.dumps(default, ensure_ascii=False)
    )


def _type(schema: JSONObject, *, indent: str) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        written = " | ".join(_type({**schema, "type": one}, indent=indent) for one in kind)
    elif kind == "object":
        inner = "".join(line + "\n" for line in _fields(schema, indent=indent + _INDENT))
        written = "{\n" + inner + indent + _INDENT + "}"
    elif kind == "array":
        written = _type(schema.get("items", {}), indent=indent) + "[]"
    elif kind == "string" and schema.get("enum"):
        written = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in schema["enum"])
    else:
        words = {
            "string": "string",
            "integer": "number",
            "number": "number",
            "boolean": "boolean",
            "null": "null",
        }
        written = words.get(str(kind), "any")
    return f"{written} | null" if schema.get("nullable") else written
