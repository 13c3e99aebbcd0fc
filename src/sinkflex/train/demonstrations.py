"""Oracle dialogues for the warm start, with a stated share of plausible mistakes.

A perfect demonstrator would make a policy with nothing left to learn from reward. So at each decision, with
probability ``slip_rate``, the demonstrator takes one of the environment's own ``slip_messages`` (it skips the identity
check, takes the other line's id, ends too early) and the oracle carries on from there. Imitation inherits the
mistakes in proportion; telling the right choices from the wrong ones is left to reinforcement learning.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sinkflex.chat import Renderer
from sinkflex.errors import EnvError
from sinkflex.train.timed_env import TimedEnv
from sinkflex.types import Message, ToolSchema

_MAX_ACTIONS = 400
_HEADER_WORDS = ("system", "developer", "user", "assistant", "analysis", "commentary", "final")


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """One demonstrated episode, before it is rendered to tokens.

    Attributes:
        task_id: the task solved.
        system: the system prompt the policy will see.
        tools: schemas of the agent's tools.
        opening: messages before the first action.
        exchanges: per env step, the agent's message and what came back.
        slips: how many actions were mistakes.
        score: the environment's verdict.
    """

    task_id: str
    system: str
    tools: tuple[ToolSchema, ...]
    opening: tuple[Message, ...]
    exchanges: tuple[tuple[Message, tuple[Message, ...]], ...]
    slips: int
    score: float


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One sequence to learn from.

    Attributes:
        ids: [T] token ids.
        loss_mask: [T] True on tokens to imitate (the agent's own); the first is always False.
    """

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def plain_action(message: Message) -> str:
    """Write an assistant message as text that every environment's ``auto`` action format understands."""
    if not message.tool_calls:
        return message.content
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    return json.dumps(calls[0] if len(calls) == 1 else calls)


def play_oracle(
    env: Any,
    *,
    task_id: str,
    split: str,
    group_seed: int,
    slip_rate: float,
    rng: random.Random,
    step_timeout_s: float = 60.0,
) -> Dialogue:
    """Play one task with the oracle, slipping now and then.

    Args:
        env: a SinkFlex environment (``oracle_message``, ``slip_messages`` on ``env.unwrapped``), action format auto.
        task_id: the task.
        split: the split it belongs to.
        group_seed: start state and user behaviour.
        slip_rate: chance in [0, 1) that an action is one of ``slip_messages``.
        rng: draws the slips.
        step_timeout_s: seconds a reset or a step may take.

    Raises:
        EnvError: the episode did not end within 400 actions, so the oracle is stuck; or the environment raised.
        DeadlineError: a reset or a step took too long.
    """
    named = TimedEnv(env, task_id=task_id, step_timeout_s=step_timeout_s)
    _, info = named.reset(options={"task_id": task_id, "split": split, "group_seed": group_seed})
    system, tools, opening = info["system"], tuple(info["tools"]), tuple(info["messages"])
    exchanges: list[tuple[Message, tuple[Message, ...]]] = []
    slips = 0
    for _ in range(_MAX_ACTIONS):
        message = env.unwrapped.oracle_message()
        if rng.random() < slip_rate and (alternatives := env.unwrapped.slip_messages()):
            message = rng.choice(alternatives)
            slips += 1
        _, _, terminated, truncated, info = named.step(plain_action(message))
        exchanges.append((message, tuple(info["messages"])))
        if terminated or truncated:
            return Dialogue(
                task_id=task_id,
                system=system,
                tools=tools,
                opening=opening,
                exchanges=tuple(exchanges),
                slips=slips,
                score=float(info["score"]),
            )
    raise EnvError(
        f"the oracle of task {task_id!r} did not end within {_MAX_ACTIONS} actions; check its oracle_message"
    )


def render_dialogue(dialogue: Dialogue, renderer: Renderer, *, with_tools: bool) -> TokenRow:
    """Render a dialogue exactly as a rollout would have recorded it.

    Args:
        dialogue: the episode.
        renderer: the policy's chat format.
        with_tools: put the tools' schemas into the prompt, as the rollout does.

    Returns:
        Its tokens, with ``loss_mask`` True on the agent's own.
    """
    ids = renderer.prompt(system=dialogue.system, tools=dialogue.tools if with_tools else (), messages=dialogue.opening)
    mask = [False] * len(ids)
    for index, (action, observed) in enumerate(dialogue.exchanges):
        sampled = renderer.action_ids(action)
        ids += sampled
        mask += [True] * len(sampled)
        if index + 1 < len(dialogue.exchanges):
            observation = renderer.observation(observed, last_id=sampled[-1])
            ids += observation
            mask += [False] * len(observation)
    return TokenRow(ids=tuple(ids), loss_mask=tuple(mask))


def dialogue_texts(dialogues: Sequence[Dialogue]) -> Iterator[str]:
    """Yield every piece of text in the dialogues, as the tokenizer's training corpus."""
    for dialogue in dialogues:
        yield from _HEADER_WORDS
        yield dialogue.system
        for tool in dialogue.tools:
            yield json.dumps(tool.to_openai())
        for message in dialogue.opening:
            yield message.content
        for action, observed in dialogue.exchanges:
            yield action.content
            for call in action.tool_calls:
                yield f"commentary to=functions.{call.name}"
                yield json.dumps(dict(call.arguments), separators=(",", ":"))
            for message in observed:
                yield (f"functions.{message.name} to=assistant" if message.name else "final analysis system developer")
                yield message.content
