"""A model on an endpoint judges natural-language assertions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sinkflex.envs.render import describe_messages
from sinkflex.envs.tau2.grading import Judge
from sinkflex.envs.users.endpoint import ChatEndpoint, EndpointConfig, Usage
from sinkflex.errors import InfrastructureError
from sinkflex.types import Message, Role

_INSTRUCTION = (
    "You grade a support dialogue. For each numbered statement decide whether the dialogue shows it to be true. Answer "
    "with one JSON list of true and false, in the order of the statements, and nothing else."
)
_ATTEMPTS = 3


def endpoint_judge(**endpoint: Any) -> Judge:
    """Return a judge on an OpenAI-compatible endpoint.

    Args:
        **endpoint: fields of ``EndpointConfig``; ``model`` is required, ``temperature`` is 0 unless given.

    Raises:
        EnvError: a limit is not positive.
        TypeError: an option that ``EndpointConfig`` does not have.
    """
    shared = ChatEndpoint(config=EndpointConfig(**{"temperature": 0.0, **endpoint}))

    def judge(dialogue: Sequence[Message], assertions: Sequence[str]) -> list[bool]:
        statements = "\n".join(f"{number}. {text}" for number, text in enumerate(assertions, start=1))
        question = f"Dialogue:\n{describe_messages(dialogue)}\n\nStatements:\n{statements}"
        request = [Message(role=Role.SYSTEM, content=_INSTRUCTION), Message(role=Role.USER, content=question)]
        answer = ""
        for attempt in range(_ATTEMPTS):
            answer = shared.complete(request, (), seed=attempt, usage=Usage()).content
            verdicts = _verdicts(answer)
            if verdicts is not None and len(verdicts) == len(assertions):
                return verdicts
        raise InfrastructureError(
            f"the judge owes {len(assertions)} verdicts after {_ATTEMPTS} attempts; its last answer: {answer[:200]!r}"
        )

    return judge


def _verdicts(answer: str) -> list[bool] | None:
    """Return the list of booleans in an answer, None when there is none."""
    start, end = answer.find("["), answer.rfind("]")
    try:
        found = json.loads(answer[start : end + 1]) if start >= 0 else None
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, list) and all(isinstance(item, bool) for item in found) else None
