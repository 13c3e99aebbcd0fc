"""The specification itself: against arithmetic done by hand, and against loops that share no code with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sinkflex.attention import SequenceLayout, sink_attention
from sinkflex.attention.reference import reference_attention


def test_hand_case() -> None:
    # One head, D = 1, scale 1, query 1: the scores are the keys ln 1, ln 2, ln 3; the sink's logit is ln 4.
    # token 0: weights 1     and sink 4, sum 5:  out = 10 * 1/5             = 2
    # token 1: weights 1 2   and sink 4, sum 7:  out = (10 + 20 * 2)/7      = 50/7
    # token 2: weights 1 2 3 and sink 4, sum 10: out = (10 + 40 + 30 * 3)/10 = 14
    key = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log().view(1, 1, 3, 1)
    value = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64).view(1, 1, 3, 1)
    sink = torch.tensor([4.0], dtype=torch.float64).log()
    for impl in ("reference", "flash"):
        out, lse = sink_attention(torch.ones_like(key), key, value, sink, scale=1.0, impl=impl, return_lse=True)
        assert out.flatten().tolist() == pytest.approx([2.0, 50 / 7, 14.0], rel=1e-14)
        assert lse.flatten().tolist() == pytest.approx([math.log(5), math.log(7), math.log(10)], rel=1e-14)


def test_hand_case_gradients() -> None:
    # As above, token 2 alone, loss = out. d out / d value_k = weight_k = 1/10, 2/10, 3/10.
    # d out / d score_k = weight_k * (value_k - out) = 0.1 * -4, 0.2 * 6, 0.3 * 16 = -0.4, 1.2, 4.8 (= d key, query 1).
    # d out / d sink = 0.4 * (0 - 14) = -5.6; the scores' gradients sum to +5.6.
    key = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log().view(1, 1, 3, 1)
    value = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64).view(1, 1, 3, 1)
    sink = torch.tensor([4.0], dtype=torch.float64).log()
    for impl in ("reference", "flash"):
        leaves = [x.detach().clone().requires_grad_() for x in (key, value, sink)]
        out = sink_attention(torch.ones(1, 1, 1, 1, dtype=torch.float64), *leaves, scale=1.0, impl=impl)
        assert isinstance(out, torch.Tensor)
        grads = torch.autograd.grad(out.sum(), leaves)
        assert grads[0].flatten().tolist() == pytest.approx([-0.4, 1.2, 4.8], rel=1e-13)
        assert grads[1].flatten().tolist() == pytest.approx([0.1, 0.2, 0.3], rel=1e-13)
        assert grads[2].tolist() == pytest.approx([-5.6], rel=1e-13)


def test_hand_case_with_a_bias_and_a_sink_for_each_query() -> None:
    # Scores ln 1, ln 2 as above; the bias ln 3 on key 0 makes its weight 3.
    # token 0: sink ln 2: weights 3 and 2,   sum 5:  out = 10 * 3/5            = 6
    # token 1: sink ln 5: weights 3 2 and 5, sum 10: out = (10 * 3 + 20 * 2)/10 = 7
    # d out_0 / d bias_00 = 3/5 * (10 - 6) = 2.4;  d out_0 / d sink_0 = 2/5 * (0 - 6) = -2.4
    # d out_1 / d bias_1: 3/10 * (10 - 7) = 0.9, 2/10 * (20 - 7) = 2.6;  d out_1 / d sink_1 = 5/10 * (0 - 7) = -3.5
    key = torch.tensor([1.0, 2.0], dtype=torch.float64).log().view(1, 1, 2, 1)
    value = torch.tensor([10.0, 20.0], dtype=torch.float64).view(1, 1, 2, 1)
    sinks = torch.tensor([2.0, 5.0], dtype=torch.float64).log().view(1, 1, 2).requires_grad_()
    bias = torch.tensor([[3.0, 1.0], [3.0, 1.0]], dtype=torch.float64).log().view(1, 1, 2, 2).requires_grad_()
    visible = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril()
    out, lse = reference_attention(torch.ones_like(key), key, value, sinks, visible, scale=1.0, bias=bias)
    assert out.flatten().tolist() == pytest.approx([6.0, 7.0], rel=1e-14)
    assert lse.flatten().tolist() == pytest.approx([math.log(5), math.log(10)], rel=1e-14)
    by_sink, by_bias = torch.autograd.grad(out.sum(), (sinks, bias))
    assert by_sink.flatten().tolist() == pytest.approx([-2.4, -3.5], rel=1e-13)
    assert by_bias.flatten().tolist() == pytest.approx([2.4, 0.0, 0.9, 2.6], rel=1e-13)


LENGTHS, PARENTS = [4, 3, 2, 3, 2], [-1, 0, 1, 0, -1]


def _tokens() -> list[tuple[int, int]]:
    """(node, position) of each token of the forest above, written out independently of SequenceLayout."""
    ends: list[int] = []
    tokens = []
    for node, (length, parent) in enumerate(zip(LENGTHS, PARENTS, strict=True)):
        first = ends[parent] if parent >= 0 else 0
        tokens += [(node, first + i) for i in range(length)]
        ends.append(first + length)
    return tokens


def _is_above(node: int, other: int) -> bool:
    while other >= 0:
        if node == other:
            return True
        other = PARENTS[other]
    return False


@pytest.mark.parametrize(("window", "num_sink_tokens"), [(None, 0), (1, 0), (3, 0), (3, 2), (2, 6)])
@pytest.mark.parametrize("sink", ["random", None, 30.0, -30.0])
def test_loops(lab: Any, window: int | None, num_sink_tokens: int, sink: float | str | None) -> None:
    """Outputs and gradients of a forest, one query, key and component at a time."""
    layout = SequenceLayout.from_prefix_tree(LENGTHS, PARENTS)
    case = lab.case(layout, heads=(4, 2), dim=3, sink=sink)
    options = {"window": window, "num_sink_tokens": num_sink_tokens}
    tokens, dim = _tokens(), 3
    q, k, v = (x[0].tolist() for x in (case.query, case.key, case.value))
    grad, grad_lse = case.grad[0].tolist(), case.grad_lse[0].tolist()
    expected = {
        name: torch.zeros_like(x)
        for name, x in (
            ("out", case.query), ("lse", case.grad_lse), ("d_query", case.query),
            ("d_key", case.key), ("d_value", case.value),
        )
    }  # fmt: skip
    if case.sink_logits is not None:
        expected["d_sink_logits"] = torch.zeros_like(case.sink_logits)
    for h in range(4):
        for i, (node, position) in enumerate(tokens):
            seen = [
                j
                for j, (other, place) in enumerate(tokens)
                if _is_above(other, node)
                and place <= position
                and (window is None or position - place < window or place < num_sink_tokens)
            ]
            scores = {j: sum(a * b for a, b in zip(q[h][i], k[h // 2][j], strict=True)) / math.sqrt(dim) for j in seen}
            mass = {j: math.exp(score) for j, score in scores.items()}
            extra = 0.0 if case.sink_logits is None else math.exp(case.sink_logits[h].item())
            total = math.fsum(mass.values()) + extra
            weights = {j: m / total for j, m in mass.items()}
            out = [math.fsum(weights[j] * v[h // 2][j][c] for j in seen) for c in range(dim)]
            expected["out"][0, h, i] = torch.tensor(out, dtype=torch.float64)
            expected["lse"][0, h, i] = math.log(total)
            delta = math.fsum(g * o for g, o in zip(grad[h][i], out, strict=True)) - grad_lse[h][i]
            if case.sink_logits is not None:
                expected["d_sink_logits"][h] -= extra / total * delta
            for j in seen:
                inner = math.fsum(g * x for g, x in zip(grad[h][i], v[h // 2][j], strict=True)) - delta
                slope = weights[j] * inner / math.sqrt(dim)
                for c in range(dim):
                    expected["d_query"][0, h, i, c] += slope * k[h // 2][j][c]
                    expected["d_key"][0, h // 2, j, c] += slope * q[h][i][c]
                    expected["d_value"][0, h // 2, j, c] += weights[j] * grad[h][i][c]
    lab.assert_close(lab.reference(case, **options), expected, 1e-12)


def test_sink_of_minus_infinity_is_plain_softmax() -> None:
    layout = SequenceLayout.causal(1, 9)
    x = [torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3)]
    plain = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)
    sink = torch.full((2,), -torch.inf, dtype=torch.float64)
    for impl in ("reference", "flash", "flex"):
        out = sink_attention(*x, sink, layout=layout, impl=impl)
        torch.testing.assert_close(out, plain, rtol=1e-13, atol=1e-13)
