"""What a dual-control domain provides, and the words the core and the domains share.

To write a domain, subclass ``Domain``: tasks, a world for each, two toolkits, a script for the user, a scorer, an
oracle and its plausible slips. The core supplies turns, budgets, parsing, scripted and LLM users, rewards,
metrics and the Gymnasium API; ``sinkflex.envs.checker`` says what is still wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from sinkflex.envs.tools import Side, Toolkit
from sinkflex.envs.world import World
from sinkflex.errors import TaskError, unknown_name
from sinkflex.types import JSONValue, Message, Role, ToolCall

if TYPE_CHECKING:
    from sinkflex.envs.users.scripted import Script

PROMPT_STYLES = ("brief", "full")
"""``brief`` is a few lines for small models, ``full`` the whole policy document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One task; domains add fields by subclassing.

    Attributes:
        task_id: unique in the domain and stable across versions.
        split: ``train`` or ``test``.
        tier: one of the domain's tiers.
        dual: True when both sides must change the world.
        hand_off: True when the right ending is a hand-off, as the policy document declares.
    """

    task_id: str
    split: str
    tier: str
    dual: bool
    hand_off: bool = False


TaskT = TypeVar("TaskT", bound=Task)


@dataclass(frozen=True, kw_only=True, slots=True)
class UserMove:
    """What a user does next.

    Attributes:
        message: own tool calls, or text to the agent; never both.
        stops: True when the user ends the dialogue with this text.
    """

    message: Message
    stops: bool = False


class User(Protocol):
    """The other side of the dialogue: scripted, an LLM, a person or another policy."""

    def open(self) -> Message:
        """Return the opening utterance; called once, first."""
        ...

    def act(self, incoming: Sequence[Message]) -> UserMove:
        """Return the next move.

        Args:
            incoming: the agent's text (role assistant), or the replies to the user's own tool calls (role tool).

        Raises:
            InfrastructureError: what the user runs on failed for good.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return counts of this user's own, such as tokens used; they join the episode's metrics."""
        ...

    def close(self) -> None:
        """Release what the user holds; may be called twice."""
        ...


class Domain(ABC, Generic[TaskT]):
    """A family of tasks over one kind of world.

    Attributes:
        name: the domain's name, used in ids and messages.
        tiers: difficulty tiers, easiest first.
        splits: names of the task splits.
        max_steps: default step budget of each tier.
        agent_tools: what the agent may call.
        user_tools: what the user may call.
        rules: policy rule code to one sentence that states it.
        confirmation_rules: the rules that say "confirm before writing"; counted as a metric of their own.
    """

    name: ClassVar[str]
    tiers: ClassVar[tuple[str, ...]]
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    max_steps: ClassVar[Mapping[str, int]]
    agent_tools: ClassVar[Toolkit]
    user_tools: ClassVar[Toolkit]
    rules: ClassVar[Mapping[str, str]]
    confirmation_rules: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def tier_task_ids(self, split: str, tier: str) -> tuple[str, ...]:
        """Return the ids of one split and tier, always the same in the same order."""

    @abstractmethod
    def task(self, task_id: str) -> TaskT:
        """Return a task.

        Raises:
            TaskError: there is no such task.
        """

    @abstractmethod
    def system_prompt(self, style: str) -> str:
        """Return the agent's policy in one of ``PROMPT_STYLES``."""

    @abstractmethod
    def user_prompt(self, task: TaskT) -> str:
        """Return what an LLM or a person playing the user is told: who they are, what they want and know."""

    @abstractmethod
    def build_world(self, task: TaskT) -> World:
        """Return the start state; it holds a ``session`` table made with ``session.session_table``."""

    @abstractmethod
    def script(self, task: TaskT) -> Script:
        """Return what the scripted user knows, understands and says in this task."""

    @abstractmethod
    def components(self, task: TaskT, world: World, *, handed_off: bool) -> Mapping[str, float | None]:
        """Grade the final world on both sides.

        Args:
            task: the task played.
            world: its final state.
            handed_off: whether the agent handed over to a human.

        Returns:
            Component name to a value in [0, 1]; None where the task has nothing to grade under that name. The
            score is the product of the values, times the core's own ``policy`` and ``ended``.
        """

    @abstractmethod
    def oracle(self, task: TaskT, world: World) -> Message:
        """Return the best next assistant message from this state, whatever led to it, known facts only."""

    def slips(self, task: TaskT, world: World) -> tuple[Message, ...]:
        """Return plausible wrong assistant messages for this state; none by default."""
        return ()

    def alternatives(self, task: TaskT, world: World) -> tuple[Message, ...]:
        """Return messages as right in this state as the oracle's, such as the same repairs in another order."""
        return ()

    def observe(self, task: TaskT, world: World, *, speaker: Side, text: str) -> None:
        """Note in the session what an utterance settles, such as consent; nothing by default."""

    def task_ids(self, split: str, tier: str | None = None) -> tuple[str, ...]:
        """Return the ids of a split, in one tier or in all.

        Raises:
            TaskError: unknown split or tier.
        """
        if split not in self.splits:
            raise TaskError(unknown_name(f"{self.name} split", split, self.splits))
        if tier is not None and tier not in self.tiers:
            raise TaskError(unknown_name(f"{self.name} tier", tier, self.tiers))
        tiers = self.tiers if tier is None else (tier,)
        return tuple(task_id for name in tiers for task_id in self.tier_task_ids(split, name))


def say(text: str) -> Message:
    """Return an assistant message to the user."""
    return Message(role=Role.ASSISTANT, content=text)


def call(name: str, **arguments: JSONValue) -> Message:
    """Return an assistant message that makes one tool call."""
    return Message(role=Role.ASSISTANT, tool_calls=(ToolCall(name=name, arguments=arguments),))
