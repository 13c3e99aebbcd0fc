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
    "sinkflex/Mock-v0": "mock",
    "sinkflex/Retail-v0": "retail",
    "sinkflex/Telecom-v0": "telecom",
}
"""Registered id of an embedded domain to its name."""

TAU2_IDS: dict[str, str] = {
    "sinkflex/Tau2-Airline-v0": "airline",
    "sinkflex/Tau2-Mock-v0": "mock",
    "sinkflex/Tau2-Retail-v0": "retail",
    "sinkflex/Tau2-Telecom-v0": "telecom",
    "sinkflex/Tau2-Telecom-Workflow-v0": "telecom-workflow",
}
"""Registered id of a τ²-bench domain to its name there; making one needs the extra ``sinkflex[tau2]``."""

for _env_id, _domain in ENV_IDS.items():
    gymnasium.register(_env_id, entry_point="sinkflex.envs.gym:DualControlEnv", kwargs={"domain": _domain})
for _env_id, _domain in TAU2_IDS.items():
    # τ²'s mock domain has no train split.
    _kwargs = {"domain": _domain, "split": "base"} if _domain == "mock" else {"domain": _domain}
    gymnasium.register(_env_id, entry_point="sinkflex.envs.tau2.env:Tau2Env", kwargs=_kwargs)

__all__ = [
    "ENV_IDS",
    "TAU2_IDS",
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
