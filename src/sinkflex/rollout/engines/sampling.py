"""Sampling whose noise depends on the request and the position only, never on who shares the batch."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def request_key(request_id: str, *, seed: int) -> int:
    """Return the 64-bit key of a request's noise stream."""
    digest = hashlib.blake2b(f"{seed}\0{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (key, position): a counter-based generator (SplitMix64's output function).

    Args:
        keys: [n] noise streams, from ``request_key``.
        positions: [n] index of the token to be sampled in its transcript.
    """
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    state = state ^ (state >> np.uint64(31))
    # 52 bits, so that u * total stays below total after rounding.
    noise: npt.NDArray[np.float64] = (state >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return noise


def sample_tokens(
    logits: Float[Tensor, "n V"],
    *,
    temperature: Float[Tensor, " n"],
    top_p: Float[Tensor, " n"] | None,
    noise: Float[Tensor, " n"],
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Sample one token a row by inverting its cumulative distribution.

    Args:
        logits: [n, V] of the model; -inf forbids a token.
        temperature: [n] divides the logits; 0 takes the most likely token instead.
        top_p: [n] nucleus mass in (0, 1], or None when all are 1.
        noise: [n] fp64 in [0, 1).

    Returns:
        [n] tokens; [n] their fp32 log-probabilities under the full distribution at the row's temperature (1 where it is
        0); [n] the log-normaliser, not finite where the logits hold NaN or +inf.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    log_normaliser = scaled.logsumexp(dim=-1)
    logprobs = scaled - log_normaliser[:, None]
    probabilities = logprobs.exp()
    if top_p is not None:
        probabilities = _nucleus(probabilities, top_p)
    # fp64, so that a large vocabulary's tail keeps its mass.
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    threshold = noise[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], log_normaliser


def _nucleus(probabilities: Float[Tensor, "n V"], top_p: Float[Tensor, " n"]) -> Float[Tensor, "n V"]:
    """Zero what lies outside the smallest set of tokens whose mass reaches ``top_p``."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    kept = ordered.masked_fill(before >= top_p[:, None], 0.0)
    return torch.zeros_like(probabilities).scatter_(1, order, kept)
