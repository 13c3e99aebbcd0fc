"""Logprobs of trained tokens by the policy, in packed rows that never hold ``[T, V]`` logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sinkflex.algo.logprobs import OutputHead, token_logprobs
from sinkflex.models import Policy
from sinkflex.rollout.packing import PAYS_FROM, PackedRow, PackingPlan, TokenRow, pack, plan_packing

PAYS_FROM_BY_MODE: dict[str, float] = {"auto": PAYS_FROM, "on": 0.0, "off": 2.0}
"""The recipe's ``train.prefix_tree``: the share of tokens that holding prefixes once must save to be done."""


def pack_rows(
    rows: Sequence[TokenRow], *, token_budget: int, device: torch.device, prefix_tree: str = "off"
) -> tuple[list[PackedRow], PackingPlan]:
    """Pack rows into forward passes of at most ``token_budget`` tokens.

    Args:
        rows: what to score; a longer row gets a pass of its own.
        token_budget: packed tokens a forward pass.
        device: where the tensors go.
        prefix_tree: ``"auto"``, ``"on"`` or ``"off"``.
    """
    plan = plan_packing(rows, token_budget=token_budget, pays_from=PAYS_FROM_BY_MODE[prefix_tree])
    return pack(rows, plan, device=device), plan


def score_packed(
    policy: Policy, packed: PackedRow, *, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Logprobs [n] (and entropies [n]) of a packed row's trained tokens, with gradient where grad mode is on."""
    hidden = policy.hidden_states(input_ids=packed.input_ids, position_ids=packed.position_ids, layout=packed.layout)
    head = OutputHead.from_module(policy.output_embedding, softcap=policy.final_softcap)
    scored = token_logprobs(
        hidden[0].index_select(0, packed.predictors),
        head,
        packed.targets,
        temperature=temperature,
        with_entropy=with_entropy,
    )
    return scored if isinstance(scored, tuple) else (scored, None)


def score_rows(
    policy: Policy,
    rows: Sequence[TokenRow],
    *,
    temperature: float,
    token_budget: int = 1 << 30,
    prefix_tree: str = "off",
) -> Tensor:
    """Logprobs [N] of all trained tokens, rows end to end."""
    packed, _ = pack_rows(rows, token_budget=token_budget, device=policy.device, prefix_tree=prefix_tree)
    parts = [score_packed(policy, row, temperature=temperature)[0] for row in packed]
    flat = torch.cat([row.flat for row in packed])
    return torch.cat(parts).index_select(0, torch.argsort(flat))
