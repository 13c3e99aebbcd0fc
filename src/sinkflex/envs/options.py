"""What an environment is made with, apart from its domain."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sinkflex.chat.parsing import ActionFormat
from sinkflex.envs.dual_control import Budget
from sinkflex.envs.protocol import PROMPT_STYLES
from sinkflex.errors import EnvError, unknown_name

RENDER_MODES = ("ansi", "human")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvOptions:
    """Keyword options of ``gymnasium.make("sinkflex/...")``; all are plain data.

    Attributes:
        split: where ``reset`` draws tasks from.
        tier: the difficulty tier to draw from, None for all.
        user: a name in ``registry.USERS``.
        user_options: plain keyword options of that user.
        action_format: how raw text is read, a value of ``ActionFormat``.
        prompt: system prompt, ``"brief"`` or ``"full"``.
        max_steps: assistant generations an episode may take; None takes the tier's default.
        max_invalid_actions: malformed actions and misfit calls it may hold.
        render_mode: ``"ansi"`` returns the dialogue so far, ``"human"`` prints it as it grows.

    Raises:
        EnvError: an option is not one of its choices, or below its minimum.
    """

    split: str = "train"
    tier: str | None = None
    user: str = "scripted"
    user_options: dict[str, Any] | None = None
    action_format: str = "auto"
    prompt: str = "brief"
    max_steps: int | None = None
    max_invalid_actions: int = 4
    render_mode: str | None = None

    def __post_init__(self) -> None:
        if self.prompt not in PROMPT_STYLES:
            raise EnvError(unknown_name("prompt", self.prompt, PROMPT_STYLES))
        if self.action_format not in tuple(ActionFormat):
            raise EnvError(unknown_name("action_format", self.action_format, ActionFormat))
        if self.render_mode is not None and self.render_mode not in RENDER_MODES:
            raise EnvError(unknown_name("render_mode", self.render_mode, RENDER_MODES))
        self.budget(default_steps=1)

    def budget(self, *, default_steps: int) -> Budget:
        """Return an episode's budget.

        Args:
            default_steps: the tier's, for ``max_steps=None``.
        """
        steps = default_steps if self.max_steps is None else self.max_steps
        return Budget(max_steps=steps, max_invalid_actions=self.max_invalid_actions)

    @classmethod
    def read(cls, given: dict[str, Any]) -> EnvOptions:
        """Build from keyword arguments.

        Raises:
            EnvError: besides, an option of another name.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise EnvError(unknown_name("environment option", name, names))
        return cls(**given)
