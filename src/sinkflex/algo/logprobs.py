"""Token logprobs and entropy straight from hidden states, without the [T, V] logits.

With a vocabulary of 201,088 the logits of 4,096 tokens take 3.3 GB in fp32, and softmax and its gradient as much
again. Here both axes are cut into chunks: forward keeps a running logsumexp per token, backward computes each chunk of
logits again and turns it into gradients while it is still in cache. What stays alive is O(T + V·d).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sinkflex.errors import AlgorithmError

CHUNK_ELEMENTS = 2**22
"""Logits alive at once when no chunk size is given: 16 MiB in fp32."""

MAX_CHUNK_TOKENS = 2048
"""Tokens of a chunk when none is given; more rows make the matmuls no faster."""


@dataclass(frozen=True, kw_only=True)
class LowRankDelta:
    """A LoRA update of the head: the effective weight is ``weight + scale · up @ down``, never built.

    Attributes:
        down: [r, d], LoRA's A.
        up: [V, r], LoRA's B.
        scale: LoRA's alpha / r (or whatever the adapter multiplies by).
        bias: [V] of LoRA's B, which ``scale`` multiplies too, or None.
    """

    down: Float[Tensor, "r d"]
    up: Float[Tensor, "V r"]
    scale: float = 1.0
    bias: Float[Tensor, " V"] | None = None


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """The last linear map of a language model, with what is done to its logits before any temperature.

    Attributes:
        weight: [V, d]; may be the input embedding (a tied head), its gradient then adds up as usual.
        bias: [V] finite, or None.
        lora: a low-rank update of ``weight``, or None.
        softcap: logits become ``softcap · tanh(logits / softcap)``; None leaves them.
    """

    weight: Float[Tensor, "V d"]
    bias: Float[Tensor, " V"] | None = None
    lora: LowRankDelta | None = None
    softcap: float | None = None

    @classmethod
    def from_module(cls, module: nn.Module, *, softcap: float | None = None) -> OutputHead:
        """Read the head from an ``nn.Linear`` or from a PEFT LoRA layer around one.

        Args:
            module: the model's output embedding, for example ``model.get_output_embeddings()``.
            softcap: see the class; models keep it in their config, not in the layer.

        Raises:
            AlgorithmError: the module is neither, or its adapter does more than add one low-rank product.
        """
        base = getattr(module, "base_layer", module)
        if not isinstance(base, nn.Linear):
            raise AlgorithmError(
                f"cannot read an output head from {type(module).__name__}; expected nn.Linear or a PEFT LoRA layer "
                "around one. Build OutputHead(weight=..., bias=..., lora=...) yourself."
            )
        return cls(weight=base.weight, bias=base.bias, lora=_peft_delta(module), softcap=softcap)


def token_logprobs(
    hidden: Float[Tensor, "N d"],
    head: Float[Tensor, "V d"] | OutputHead,
    targets: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> Float[Tensor, " N"] | tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target under ``softmax(head(hidden) / temperature)``, and the entropy on request.

    Sums run in fp32 (fp64 inputs stay fp64) whatever the inputs' precision. Gradients reach ``hidden`` and each
    tensor of the head that wants one; backward recomputes the logits chunk by chunk and is differentiable once.

    Args:
        hidden: [N, d] final hidden states at the positions that *predict* the targets.
        head: the weight [V, d], or an ``OutputHead`` where there is a bias, a LoRA update or a soft-cap.
        targets: [N] token ids in [0, V).
        temperature: divides the logits after the soft-cap; > 0.
        with_entropy: also return the entropy of each distribution, in nats, with its gradient.
        chunk_tokens: rows of logits alive at once; None chooses.
        chunk_vocab: columns of logits alive at once; None chooses.

    Returns:
        [N] logprobs in fp32 (fp64 for fp64), or (logprobs, entropy).

    Raises:
        AlgorithmError: shapes do not fit, a target is outside [0, V), the temperature is not > 0, the soft-cap is not
            > 0, or a chunk size is not > 0.
    """
    if isinstance(head, Tensor):
        head = OutputHead(weight=head)
    _check(hidden, head, targets, temperature)
    vocab = head.weight.shape[0]
    tokens = _chunk_size("chunk_tokens", chunk_tokens, min(max(len(targets), 1), MAX_CHUNK_TOKENS))
    columns = _chunk_size("chunk_vocab", chunk_vocab, min(vocab, max(CHUNK_ELEMENTS // tokens, 1)))
    low = up = None
    bias = head.bias
    if head.lora is not None:
        # r is small, so this [N, r] goes through autograd as it is; only the product with `up` is [N, V].
        low = nn.functional.linear(hidden, head.lora.down.to(hidden.dtype)) * head.lora.scale
        up = head.lora.up
        if head.lora.bias is not None:
            shift = head.lora.bias * head.lora.scale
            bias = shift if bias is None else bias + shift
    plan = _Plan(tokens=tokens, columns=columns, temperature=temperature, softcap=head.softcap, entropy=with_entropy)
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        plan, hidden, head.weight, bias, low, up, targets
    )
    return (logprobs, entropy) if with_entropy else logprobs


@dataclass(frozen=True, kw_only=True)
class _Plan:
    tokens: int
    columns: int
    temperature: float
    softcap: float | None
    entropy: bool


class _Head:
    """The head's tensors cut by vocabulary; computes logits of one (token, vocabulary) chunk in fp32 or fp64."""

    def __init__(self, plan: _Plan, weight: Tensor, bias: Tensor | None, up: Tensor | None, dtype: torch.dtype) -> None:
        self.plan, self.dtype = plan, dtype
        self.full_weight, self.full_bias, self.full_up = weight, bias, up

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) columns, with this object's ``weight``, ``bias`` and ``up`` set to that slice."""
        vocab = self.full_weight.shape[0]
        for start in range(0, vocab, self.plan.columns):
            stop = min(start + self.plan.columns, vocab)
            # Cast once per slice and not per token chunk: the outer loop is over the vocabulary.
            self.weight = self.full_weight[start:stop].to(self.dtype)
            self.bias = None if self.full_bias is None else self.full_bias[start:stop].to(self.dtype)
            self.up = None if self.full_up is None else self.full_up[start:stop].to(self.dtype)
            yield start, stop

    def logits(self, hidden: Tensor, low: Tensor | None) -> Tensor:
        """Return [tokens, columns] capped and tempered logits of the current slice."""
        logits = nn.functional.linear(hidden, self.weight, self.bias)
        if low is not None and self.up is not None:
            logits.addmm_(low, self.up.T)
        if self.plan.softcap is not None:
            logits.div_(self.plan.softcap).tanh_().mul_(self.plan.softcap)
        if self.plan.temperature != 1.0:
            logits.div_(self.plan.temperature)
        return logits


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        up: Tensor | None,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        with torch.autocast(hidden.device.type, enabled=False):
            lse, picked, mean = _forward(plan, hidden, _Head(plan, weight, bias, up, dtype), low, targets)
        entropy = None if mean is None else lse - mean
        ctx.plan = plan
        # An entropy that is only looked at then has no gradient, and backward takes the shorter way.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, low, up, targets, lse, entropy)
        return picked - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * 7
        hidden, weight, bias, low, up, targets, lse, entropy = ctx.saved_tensors
        head = _Head(ctx.plan, weight, bias, up, lse.dtype)
        needs = ctx.needs_input_grad
        out = _Gradients(
            hidden=_zeros(hidden, needs[1], lse.dtype),
            weight=_zeros(weight, needs[2], weight.dtype),
            bias=None if bias is None else _zeros(bias, needs[3], bias.dtype),
            low=None if low is None else _zeros(low, needs[4], lse.dtype),
            up=None if up is None else _zeros(up, needs[5], up.dtype),
        )
        with torch.autocast(hidden.device.type, enabled=False):
            _backward(head, hidden, low, targets, (lse, entropy), grads, out)
        return (
            None,
            None if out.hidden is None else out.hidden.to(hidden.dtype),
            out.weight,
            out.bias,
            None if out.low is None else out.low.to(low.dtype),
            out.up,
            None,
        )


@dataclass(kw_only=True)
class _Gradients:
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None


def _forward(
    plan: _Plan, hidden: Tensor, head: _Head, low: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return logsumexp, the targets' logits and (with entropy) the mean logit under softmax, each [N]."""
    lse = hidden.new_full((len(targets),), -torch.inf, dtype=head.dtype)
    picked = torch.zeros_like(lse)
    mean = torch.zeros_like(lse) if plan.entropy else None
    for start, stop in head.chunks():
        for rows in _rows(len(targets), plan.tokens):
            logits = head.logits(hidden[rows].to(head.dtype), _cast(low, rows, head.dtype))
            inside, column = _locate(targets[rows], start, stop)
            picked[rows] += torch.where(inside, logits.gather(1, column).squeeze(1), 0.0)
            new = torch.logaddexp(lse[rows], logits.logsumexp(1))
            if mean is not None:
                # Σ p·l so far, moved from the old normaliser to the new one, plus this chunk's share.
                mean[rows] *= (lse[rows] - new).exp_()
                mean[rows] += (logits - new[:, None]).exp_().mul_(logits).sum(1)
            lse[rows] = new
    return lse, picked, mean


def _backward(
    head: _Head,
    hidden: Tensor,
    low: Tensor | None,
    targets: Tensor,
    stats: tuple[Tensor, Tensor | None],
    grads: tuple[Tensor | None, ...],
    out: _Gradients,
) -> None:
    """Add every chunk's share to ``out``: with p the softmax, dlogits = g·(onehot − p) − g_H·p·(log p + H)."""
    plan, (lse, entropy) = head.plan, stats
    for start, stop in head.chunks():
        part = _Gradients(
            hidden=out.hidden,
            weight=None if out.weight is None else torch.zeros_like(head.weight),
            bias=None if out.bias is None or head.bias is None else torch.zeros_like(head.bias),
            low=out.low,
            up=None if out.up is None or head.up is None else torch.zeros_like(head.up),
        )
        for rows in _rows(len(targets), plan.tokens):
            rows_hidden, rows_low = hidden[rows].to(head.dtype), _cast(low, rows, head.dtype)
            logits = head.logits(rows_hidden, rows_low)
            slope = None
            if plan.softcap is not None:
                slope = 1.0 - (logits * (plan.temperature / plan.softcap)) ** 2
            g_logprob, g_entropy = (None if g is None else g[rows] for g in grads)
            dlogits = _dlogits(logits, lse[rows], entropy, rows, g_logprob, g_entropy)
            if g_logprob is not None:
                inside, column = _locate(targets[rows], start, stop)
                dlogits.scatter_add_(1, column, torch.where(inside, g_logprob, 0.0)[:, None])
            if plan.temperature != 1.0:
                dlogits.div_(plan.temperature)
            if slope is not None:
                dlogits.mul_(slope)
            _accumulate(head, part, rows, dlogits, rows_hidden, rows_low)
        for name in ("weight", "bias", "up"):
            if (total := getattr(out, name)) is not None:
                total[start:stop] = getattr(part, name)


def _dlogits(
    logits: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    rows: slice,
    g_logprob: Tensor | None,
    g_entropy: Tensor | None,
) -> Tensor:
    """Return ``−p·(g + g_H·(log p + H))``; overwrites ``logits`` where it can."""
    log_p = logits.sub_(lse[:, None])
    if entropy is None or g_entropy is None:
        p = log_p.exp_()
        return p.mul_(-g_logprob[:, None]) if g_logprob is not None else p.zero_()
    p = log_p.exp()
    factor = log_p.add_(entropy[rows, None]).mul_(g_entropy[:, None])
    if g_logprob is not None:
        factor.add_(g_logprob[:, None])
    return p.mul_(factor).neg_()


def _accumulate(
    head: _Head, part: _Gradients, rows: slice, dlogits: Tensor, hidden: Tensor, low: Tensor | None
) -> None:
    if part.hidden is not None:
        part.hidden[rows].addmm_(dlogits, head.weight)
    if part.weight is not None:
        part.weight.addmm_(dlogits.T, hidden)
    if part.bias is not None:
        part.bias += dlogits.sum(0)
    if low is not None and head.up is not None:
        if part.low is not None:
            part.low[rows].addmm_(dlogits, head.up)
        if part.up is not None:
            part.up.addmm_(dlogits.T, low)


def _rows(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _cast(tensor: Tensor | None, rows: slice, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor[rows].to(dtype)


def _locate(targets: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return which targets lie in [start, stop) and a [rows, 1] column index that is valid for all."""
    inside = (targets >= start) & (targets < stop)
    return inside, (targets - start).clamp(0, stop - start - 1).long()[:, None]


def _zeros(like: Tensor, wanted: bool, dtype: torch.dtype) -> Tensor | None:
    return torch.zeros_like(like, dtype=dtype) if wanted else None


def _chunk_size(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if value <= 0:
        raise AlgorithmError(f"{name} is {value}; expected a number > 0, or None to let it be chosen")
    return value


def _check(hidden: Tensor, head: OutputHead, targets: Tensor, temperature: float) -> None:
    vocab, width = head.weight.shape
    if hidden.shape != (len(targets), width):
        raise AlgorithmError(
            f"hidden has shape {tuple(hidden.shape)}; expected (N, d) = ({len(targets)}, {width}) to fit "
            f"{len(targets)} targets and a head weight {tuple(head.weight.shape)}. "
            "Flatten [B, T, d] and select rows first."
        )
    if temperature <= 0:
        raise AlgorithmError(f"temperature is {temperature}; expected > 0 (greedy decoding has no logprobs)")
    if head.softcap is not None and head.softcap <= 0:
        raise AlgorithmError(f"softcap is {head.softcap}; expected > 0, or None for a head without one")
    if head.lora is not None and head.lora.up.shape[0] != vocab:
        raise AlgorithmError(
            f"lora.up has {head.lora.up.shape[0]} rows; expected one per token of the vocabulary, {vocab}"
        )
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < vocab:
        raise AlgorithmError(
            f"targets span [{int(targets.min())}, {int(targets.max())}]; expected ids in [0, {vocab}). "
            "Drop ignored positions (such as -100) before the call."
        )


def _peft_delta(module: nn.Module) -> LowRankDelta | None:
    """Return the active LoRA update of a PEFT layer; None for a plain, merged or disabled one."""
    layer: Any = module  # a PEFT layer is known by its attributes: importing peft here is not worth it
    if not hasattr(layer, "base_layer") or layer.merged or layer.disable_adapters:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if not names:
        return None
    if len(names) > 1:
        raise AlgorithmError(f"the head has {len(names)} active adapters {names}; merge all but one")
    (name,) = names
    if layer.training and getattr(layer.lora_dropout[name], "p", 0.0) > 0:
        raise AlgorithmError(f"adapter {name!r} on the head has dropout; logprobs of sampled tokens need 0")
    if getattr(layer, "use_dora", {}).get(name, False):
        raise AlgorithmError(f"adapter {name!r} on the head is DoRA, which is no low-rank sum; merge it first")
    up = layer.lora_B[name]
    return LowRankDelta(
        down=layer.lora_A[name].weight, up=up.weight, scale=float(layer.scaling[name]), bias=getattr(up, "bias", None)
    )
