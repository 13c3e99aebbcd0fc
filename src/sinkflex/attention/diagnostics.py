"""What a trainer can log about sinks at no cost worth naming: how much weight they take and how large scores grow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkflex.attention.layout import SequenceLayout
from sinkflex.errors import AttentionError


@dataclass(frozen=True, kw_only=True, eq=False)
class SinkStatistics:
    """Per-head statistics over the real tokens of a batch, without gradient.

    Attributes:
        sink_mass: [Hq] mean share of the softmax that the sink takes, 0 to 1. Near 1 the head is off; near 0 the sink
            does nothing.
        lse_mean: [Hq] mean log-sum-exp, natural log, the sink included.
        lse_max: [Hq] largest log-sum-exp. Growth without bound announces unstable attention.
    """

    sink_mass: Float[Tensor, " Hq"]
    lse_mean: Float[Tensor, " Hq"]
    lse_max: Float[Tensor, " Hq"]

    def metrics(self, prefix: str) -> dict[str, float]:
        """Scalars for a log: the mean and extreme heads.

        Args:
            prefix: put before each name, for example ``"attention/layer_3/"``.
        """
        return {
            f"{prefix}sink_mass/mean": self.sink_mass.mean().item(),
            f"{prefix}sink_mass/max": self.sink_mass.max().item(),
            f"{prefix}lse/mean": self.lse_mean.mean().item(),
            f"{prefix}lse/max": self.lse_max.max().item(),
        }


@torch.no_grad()
def sink_statistics(
    lse: Float[Tensor, "B Hq Tq"],
    sink_logits: Float[Tensor, " Hq"],
    *,
    layout: SequenceLayout | None = None,
) -> SinkStatistics:
    """Statistics from what ``sink_attention(..., return_lse=True)`` returned.

    The sink's share of a query's softmax is ``exp(sink_logit - lse)``, so nothing is computed anew.

    Args:
        lse: [B, Hq, Tq] natural log, the sink included.
        sink_logits: [Hq] the sinks that went in.
        layout: leaves its padding out; None means that all tokens are real.

    Raises:
        AttentionError: ``layout`` has no real query, or is for other shapes.
    """
    batch, _, num_queries = lse.shape
    if layout is None:
        real = torch.ones((batch, num_queries), dtype=torch.bool, device=lse.device)
    else:
        if (layout.batch, layout.num_queries) != (batch, num_queries):
            raise AttentionError(
                f"layout describes {(layout.batch, layout.num_queries)} queries, but lse has {(batch, num_queries)}"
            )
        real = layout.q_enter.to(lse.device) >= 0
    if not real.any():
        raise AttentionError("layout holds padding only; there is nothing to average")
    values = lse.transpose(1, 2)[real]
    return SinkStatistics(
        sink_mass=torch.exp(sink_logits.to(values.dtype) - values).mean(0),
        lse_mean=values.mean(0),
        lse_max=values.amax(0),
    )
