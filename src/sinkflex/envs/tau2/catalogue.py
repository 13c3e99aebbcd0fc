"""One domain of the package, loaded once a process: tasks, splits, prompts, tool schemas and start states."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sinkflex.envs.tau2.isolation import EnvironmentStore
from sinkflex.envs.tau2.package import Tau2Package, load_package
from sinkflex.errors import TaskError, unknown_name
from sinkflex.types import ToolSchema

DOMAINS = ("retail", "airline", "telecom", "telecom-workflow", "mock")
"""Domains the adapter offers, by their names in the package."""

HAND_OFF_TOOL = "transfer_to_human_agents"
"""The agent's tool that ends the dialogue, in every domain."""


class Domain:
    """Tasks and start states of one domain.

    Args:
        name: one of ``DOMAINS``.
        package: the installed package.

    Attributes:
        tasks: task id to the package's own task object; read-only.
        splits: split name to task ids in the package's order. Always has ``base``.
        policy: the policy document the agent must follow.
        agent_tools: the package's own descriptions, in full.
        user_tools: schemas of the user's tools; empty where the user has none.
        writing_tools: names of the tools, of either side, declared as writing.
    """

    def __init__(self, name: str, package: Tau2Package) -> None:
        self.name = name
        self.package = package
        self.tasks: Mapping[str, Any] = {task.id: task for task in package.registry.get_tasks_loader(name)(None)}
        loader = package.registry.get_task_splits_loader(name)
        splits = {} if loader is None else {split: tuple(ids) for split, ids in (loader() or {}).items()}
        self.splits: Mapping[str, tuple[str, ...]] = splits or {"base": tuple(self.tasks)}
        template = package.registry.get_env_constructor(name)()
        self.policy: str = template.get_policy()
        self.agent_tools = _schemas(template.tools)
        self.user_tools = _schemas(template.user_tools)
        self.writing_tools = frozenset(
            tool
            for kit in (template.tools, template.user_tools)
            if kit is not None
            for tool in kit.tools
            if kit.tool_type(tool).value == "write"
        )
        self.store = EnvironmentStore(template)
        self._starts: dict[str, bytes] = {}

    def task_ids(self, split: str) -> tuple[str, ...]:
        """Return the ids of a split.

        Raises:
            TaskError: the domain has no such split.
        """
        if split not in self.splits:
            raise TaskError(unknown_name(f"split of tau2 {self.name}", split, self.splits))
        return self.splits[split]

    def task(self, task_id: str) -> Any:
        """Return the package's task object.

        Raises:
            TaskError: the domain has no such task.
        """
        if task_id not in self.tasks:
            raise TaskError(unknown_name(f"task of tau2 {self.name}", task_id, self.tasks))
        return self.tasks[task_id]

    def start(self, task_id: str) -> Any:
        """Return a private environment in the task's start state, before any message of its history is replayed.

        The first call for a task runs its initialisation and keeps the outcome; later ones load it.
        """
        initial = self.task(task_id).initial_state
        if initial is None or not (initial.initialization_data or initial.initialization_actions):
            return self.store.pristine()
        if task_id not in self._starts:
            environment = self.store.pristine()
            environment.set_state(
                initialization_data=initial.initialization_data,
                initialization_actions=initial.initialization_actions,
                message_history=[],
            )
            self._starts[task_id] = self.store.freeze(environment)
        return self.store.thaw(self._starts[task_id])


@cache
def load_domain(name: str) -> Domain:
    """Load a domain once a process.

    Raises:
        TaskError: ``name`` is not one of ``DOMAINS``.
        MissingExtraError: the package is not installed.
    """
    if name not in DOMAINS:
        raise TaskError(unknown_name("tau2 domain", name, DOMAINS))
    return Domain(name, load_package())


def _schemas(toolkit: Any) -> tuple[ToolSchema, ...]:
    if toolkit is None:
        return ()
    functions = [tool.openai_schema["function"] for tool in toolkit.get_tools().values()]
    return tuple(
        ToolSchema(name=function["name"], description=function["description"], parameters=function["parameters"])
        for function in functions
    )
