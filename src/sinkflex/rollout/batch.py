"""From trajectories to tensors: flat rows for the in-process trainer, padded VERL batches for everyone else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkflex.errors import MissingExtraError, RolloutError
from sinkflex.rollout.ledger import TokenLedger
from sinkflex.rollout.trajectory import Group

VERL_TOKEN_KEYS = ("old_log_probs", "ref_log_prob", "advantages", "returns")
"""Per-token keys that the trainer, not the rollout, supplies."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRows:
    """All tokens of some ledgers, one after the other, without padding.

    Two ledgers, prompt ``[7, 8]`` with action ``[3, 1]``, and prompt ``[7]`` with action ``[4]``, observation ``[9]``
    and action ``[1]``, give::

        ids         7   8   3     1     7   4     9   1
        loss_mask   F   F   T     T     F   T     F   T
        logprobs    0.  0.  -1.2  -0.1  0.  -0.7  0.  -0.2
        turn_ids    0   0   1     1     0   1     1   2
        row_ids     0   0   0     0     1   1     1   1
        cu_seqlens  0                   4                   8

    Attributes:
        ids: [N] tokens.
        loss_mask: [N] True where the policy sampled the token and is trained on it.
        logprobs: [N] the sampler's log-probabilities, 0 where nothing was sampled.
        turn_ids: [N] 0 for the prompt, k for the k-th action and the observation after it.
        row_ids: [N] index of the token's ledger.
        cu_seqlens: [boundaries = B + 1] where each ledger starts; the last entry is N.
    """

    ids: Int[Tensor, " N"]
    loss_mask: Bool[Tensor, " N"]
    logprobs: Float[Tensor, " N"]
    turn_ids: Int[Tensor, " N"]
    row_ids: Int[Tensor, " N"]
    cu_seqlens: Int[Tensor, " boundaries"]

    @classmethod
    def from_ledgers(cls, ledgers: Sequence[TokenLedger]) -> TrainRows:
        """Lay ledgers out in the order given.

        Raises:
            RolloutError: a ledger has no sampled token.
        """
        for index, ledger in enumerate(ledgers):
            if not ledger.turns:
                raise RolloutError(f"ledger {index} has no sampled token; there is nothing to train on")
        lengths = torch.tensor([0, *(len(ledger) for ledger in ledgers)])
        return cls(
            ids=torch.tensor([token for ledger in ledgers for token in ledger.ids], dtype=torch.long),
            loss_mask=torch.tensor([flag for ledger in ledgers for flag in ledger.loss_mask], dtype=torch.bool),
            logprobs=torch.tensor([value for ledger in ledgers for value in ledger.logprobs], dtype=torch.float32),
            turn_ids=torch.tensor([turn for ledger in ledgers for turn in ledger.turn_ids], dtype=torch.long),
            row_ids=torch.repeat_interleave(torch.arange(len(ledgers)), lengths[1:]),
            cu_seqlens=lengths.cumsum(0),
        )


def to_verl_batch(
    groups: Sequence[Group], *, pad_token_id: int, token_values: Mapping[str, Tensor] | None = None
) -> Any:
    """Build the batch that VERL's trainers read: prompts padded on the left, responses on the right.

    Row for row::

        prompts    . 7 8     responses          3    1    .        input_ids = prompts + responses
                   . . 7                        4    9    1
        response_mask        1    1    0        1 for sampled tokens, 0 for observations and padding
                             1    0    1

    Args:
        groups: finished groups; failures are left out.
        pad_token_id: fills prompts and responses.
        token_values: values for some of ``VERL_TOKEN_KEYS``, each [N] over ``TrainRows`` of the same trajectories in
            the same order; they land in [B, R] and are 0 elsewhere.

    Returns:
        A TensorDict [B] with ``prompts`` [B, P], ``responses`` [B, R], ``input_ids``, ``attention_mask`` and
        ``position_ids`` [B, P + R], ``response_mask``, ``rollout_log_probs``, ``token_level_scores`` and
        ``token_level_rewards`` [B, R] (the reward stands on the last response token), the ``token_values``, and the
        non-tensors ``uid`` (the group), ``episode_id`` and ``stop_reason``.

    Raises:
        RolloutError: there is no trajectory, one was sampled with ``top_p`` below 1, or ``token_values`` has an unknown
            key or another length.
        MissingExtraError: tensordict is not installed.
    """
    try:
        from tensordict import NonTensorStack, TensorDict
    except ImportError as error:
        raise MissingExtraError("VERL batches need tensordict: pip install 'sinkflex[train]'") from error
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        raise RolloutError("groups hold no finished trajectory; a batch needs at least one")
    for trajectory in trajectories:
        if trajectory.top_p < 1.0:
            raise RolloutError(
                f"episode {trajectory.episode_id!r} was sampled with top_p={trajectory.top_p}; its logprobs are not "
                "of the sampled distribution, so it is for evaluation only"
            )
    ledgers = [trajectory.ledger for trajectory in trajectories]
    rows = TrainRows.from_ledgers(ledgers)
    place = _Placement.of(rows, ledgers)
    tensors = _verl_tensors(rows, place, pad_token_id=pad_token_id)
    scores = torch.zeros(len(ledgers), place.response_columns)
    last = rows.cu_seqlens[1:] - rows.cu_seqlens[:-1] - place.prompt_lengths - 1
    scores[torch.arange(len(ledgers)), last] = torch.tensor([float(item.reward) for item in trajectories])
    tensors |= {"token_level_scores": scores, "token_level_rewards": scores.clone()}
    for key, values in (token_values or {}).items():
        if key not in VERL_TOKEN_KEYS or values.shape != rows.ids.shape:
            raise RolloutError(
                f"token_values[{key!r}] has shape {tuple(values.shape)}; expected a key of "
                f"{', '.join(VERL_TOKEN_KEYS)} and shape ({rows.ids.numel()},)"
            )
        tensors[key] = place.responses(values, fill=0)
    batch = TensorDict(tensors, batch_size=[len(ledgers)])
    batch["uid"] = NonTensorStack(*(item.group_id for item in trajectories))
    batch["episode_id"] = NonTensorStack(*(item.episode_id for item in trajectories))
    batch["stop_reason"] = NonTensorStack(*(str(item.stop_reason) for item in trajectories))
    return batch


