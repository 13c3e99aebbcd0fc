"""Logprobs of trained tokens by the policy, in packed microbatches that never hold ``[T, V]`` logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sinkflex.algo.logprobs import OutputHead, token_logprobs
from sinkflex.attention import SequenceLayout
from sinkflex.models import Policy


class Row(Protocol):
    """One token sequence: a demonstration or a trajectory's ledger."""

    @property
    def ids(self) -> Sequence[int]:
        """[T] token ids."""
        ...

    @property
    def loss_mask(self) -> Sequence[bool]:
        """[T] True on trained tokens; the first is False."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """Rows laid end to end in one forward pass.

    Attributes:
        rows: indices of the rows it holds, into the list it was planned from.
        input_ids: [1, P] packed tokens.
        position_ids: [1, P] logical positions.
        layout: who sees whom.
        predictors: [n] packed index whose hidden state predicts each trained token.
        targets: [n] the trained tokens.
        flat: [n] where each trained token stands among all trained tokens of the planned list, rows end to end.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    layout: SequenceLayout
    predictors: Tensor
    targets: Tensor
    flat: Tensor


def plan_microbatches(rows: Sequence[Row], *, token_budget: int, device: torch.device) -> list[Microbatch]:
    """Pack rows, longest first so that neighbours have similar lengths, up to ``token_budget`` tokens each.

    Args:
        rows: what to score; a row longer than the budget gets a microbatch of its own.
        token_budget: packed tokens a forward pass.
        device: where the tensors go.
    """
    starts = _flat_starts(rows)
    order = sorted(range(len(rows)), key=lambda index: (-len(rows[index].ids), index))
    batches: list[Microbatch] = []
    pending: list[int] = []
    used = 0
    for index in order:
        length = len(rows[index].ids)
        if pending and used + length > token_budget:
            batches.append(_pack(rows, pending, starts, device))
            pending, used = [], 0
        pending.append(index)
        used += length
    if pending:
        batches.append(_pack(rows, pending, starts, device))
    return batches


def score_microbatch(
    policy: Policy, batch: Microbatch, *, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Logprobs [n] (and entropies [n]) of a microbatch's trained tokens, with gradient where grad mode is on."""
    hidden = policy.hidden_states(input_ids=batch.input_ids, position_ids=batch.position_ids, layout=batch.layout)
    head = OutputHead.from_module(policy.output_embedding, softcap=policy.final_softcap)
    scored = token_logprobs(
        hidden[0].index_select(0, batch.predictors),
        head,
        batch.targets,
        temperature=temperature,
        with_entropy=with_entropy,
    )
    return scored if isinstance(scored, tuple) else (scored, None)


def score_rows(
    policy: Policy, rows: Sequence[Row], *, temperature: float, token_budget: int = 1 << 30
) -> tuple[Tensor, list[Microbatch]]:
    """Logprobs [N] of all trained tokens, rows end to end, and the microbatches they were scored in."""
    batches = plan_microbatches(rows, token_budget=token_budget, device=policy.device)
    parts = [score_microbatch(policy, batch, temperature=temperature)[0] for batch in batches]
    flat = torch.cat([batch.flat for batch in batches])
    return torch.cat(parts).index_select(0, torch.argsort(flat)), batches


def _flat_starts(rows: Sequence[Row]) -> list[int]:
    starts, total = [], 0
    for row in rows:
        starts.append(total)
        total += sum(row.loss_mask)
    return starts


def _pack(rows: Sequence[Row], members: list[int], starts: list[int], device: torch.device) -> Microbatch:
    ids: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    flat: list[int] = []
    for index in members:
        row, offset = rows[index], len(ids)
        trained = [place for place, on in enumerate(row.loss_mask) if on]
        predictors += [offset + place - 1 for place in trained]
        flat += range(starts[index], starts[index] + len(trained))
        ids += row.ids
        positions += range(len(row.ids))
    input_ids = torch.tensor([ids], device=device)
    predictor_index = torch.tensor(predictors, dtype=torch.long, device=device)
    return Microbatch(
        rows=tuple(members),
        input_ids=input_ids,
        position_ids=torch.tensor([positions], device=device),
        layout=SequenceLayout.from_documents([[len(rows[index].ids) for index in members]]),
        predictors=predictor_index,
        targets=input_ids[0].index_select(0, predictor_index + 1),
        flat=torch.tensor(flat, dtype=torch.long, device=device),
    )
