"""Dual-control environments: the agent and the user both hold tools on one world.

Importing this package registers the Gymnasium ids, for example ``gymnasium.make("sinkflex/Telecom-v0")``.
"""

from __future__ import annotations

import gymnasium

from sinkflex.envs.dual_control import Budget, Episode, Outcome, Turn
from sinkflex.envs.gym import DualControlEnv
from sinkflex.envs.protocol import Domain, Task, User, UserMove, call, say
from sinkflex.envs.spaces import UnicodeText
from sinkflex.envs.tools import Side, Tool, Toolkit, ToolReply, tool
from sinkflex.envs.world import Record, Snapshot, World

ENV_IDS: dict[str, str] = {
    "sinkflex/Telecom-v0": "telecom",
}
"""Registered Gymnasium id to domain name."""

for _env_id, _domain in ENV_IDS.items():
    gymnasium.register(_env_id, entry_point="sinkflex.envs.gym:DualControlEnv", kwargs={"domain": _domain})

__all__ = [
    "ENV_IDS",
    "Budget",
    "Domain",
    "DualControlEnv",
    "Episode",
    "Outcome",
    "Record",
    "Side",
    "Snapshot",
    "Task",
    "Tool",
    "ToolReply",
    "Toolkit",
    "Turn",
    "UnicodeText",
    "User",
    "UserMove",
    "World",
    "call",
    "say",
    "tool",
]
