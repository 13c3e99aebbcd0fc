"""The Gymnasium face of τ²-bench: the same contract as SinkFlex's own domains, on the package's real tasks."""

from __future__ import annotations

import copy
import random
from typing import Any

import gymnasium
from gymnasium.utils import EzPickle

from sinkflex.chat.parsing import ActionFormat, parse_action
from sinkflex.envs.options import RENDER_MODES, EnvOptions
from sinkflex.envs.render import describe_components, describe_messages, describe_tools
from sinkflex.envs.spaces import UnicodeText
from sinkflex.envs.tau2.catalogue import load_domain
from sinkflex.envs.tau2.episode import Tau2Episode
from sinkflex.envs.tau2.grading import Grade, Judge, load_grader
from sinkflex.envs.tau2.judging import endpoint_judge
from sinkflex.envs.tau2.oracle import Oracle
from sinkflex.envs.tau2.prompts import system_prompt, tool_schemas
from sinkflex.envs.tau2.slips import slips
from sinkflex.envs.tau2.users import Factory, user_factory
from sinkflex.errors import EnvError, TaskError, unknown_name
from sinkflex.types import Message, ToolSchema

RESET_OPTIONS = ("task_id", "split", "tier", "group_seed")
TIER = "tau2"
"""The one tier; the package does not grade its tasks by difficulty."""

_MAX_SEED = 2**31 - 1
_MAX_STEPS = 100
_DEFAULTS = {"prompt": "full", "max_invalid_actions": 10}


