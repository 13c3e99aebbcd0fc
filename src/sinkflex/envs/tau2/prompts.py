"""What the agent is told: the package's own words, or a short form for small models."""

from __future__ import annotations

from typing import Any

from sinkflex.envs.tau2.catalogue import Domain
from sinkflex.types import ToolSchema


def system_prompt(domain: Domain, style: str) -> str:
    """Return the system prompt.

    Args:
        domain: whose agent it is for.
        style: ``full`` is what the package's own agent gets, instruction and policy; ``brief`` the instruction alone.
    """
    agents = domain.package.agents
    instruction: str = agents.AGENT_INSTRUCTION
    if style == "brief":
        return instruction
    full: str = agents.SYSTEM_PROMPT.format(agent_instruction=instruction, domain_policy=domain.policy)
    return full


def tool_schemas(domain: Domain, style: str) -> tuple[ToolSchema, ...]:
    """Return the agent's tools.

    Args:
        domain: whose tools they are.
        style: ``full`` as the package describes them; ``brief`` keeps the first sentence and the argument types.
    """
    if style == "full":
        return domain.agent_tools
    return tuple(
        ToolSchema(
            name=schema.name,
            description=" ".join(schema.description.split()).split(". ")[0].rstrip(".") + ".",
            parameters=_bare(schema.parameters),
        )
        for schema in domain.agent_tools
    )


def _bare(schema: Any) -> Any:
    """Drop titles and descriptions; a property that happens to have such a name is kept."""
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _bare(item) for name, item in value.items()} if key in ("properties", "$defs") else _bare(value)
        for key, value in schema.items()
        if key not in ("title", "description")
    }
