"""Every failure SinkFlex raises on purpose.

::

    SinkFlexError
    ├── ConfigError            a recipe or an override is wrong (also ValueError)
    ├── MissingExtraError      an optional dependency is not installed (also ImportError)
    ├── AttentionError         a bad argument to the attention path (also ValueError)
    │   └── UnsupportedError   the chosen impl cannot honour an argument; names both
    ├── AlgorithmError         a loss or estimator got input it must not train on (also ValueError)
    ├── EnvError               an environment is declared, reset or stepped wrongly
    │   ├── TaskError          unknown task id, split or tier
    │   └── ToolError          a tool refused its arguments; the *model* sees this one
    ├── ChatError              rendering or parsing failed for a reason the model did not cause
    ├── InfrastructureError    a service, a clock or a disk failed; never becomes reward 0
    │   └── DeadlineError      something took longer than its deadline
    ├── RolloutError           the rollout dataflow was used wrongly
    ├── ModelError             a model or tokenizer cannot be built, loaded or trained
    └── CheckpointError        a checkpoint is damaged, missing or does not fit
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SinkFlexError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(SinkFlexError, ValueError):
    """A recipe or an override is wrong; the message names the key and the remedy."""


class MissingExtraError(SinkFlexError, ImportError):
    """An optional dependency is missing; the message names the extra to install."""


class AttentionError(SinkFlexError, ValueError):
    """An argument of the attention path is wrong; the message names it, its value and the remedy."""


class UnsupportedError(AttentionError):
    """The chosen attention impl cannot honour an argument; the message names both."""


class AlgorithmError(SinkFlexError, ValueError):
    """A loss or an estimator was given input that must not be trained on."""


class EnvError(SinkFlexError):
    """An environment was declared, reset or stepped wrongly."""


class TaskError(EnvError, KeyError):
    """A task id, split or tier does not exist."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ToolError(EnvError):
    """A tool refused its arguments or the action; its text is what the calling side reads."""


class ChatError(SinkFlexError):
    """Rendering or parsing failed for a reason the model did not cause."""


class InfrastructureError(SinkFlexError):
    """A service, a clock or a disk failed. The trajectory leaves its group; it never becomes reward 0."""


class DeadlineError(InfrastructureError, TimeoutError):
    """Something took longer than its deadline."""


class RolloutError(SinkFlexError):
    """The rollout dataflow was used wrongly."""


class ModelError(SinkFlexError):
    """A model or tokenizer cannot be built, loaded or trained."""


class CheckpointError(SinkFlexError):
    """A checkpoint is damaged, missing or does not fit the run."""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return the message for an unknown name: what was asked, the choices and the nearest match.

    Args:
        kind: what the name stands for, for example ``"loss"``.
        name: what was asked for.
        choices: the valid names.
    """
    options = sorted(choices)
    nearest = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {kind} {name!r}; choose one of {', '.join(options)}.{hint}"
