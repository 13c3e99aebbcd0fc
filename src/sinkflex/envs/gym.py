"""The Gymnasium face of a dual-control domain: text in, text out, the structured truth in ``info``."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
from gymnasium.utils import EzPickle

from sinkflex.chat.parsing import ActionFormat, parse_action
from sinkflex.envs.dual_control import Episode, Outcome
from sinkflex.envs.options import RENDER_MODES, EnvOptions
from sinkflex.envs.protocol import Domain
from sinkflex.envs.registry import get_domain, get_user_factory
from sinkflex.envs.render import describe_components, describe_messages, describe_tools, describe_transcript
from sinkflex.envs.spaces import UnicodeText
from sinkflex.errors import EnvError, TaskError, unknown_name
from sinkflex.types import Message

RESET_OPTIONS = ("task_id", "split", "tier", "group_seed")
_MAX_SEED = 2**31 - 1


class DualControlEnv(gymnasium.Env[str, str], EzPickle):
    """One agent in a dialogue with a user, both holding tools on one world.

    One ``step`` takes one assistant generation as raw text: tool calls, or a message to the user. The observation is
    what the assistant reads next, as text; ``info["messages"]`` holds the same as ``Message`` objects. The reward is
    0 until the episode ends and the score then. A pickled environment comes back as newly made, without its episode.

    Args:
        domain: a name in ``registry.DOMAINS``, ``"module:Class"`` of an own ``Domain``, or a ``Domain`` itself.
        **options: fields of ``EnvOptions``: ``split``, ``tier``, ``user``, ``user_options``, ``action_format``,
            ``prompt``, ``max_steps``, ``max_invalid_actions``, ``render_mode``.

    Raises:
        EnvError: an option is unknown, not one of its choices, or below its minimum.
        TaskError: unknown split or tier.
    """

    metadata = {"render_modes": list(RENDER_MODES), "render_fps": 4}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(self, *, domain: str | Domain[Any], **options: Any) -> None:
        EzPickle.__init__(self, domain=domain, **options)
        self.options = EnvOptions.read(options)
        self.domain: Domain[Any] = get_domain(domain) if isinstance(domain, str) else domain
        self.split = self.options.split
        self.domain.task_ids(self.split, self.options.tier)
        self.render_mode = self.options.render_mode
        self._format = ActionFormat(self.options.action_format)
        self._system = self.domain.system_prompt(self.options.prompt)
        self._new_user = get_user_factory(self.options.user, self.options.user_options or {})
        self._tool_text = describe_tools(self.domain.agent_tools.schemas)
        self._episode: Episode[Any] | None = None
        self._shown = 0
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()

    def task_ids(self, split: str, tier: str | None = None) -> tuple[str, ...]:
        """Return the ids of a split, in one tier or in all; the order never changes."""
        return self.domain.task_ids(split, tier)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: seeds the draw of tasks and group seeds that ``options`` leave open.
            options: ``task_id``; or ``split`` and ``tier`` to draw from; ``group_seed``. Equal ``task_id`` and
                ``group_seed`` give an identical start state and user.

        Returns:
            The system prompt, tools and opening as text; and info with ``task_id``, ``split``, ``tier``, ``system``,
            ``tools`` and ``messages``.

        Raises:
            EnvError: an unknown option.
            TaskError: unknown task, split or tier.
        """
        super().reset(seed=seed)
        options = options or {}
        for name in options:
            if name not in RESET_OPTIONS:
                raise EnvError(unknown_name("reset option", name, RESET_OPTIONS))
        self._drop_episode()
        task = self.domain.task(self._draw_task(options))
        group_seed = options.get("group_seed")
        if group_seed is None:
            group_seed = int(self.np_random.integers(_MAX_SEED))
        user = self._new_user(self.domain, task, random.Random(f"{task.task_id}/{group_seed}"))
        budget = self.options.budget(default_steps=self.domain.max_steps[task.tier])
        self._episode = Episode(domain=self.domain, task=task, user=user, budget=budget)
        messages = self._episode.start()
        info = {
            "task_id": task.task_id,
            "split": task.split,
            "tier": task.tier,
            "system": self._system,
            "tools": self.domain.agent_tools.schemas,
            "messages": messages,
        }
        self._after_move()
        return f"{self._system}\n\nTools:\n{self._tool_text}\n\n{describe_messages(messages)}", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one assistant generation.

        Args:
            action: raw text; malformed text is a counted step whose observation says why.

        Returns:
            Observation; reward (the score when the episode ends, else 0.0); terminated (the user or a hand-off ended
            it); truncated (a budget did); info with ``messages``, ``invalid_action``, ``stop_reason`` and, at the
            end, ``score``, ``components``, ``breaches`` and ``metrics``.

        Raises:
            EnvError: no episode is running, the action is no text, or the domain is broken.
            InfrastructureError: the user's backend failed for good.
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
            outcome: Outcome = self.episode.outcome()
            reward = outcome.score
            info |= {
                "score": outcome.score,
                "components": outcome.components,
                "metrics": outcome.metrics,
                "breaches": outcome.breaches,
            }
        self._after_move()
        terminated = reason is not None and reason.is_termination
        truncated = reason is not None and not terminated
        return describe_messages(turn.messages), reward, terminated, truncated, info

    @property
    def episode(self) -> Episode[Any]:
        """The running episode.

        Raises:
            EnvError: ``reset`` was not called.
        """
        if self._episode is None:
            raise EnvError("no episode is running; call reset first")
        return self._episode

    def metrics(self) -> dict[str, float]:
        """Return counts that describe the episode so far; they do not enter its score."""
        return self.episode.outcome().metrics

    def oracle_message(self) -> Message:
        """Return the best next assistant message from the current state, whatever happened before."""
        return self.domain.oracle(self.episode.task, self.episode.world)

    def slip_messages(self) -> tuple[Message, ...]:
        """Return plausible wrong alternatives to the oracle's message, for imperfect demonstrations."""
        best = self.oracle_message()
        return tuple(slip for slip in self.domain.slips(self.episode.task, self.episode.world) if slip != best)

    def render(self) -> str | None:
        """Return the dialogue so far (``ansi``), or None: ``human`` prints by itself."""
        if self.render_mode != "ansi":
            return None
        return self._score_line(describe_transcript(self.episode.transcript))

    def close(self) -> None:
        """End the episode and release the user; may be called twice."""
        self._drop_episode()
        close = getattr(self._new_user, "close", None)
        if close is not None:  # a factory that shares connections between episodes
            close()
        super().close()

    def _draw_task(self, options: dict[str, Any]) -> str:
        if options.get("task_id") is not None:
            return str(options["task_id"])
        ids = self.task_ids(options.get("split") or self.split, options.get("tier") or self.options.tier)
        if not ids:
            raise TaskError(f"{self.domain.name} has no tasks for {options}")
        return ids[int(self.np_random.integers(len(ids)))]

    def _drop_episode(self) -> None:
        if self._episode is not None:
            self._episode.user.close()
        self._episode = None
        self._shown = 0

    def _after_move(self) -> None:
        if self.render_mode != "human":
            return
        new = self.episode.transcript[self._shown :]
        self._shown = len(self.episode.transcript)
        print(self._score_line(describe_transcript(new)))

    def _score_line(self, text: str) -> str:
        if self.episode.stop_reason is None:
            return text
        outcome = self.episode.outcome()
        return (
            f"{text}\n== {self.episode.stop_reason}: score {outcome.score:g} "
            f"({describe_components(outcome.components)})"
        )
