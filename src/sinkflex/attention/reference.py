"""The specification: attention with a learned sink as one more column of the softmax.

Everything else in this package is checked against this file. It works in the dtype it is given (fp64 in tests), holds
the whole [Tq, Tk] matrix, and is differentiated by autograd.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def reference_attention(
    query: Float[Tensor, "B Hq Tq D"],
    key: Float[Tensor, "B Hkv Tk D"],
    value: Float[Tensor, "B Hkv Tk Dv"],
    sink_logits: Float[Tensor, " Hq"] | Float[Tensor, "B Hq Tq"] | None,
    visible: Bool[Tensor, "B H1 Tq Tk"],
    *,
    scale: float,
    bias: Float[Tensor, "B Hq Tq Tk"] | None = None,
) -> tuple[Float[Tensor, "B Hq Tq Dv"], Float[Tensor, "B Hq Tq"]]:
    """Softmax over the visible keys and one sink column whose value is zero (gpt-oss; StreamingLLM's "zero sink").

    Args:
        query: [B, Hq, Tq, D].
        key: [B, Hkv, Tk, D]; head ``h`` of the queries reads key head ``h // (Hq / Hkv)``.
        value: [B, Hkv, Tk, Dv].
        sink_logits: [Hq] logit of each head's sink, or [B, Hq, Tq] one for each query, in the units of the scaled
            scores; None or -inf means no sink.
        visible: [B, 1 or Hq, Tq, Tk] True where the query may look at the key.
        scale: factor on the raw scores.
        bias: [B, Hq, Tq, Tk] added to the scaled scores.

    Returns:
        (out, lse): out [B, Hq, Tq, Dv] in the query's dtype; lse [B, Hq, Tq], natural log, the sink included, in fp32
        or, for fp64 input, fp64. A query that sees nothing gets 0 and, without a sink, -inf. Both carry gradient.
    """
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = (query @ keys.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink_logits is not None:
        per_query = sink_logits[None, :, None] if sink_logits.dim() == 1 else sink_logits
        column = per_query.to(scores.dtype).expand(scores.shape[:3])
        scores = torch.cat([scores, column[..., None]], dim=-1)
    # logsumexp of a row of -inf has a NaN gradient, so such rows are taken out before and put back after.
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), dim=-1, keepdim=True)
    weights = torch.exp(scores - lse).masked_fill(empty, 0.0)[..., : keys.shape[2]]
    out = weights.to(query.dtype) @ values
    return out, lse.masked_fill(empty, -torch.inf).squeeze(-1)