def ledgers_from_verl_batch(batch: Any) -> list[TokenLedger]:
    """Read the exact tokens back out of a VERL batch (a TensorDict, or any mapping with its keys).

    Args:
        batch: has ``prompts``, ``responses``, ``attention_mask``, ``response_mask`` and ``rollout_log_probs``.

    Raises:
        RolloutError: a row has no sampled token first in its response, so it is no ledger.
    """
    prompts, responses = batch["prompts"], batch["responses"]
    width = prompts.shape[1]
    real = batch["attention_mask"].bool()
    ledgers = []
    for row in range(prompts.shape[0]):
        ledger = TokenLedger()
        ledger.append_prompt(prompts[row][real[row, :width]].tolist())
        kept = real[row, width:]
        ids = responses[row][kept].tolist()
        mask = batch["response_mask"][row][kept].bool().tolist()
        logprobs = batch["rollout_log_probs"][row][kept].tolist()
        start = 0
        for end in range(1, len(ids) + 1):
            if end < len(ids) and mask[end] == mask[start]:
                continue
            if mask[start]:
                ledger.append_sampled(ids[start:end], logprobs[start:end])
            else:
                ledger.append_observation(ids[start:end])
            start = end
        ledgers.append(ledger)
    return ledgers


@dataclass(frozen=True, kw_only=True, eq=False)
class _Placement:
    """Where each flat token lies in the padded tensors."""

    row_ids: Tensor
    columns: Tensor
    in_response: Tensor
    prompt_lengths: Tensor
    prompt_columns: int
    response_columns: int

    @classmethod
    def of(cls, rows: TrainRows, ledgers: Sequence[TokenLedger]) -> _Placement:
        prompt_lengths = torch.tensor([ledger.prompt_length for ledger in ledgers])
        offset = torch.arange(rows.ids.numel()) - rows.cu_seqlens[rows.row_ids]
        width = int(prompt_lengths.max())
        columns = offset + (width - prompt_lengths)[rows.row_ids]
        return cls(
            row_ids=rows.row_ids,
            columns=columns,
            in_response=columns >= width,
            prompt_lengths=prompt_lengths,
            prompt_columns=width,
            response_columns=int(columns.max()) + 1 - width,
        )

    def full(self, values: Tensor, *, fill: int) -> Tensor:
        """[N] values as [B, P + R]."""
        shape = (self.prompt_lengths.numel(), self.prompt_columns + self.response_columns)
        padded = values.new_full(shape, fill)
        padded[self.row_ids, self.columns] = values
        return padded

    def responses(self, values: Tensor, *, fill: int) -> Tensor:
        """[N] values as [B, R]; those of the prompt are dropped."""
        return self.full(values, fill=fill)[:, self.prompt_columns :]


def _verl_tensors(rows: TrainRows, place: _Placement, *, pad_token_id: int) -> dict[str, Tensor]:
    input_ids = place.full(rows.ids, fill=pad_token_id)
    attention_mask = place.full(torch.ones_like(rows.ids), fill=0)
    return {
        "prompts": input_ids[:, : place.prompt_columns],
        "responses": input_ids[:, place.prompt_columns :],
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": place.responses(rows.loss_mask.long(), fill=0),
        "rollout_log_probs": place.responses(rows.logprobs, fill=0),
    }