class Tau2Env(gymnasium.Env[str, str], EzPickle):
    """One agent on τ²-bench's own tasks.

    One ``step`` takes one assistant generation as raw text: tool calls, or a message to the user. The reward is 0 until
    the episode ends and τ²'s reward then. A pickled environment comes back as newly made, without its episode.

    Args:
        domain: a name in ``catalogue.DOMAINS``.
        user: ``scripted``, ``llm`` (any OpenAI-compatible endpoint), ``upstream`` (the package's own simulator),
            ``person`` (at the terminal), or a factory of one's own.
        judge: checks natural-language assertions, which only upstream's retail is scored by: a function, or fields of
            ``EndpointConfig`` for a model that judges; None leaves them out and flags the score.
        **options: fields of ``EnvOptions``. ``split`` is ``train``, ``test`` or ``base`` (all); ``mock`` has ``base``
            only. ``prompt`` is ``full`` unless given: the package's own instruction and policy with full tool
            descriptions; ``brief`` leaves the policy out and its scores are not comparable. ``max_steps`` is 100 unless
            given. ``max_invalid_actions``, 10 unless given as in the package, counts malformed actions and error
            replies to either side's calls.

    Raises:
        MissingExtraError: the package is not installed.
        EnvError: an option is unknown, not one of its choices, or below its minimum.
        TaskError: unknown domain, split or tier.
    """

    metadata = {"render_modes": list(RENDER_MODES), "render_fps": 4}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(
        self,
        *,
        domain: str,
        user: str | Factory = "scripted",
        judge: Judge | dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        EzPickle.__init__(self, domain=domain, user=user, judge=judge, **options)
        self.options = EnvOptions.read({**_DEFAULTS, **options})
        self.domain = load_domain(domain)
        self.split = self.options.split
        self.task_ids(self.split, self.options.tier)
        self.render_mode = self.options.render_mode
        self._format = ActionFormat(self.options.action_format)
        self._system = system_prompt(self.domain, self.options.prompt)
        self._tools = tool_schemas(self.domain, self.options.prompt)
        self._judge = endpoint_judge(**judge) if isinstance(judge, dict) else judge
        self._new_user = user_factory(user, self.options.user_options or {}) if isinstance(user, str) else user
        self._grader = load_grader(self.domain)
        self._episode: Tau2Episode | None = None
        self._user: Any = None
        self._grade: Grade | None = None
        self._shown = 0
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()

    def task_ids(self, split: str, tier: str | None = None) -> tuple[str, ...]:
        """Return the ids of a split in the package's order.

        Raises:
            TaskError: unknown split or tier.
        """
        if tier not in (None, TIER):
            raise TaskError(unknown_name(f"tau2 {self.domain.name} tier", str(tier), (TIER,)))
        return self.domain.task_ids(split)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: seeds the draw of tasks and group seeds that ``options`` leave open.
            options: ``task_id``; or ``split`` to draw from; ``group_seed``. Equal ``task_id`` and ``group_seed`` give
                an identical start state and user.

        Returns:
            The system prompt, tools and opening as text; and info with ``task_id``, ``split``, ``tier``, ``system``,
            ``tools`` and ``messages`` (the package's greeting and the user's opening, or the task's history).

        Raises:
            EnvError: an unknown option.
            TaskError: unknown task, split or tier.
            InfrastructureError: the package or the user's backend failed.
        """
        super().reset(seed=seed)
        options = options or {}
        for name in options:
            if name not in RESET_OPTIONS:
                raise EnvError(unknown_name("reset option", name, RESET_OPTIONS))
        self._drop_episode()
        task_id = self._draw_task(str(options.get("split") or self.split), options)
        split = self._split_of(task_id, options.get("split"))
        group_seed = options.get("group_seed")
        if group_seed is None:
            group_seed = int(self.np_random.integers(_MAX_SEED))
        self._user = self._new_user(self.domain, task_id, random.Random(f"{task_id}/{group_seed}"))
        self._episode = Tau2Episode(
            domain=self.domain,
            task_id=task_id,
            user=self._user,
            budget=self.options.budget(default_steps=_MAX_STEPS),
            seed=int(group_seed),
        )
        messages = self._episode.start()
        info = {
            "task_id": task_id,
            "split": split,
            "tier": TIER,
            "system": self._system,
            "tools": self.tools,
            "messages": messages,
        }
        self._after_move()
        return f"{self._system}\n\nTools:\n{describe_tools(self._tools)}\n\n{describe_messages(messages)}", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one assistant generation.

        Args:
            action: raw text; malformed text is a counted step whose observation says why.

        Returns:
            Observation; reward (τ²'s reward when the episode ends, else 0.0); terminated (the user or a hand-off ended
            it); truncated (a budget did, which τ² scores 0); info with ``messages``, ``invalid_action``,
            ``stop_reason`` and, at the end, ``score``, ``components``, ``metrics``, ``reward_basis``, ``unjudged`` and
            ``package``.

        Raises:
            EnvError: no episode is running, or the action is no text.
            InfrastructureError: the package, the user's backend or the judge failed; never scored.
        """
        if not isinstance(action, str):
            raise EnvError(f"an action is text, got {type(action).__name__}")
        turn = self.episode.act(parse_action(action, action_format=self._format))
        reason = turn.stop_reason
        info: dict[str, Any] = {
            "messages": turn.messages,
            "invalid_action": turn.invalid_action,
            "stop_reason": None if reason is None else str(reason),
        }
        reward = 0.0
        if reason is not None:
            self._grade = grade = self._graded(stopped=reason.is_termination)
            reward = grade.score
            info |= {
                "score": grade.score,
                "components": dict(grade.components),
                "metrics": self.metrics(),
                "reward_basis": grade.basis,
                "unjudged": grade.unjudged,
                "package": self.domain.package.label,
            }
        self._after_move()
        terminated = reason is not None and reason.is_termination
        return describe_messages(turn.messages), reward, terminated, reason is not None and not terminated, info

    @property
    def episode(self) -> Tau2Episode:
        """The running episode.

        Raises:
            EnvError: ``reset`` was not called.
        """
        if self._episode is None:
            raise EnvError("no episode is running; call reset first")
        return self._episode

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """Fresh schemas of the agent's tools; callers may change them."""
        return copy.deepcopy(self._tools)

    def metrics(self) -> dict[str, float]:
        """Return counts that describe the episode so far; they do not enter its score."""
        cost = self._user.metrics() if hasattr(self._user, "metrics") else {}
        return {**self.episode.metrics(), **cost}

    def oracle_message(self, *, grounded: bool = False) -> Message:
        """Return the next message of a perfect agent from the current state: gold actions and the talk they need.

        Args:
            grounded: also look up ids that the gold actions use without ever having read them.
        """
        oracle = Oracle(self.domain, self.episode.task_id)
        return oracle.next_message(self.episode.trajectory, grounded=grounded)

    def slip_messages(self) -> tuple[Message, ...]:
        """Return plausible wrong alternatives to the oracle's message, for imperfect demonstrations."""
        best = self.oracle_message()
        return tuple(slip for slip in slips(best, self.episode.trajectory) if slip != best)

    def render(self) -> str | None:
        """Return the dialogue so far (``ansi``), or None: ``human`` prints by itself."""
        if self.render_mode != "ansi":
            return None
        return self._score_line(describe_messages(self.episode.transcript))

    def close(self) -> None:
        """End the episode and release the user; may be called twice."""
        self._drop_episode()
        close = getattr(self._new_user, "close", None)
        if close is not None:  # a factory that shares connections between episodes
            close()
        super().close()

    def _draw_task(self, split: str, options: dict[str, Any]) -> str:
        ids = self.task_ids(split, options.get("tier") or self.options.tier)
        if options.get("task_id") is not None:
            return str(options["task_id"])
        return ids[int(self.np_random.integers(len(ids)))]

    def _split_of(self, task_id: str, asked: str | None) -> str:
        """The split a task is in: the one asked for, else the environment's own, else the narrowest that has it.

        Raises:
            TaskError: the split asked for does not hold the task, or no split does.
        """
        self.domain.task(task_id)
        if asked is not None and task_id not in self.task_ids(asked):
            raise TaskError(
                f"split {asked!r} of tau2 {self.domain.name} does not hold task {task_id!r}; leave split out"
            )
        candidates = (asked or self.split, *sorted(self.domain.splits, key=lambda name: len(self.domain.splits[name])))
        return next(name for name in candidates if task_id in self.domain.splits[name])

    def _graded(self, *, stopped: bool) -> Grade:
        return self._grader.grade(
            self.episode.task_id,
            self.episode.environment,
            self.episode.trajectory,
            stopped=stopped,
            judge=self._judge,
            dialogue=self.episode.transcript,
        )

    def _drop_episode(self) -> None:
        if hasattr(self._user, "close"):
            self._user.close()
        self._user = self._episode = self._grade = None
        self._shown = 0

    def _after_move(self) -> None:
        if self.render_mode != "human":
            return
        transcript = self.episode.transcript
        print(self._score_line(describe_messages(transcript[self._shown :])))
        self._shown = len(transcript)

    def _score_line(self, text: str) -> str:
        if self._grade is None:
            return text
        return (
            f"{text}\n== {self.episode.stop_reason}: score {self._grade.score:g} "
            f"({describe_components(self._grade.components)}) on {self.domain.package.label}"
        )
