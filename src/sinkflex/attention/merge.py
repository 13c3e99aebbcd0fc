"""Joining attention over two disjoint sets of keys."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def merge_parts(
    out_a: Float[Tensor, "*q D"],
    lse_a: Float[Tensor, "*q"],
    out_b: Float[Tensor, "*q D"],
    lse_b: Float[Tensor, "*q"],
) -> tuple[Float[Tensor, "*q D"], Float[Tensor, "*q"]]:
    """``lse = logaddexp(lse_a, lse_b)``, and the outputs weighed by ``exp(lse_part - lse)``.

    Args:
        out_a: attention over the first keys.
        lse_a: its log-sum-exp, natural, without a sink; -inf where it saw nothing.
        out_b: attention over the second keys.
        lse_b: its log-sum-exp.

    Returns:
        (out, lse) over both sets; 0 and -inf where neither saw anything.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - safe), torch.exp(lse_b - safe)
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse
