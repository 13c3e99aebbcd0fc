"""One way to run any impl on the same inputs and compare outputs and all gradients with the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sinkflex.attention import SequenceLayout, dense_mask
from sinkflex.attention.flash import sink_attention_through
from sinkflex.attention.flex import flex_sink_attention
from sinkflex.attention.kernels import Sequences
from sinkflex.attention.reference import reference_attention
from sinkflex.attention.varlen import VarlenEngine, build_varlen_plan

Run = Callable[..., tuple[Tensor, Tensor]]
Results = dict[str, Tensor]


def _padding(spans: list[tuple[int, int]], length: int) -> Tensor:
    mask = torch.zeros(len(spans), length, dtype=torch.bool)
    for row, (low, high) in enumerate(spans):
        mask[row, low:high] = True
    return mask


def _holes(seed: int) -> Tensor:
    return torch.rand(2, 60, generator=torch.Generator().manual_seed(seed)) > 0.3


LAYOUTS: dict[str, Callable[[], SequenceLayout]] = {
    "causal": lambda: SequenceLayout.causal(2, 70),
    "one_token": lambda: SequenceLayout.causal(1, 1),
    "cached_chunk": lambda: SequenceLayout.causal(2, 70, num_queries=40),
    "cached_one": lambda: SequenceLayout.causal(3, 70, num_queries=1),
    "cached_few": lambda: SequenceLayout.causal(3, 70, num_queries=5),
    "left_padding": lambda: SequenceLayout.from_padding(_padding([(10, 50), (0, 50), (49, 50)], 50)),
    "right_padding": lambda: SequenceLayout.from_padding(_padding([(0, 41), (0, 50), (0, 1)], 50)),
    "both_and_empty": lambda: SequenceLayout.from_padding(_padding([(10, 40), (3, 30), (0, 0)], 50)),
    "holes": lambda: SequenceLayout.from_padding(_holes(0)),
    "holes_cached": lambda: SequenceLayout.from_padding(_holes(1), num_queries=40),
    "documents": lambda: SequenceLayout.from_documents([[10, 20, 3, 1, 37], [40, 10]], length=80),
    "equal_documents": lambda: SequenceLayout.from_documents([8] * 9),
    "many_documents": lambda: SequenceLayout.from_documents([40, 130, 60, 200, 90]),
    "position_ids": lambda: SequenceLayout.from_position_ids(
        torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [4, 5, 6, 0, 1, 2, 3, 4]])
    ),
    "group": lambda: SequenceLayout.from_prefix_tree([30, 10, 12, 5], [-1, 0, 0, 0]),
    "depth_4": lambda: SequenceLayout.from_prefix_tree([30, 10, 12, 5, 7, 9, 4], [-1, 0, 1, 2, 2, 1, -1]),
    "breadth_first": lambda: SequenceLayout.from_prefix_tree(
        [[20, 10, 12, 5, 7, 9], [5]], [[-1, 0, -1, 1, 2, 0], [-1]]
    ),
    "ragged_one": lambda: SequenceLayout.decode([5, 70, 33], 70),
    "ragged_few": lambda: SequenceLayout.decode(torch.tensor([5, 70, 33]), 70, num_queries=4),
    "ragged_chunk": lambda: SequenceLayout.decode([50, 70, 43], 70, num_queries=40),
    "chunked_local": lambda: SequenceLayout.from_prefix_tree([30, 10, 12, 5], [-1, 0, 0, 1]).chunked(16),
}


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> SequenceLayout:
    """Every kind of layout in turn."""
    return LAYOUTS[request.param]()


@pytest.fixture
def layouts() -> dict[str, Callable[[], SequenceLayout]]:
    """Builders of every kind of layout, by name."""
    return LAYOUTS


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs and upstream gradients for one layout."""

    layout: SequenceLayout
    query: Tensor
    key: Tensor
    value: Tensor
    sink_logits: Tensor | None
    grad: Tensor
    grad_lse: Tensor | None

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Case:
        """The same case in another dtype; sinks and log-sum-exps stay at least fp32, as models keep them."""
        wide = torch.promote_types(dtype, torch.float32)
        return Case(
            layout=self.layout.to(device),
            query=self.query.to(device, dtype),
            key=self.key.to(device, dtype),
            value=self.value.to(device, dtype),
            sink_logits=None if self.sink_logits is None else self.sink_logits.to(device, wide),
            grad=self.grad.to(device, dtype),
            grad_lse=None if self.grad_lse is None else self.grad_lse.to(device, wide),
        )


class PackedKernel:
    """What a CUDA varlen kernel promises, in plain torch: the stand-in under which its engine is tested."""

    name = "emulated"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        """Queries without keys get lse +inf, as flash-attn gives them."""
        dtype = q.dtype
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        out, lse = torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), torch.inf)
        assert (int(sequences.cu_q[-1]), int(sequences.cu_k[-1])) == (len(q), len(k))
        for rows, keys, mask in self._pairs(sequences):
            scores, values = self._scores(q[rows], k[keys], mask, scale), self._wide(v[keys], q)
            lse[:, rows] = torch.logsumexp(scores, -1)
            out[rows] = torch.einsum("hqk,khd->qhd", torch.exp(scores - lse[:, rows, None]), values)
        return out.to(dtype), lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        sequences: Sequences,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The flash backward: weights from lse, delta from grad and out."""
        dtype = q.dtype
        grad, q, k, v, out = (x.to(torch.promote_types(dtype, torch.float32)) for x in (grad, q, k, v, out))
        grads = [torch.zeros_like(x) for x in (q, k, v)]

        def narrow(x: Tensor) -> Tensor:
            return x.unflatten(1, (k.shape[1], -1)).sum(2)

        for rows, keys, mask in self._pairs(sequences):
            weights = torch.exp(self._scores(q[rows], k[keys], mask, scale) - lse[:, rows, None])
            delta = (grad[rows] * out[rows]).sum(-1).T[..., None]
            inner = weights * (torch.einsum("qhd,khd->hqk", grad[rows], self._wide(v[keys], q)) - delta) * scale
            grads[0][rows] += torch.einsum("hqk,khd->qhd", inner, self._wide(k[keys], q))
            grads[1][keys] += narrow(torch.einsum("hqk,qhd->khd", inner, q[rows]))
            grads[2][keys] += narrow(torch.einsum("hqk,qhd->khd", weights, grad[rows]))
        grads = [x.to(dtype) for x in grads]
        return grads[0], grads[1], grads[2]

    @staticmethod
    def _wide(x: Tensor, q: Tensor) -> Tensor:
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, self._wide(k, q)) * scale
        return scores.masked_fill(~mask, -torch.inf)

    @staticmethod
    def _pairs(sequences: Sequences) -> list[tuple[slice, slice, Tensor]]:
        pairs = []
        cu_q, cu_k = sequences.cu_q.tolist(), sequences.cu_k.tolist()
        for i in range(len(cu_q) - 1):
            num_q, num_k = cu_q[i + 1] - cu_q[i], cu_k[i + 1] - cu_k[i]
            assert num_q <= sequences.max_q
            assert num_k <= sequences.max_k
            back = torch.arange(num_q)[:, None] + num_k - num_q - torch.arange(num_k)
            mask = torch.ones(num_q, num_k, dtype=torch.bool)
            mask &= (back <= sequences.left) | (sequences.left < 0)
            mask &= (back >= 0) | (sequences.right < 0)
            pairs.append((slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1]), mask))
        return pairs


class Lab:
    """Builds cases, runs them and compares."""

    def case(
        self,
        layout: SequenceLayout,
        *,
        heads: tuple[int, int] = (4, 2),
        dim: int = 8,
        value_dim: int | None = None,
        sink: float | Sequence[float] | str | None = "random",
        lse_grad: bool = True,
        token_major: bool = True,
        seed: int = 0,
    ) -> Case:
        """A random fp64 case.

        Args:
            layout: the layout.
            heads: (query heads, key heads).
            dim: head dimension of queries and keys.
            value_dim: of values; None means ``dim``.
            sink: "random", one value for all heads, one value a head, or None for no sink.
            lse_grad: whether a gradient comes in through the log-sum-exp.
            token_major: memory layout, as a linear layer leaves it; False means heads outside tokens.
            seed: of the random numbers.
        """
        generator = torch.Generator().manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        def tokens(num_heads: int, length: int, width: int) -> Tensor:
            x = draw(layout.batch, length, num_heads, width).transpose(1, 2)
            return x if token_major else x.contiguous()

        logits = draw(heads[0])
        constant = logits
        if sink is not None and not isinstance(sink, str):
            constant = torch.zeros_like(logits) + torch.tensor(sink, dtype=logits.dtype)
        wide = dim if value_dim is None else value_dim
        return Case(
            layout=layout,
            query=tokens(heads[0], layout.num_queries, dim),
            key=tokens(heads[1], layout.num_keys, dim),
            value=tokens(heads[1], layout.num_keys, wide),
            sink_logits=None if sink is None else constant,
            grad=tokens(heads[0], layout.num_queries, wide),
            grad_lse=draw(layout.batch, heads[0], layout.num_queries) if lse_grad else None,
        )

    def results(self, run: Run, case: Case, **options: Any) -> Results:
        """Outputs and all gradients of ``run(query, key, value, sink_logits, layout=..., **options)``."""
        names = ["query", "key", "value"] + ["sink_logits"] * (case.sink_logits is not None)
        inputs = {name: getattr(case, name).detach().clone().requires_grad_() for name in names}
        out, lse = run(*inputs.values(), *[None] * (4 - len(inputs)), layout=case.layout, **options)
        loss = (out * case.grad).sum()
        if case.grad_lse is not None:
            loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * case.grad_lse).sum()
        loss.backward()
        grads = {f"d_{name}": x.grad for name, x in inputs.items() if x.grad is not None}
        assert len(grads) == len(inputs)
        return {"out": out.detach(), "lse": lse.detach(), **grads}

    def reference(self, case: Case, **options: Any) -> Results:
        """The specification's results; long rows one head and 512 queries at a time: 17 MB a matrix, not gigabytes."""
        if case.layout.num_keys <= 1024:
            return self.results(self.run_reference, case, **options)
        names = ["query", "key", "value"] + ["sink_logits"] * (case.sink_logits is not None)
        inputs = {name: getattr(case, name).detach().clone().requires_grad_() for name in names}
        heads, length = case.query.shape[1:3]
        group = heads // case.key.shape[1]
        out, lse = torch.empty_like(case.grad), case.grad.new_empty(case.grad.shape[:3])
        for head in range(heads):
            for low in range(0, length, 512):
                rows, one, of_key = (
                    slice(low, low + 512),
                    slice(head, head + 1),
                    slice(head // group, head // group + 1),
                )
                seen = dense_mask(case.layout, num_heads=1, columns=rows, **options)
                near = seen.flatten(0, 2).any(0).nonzero().flatten().tolist() or [0]
                keys = slice(near[0], near[-1] + 1)
                sinks = inputs["sink_logits"][one] if "sink_logits" in inputs else None
                part, part_lse = reference_attention(
                    inputs["query"][:, one, rows],
                    inputs["key"][:, of_key, keys],
                    inputs["value"][:, of_key, keys],
                    sinks,
                    seen[..., keys],
                    scale=case.query.shape[-1] ** -0.5,
                )
                loss = (part * case.grad[:, one, rows]).sum()
                if case.grad_lse is not None:
                    finite = part_lse.masked_fill(part_lse == -torch.inf, 0.0)
                    loss = loss + (finite * case.grad_lse[:, one, rows]).sum()
                loss.backward()
                out[:, one, rows], lse[:, one, rows] = part.detach(), part_lse.detach()
        return {"out": out, "lse": lse, **{f"d_{name}": x.grad for name, x in inputs.items() if x.grad is not None}}

    @staticmethod
    def run_reference(
        query: Tensor, key: Tensor, value: Tensor, sink_logits: Tensor | None, *, layout: SequenceLayout, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """reference.py over the dense mask."""
        seen = dense_mask(layout, num_heads=query.shape[1], **options)
        return reference_attention(query, key, value, sink_logits, seen, scale=query.shape[-1] ** -0.5)

    @staticmethod
    def run_varlen(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink_logits: Tensor | None,
        *,
        layout: SequenceLayout,
        window: int | None = None,
        num_sink_tokens: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """The CUDA flash path with its kernel emulated."""
        plan = build_varlen_plan(layout, device=query.device, window=window, num_sink_tokens=num_sink_tokens)
        engine = VarlenEngine(plan, PackedKernel(), query.shape[-1] ** -0.5)
        return sink_attention_through(engine, query, key, value, sink_logits)

    @staticmethod
    def run_flex(
        query: Tensor, key: Tensor, value: Tensor, sink_logits: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """The flex path, differentiated on CPU with torch's refusal taken out."""
        settings = {"window": None, "num_sink_tokens": 0, "mask_mod": None} | options
        with mock.patch("torch.nn.attention.flex_attention._validate_device"):
            return flex_sink_attention(query, key, value, sink_logits, scale=query.shape[-1] ** -0.5, **settings)

    @staticmethod
    def run_eager(
        query: Tensor, key: Tensor, value: Tensor, sink_logits: Tensor, *, layout: SequenceLayout, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """What models with sinks run without a kernel: all in the inputs' precision, the sink a column of the softmax.

        The reference is no yardstick for low precision: it promotes its scores to fp32, which eager does not.
        """
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = (query @ keys.transpose(-1, -2)) * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~dense_mask(layout, num_heads=query.shape[1], **options), -torch.inf)
        sinks = sink_logits.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        logits = torch.cat([scores, sinks], dim=-1)
        probabilities = torch.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
        return probabilities @ values, logits.logsumexp(dim=-1)

    def errors(self, actual: Results, expected: Results, *, per_head: bool = True) -> dict[str, float]:
        """Largest error of each result relative to its largest entry, head by head; NaN and inf are never close.

        Without a floor: what is exactly 0 must come back as exactly 0, so that neither a sink of -30 (gradients of
        1e-13) nor one of +30 (outputs of 1e-13) can hide a mistake, alone or beside other heads.

        Args:
            actual: the results in question.
            expected: the results they should equal.
            per_head: False compares with the largest entry of all heads: low precision has no digits left in the
                gradient of a single sink whose terms happen to cancel.
        """
        errors = {}
        for name, wanted in expected.items():
            got = actual[name].to(wanted)
            unseen = wanted == -torch.inf
            assert torch.equal(got == -torch.inf, unseen), name
            difference, scale = (x.masked_fill(unseen, 0.0).abs() for x in (got - wanted, wanted))
            if per_head and name != "d_sink_logits":
                difference, scale = (x.transpose(0, 1).flatten(1).amax(1) for x in (difference, scale))
            elif not per_head:
                difference, scale = difference.amax(), scale.amax()
            errors[name] = float(torch.where(difference == 0, 0.0, difference / scale).max())
        return errors

    def assert_close(
        self, actual: Results, expected: Results, tolerance: float, *, per_head: bool = True, what: str = ""
    ) -> None:
        """Fail with all errors when one is above ``tolerance`` or NaN."""
        errors = self.errors(actual, expected, per_head=per_head)
        assert all(error <= tolerance for error in errors.values()), f"{what} {errors}"

    def rms_errors(
        self, run: Run, layout: SequenceLayout, dtype: torch.dtype, *, device: str = "cpu", **options: Any
    ) -> dict[str, float]:
        """Root mean square over eight seeds of each result's error against fp64; one draw of four sinks is luck.

        Args:
            run: the implementation.
            layout: on CPU.
            dtype: the low precision.
            device: where ``run`` runs; fp64 runs on CPU, from the same rounded inputs.
            **options: ``heads`` (query, key), ``lse_grad``, and what ``run`` and the reference take.
        """
        shape = {"heads": options.pop("heads", (4, 2)), "lse_grad": options.pop("lse_grad", False)}
        squares: dict[str, float] = {}
        for seed in range(8):
            case = self.case(layout, dim=32, seed=seed, **shape).to(dtype)
            exact = self.reference(case.to(torch.float64), **options)
            got = self.results(run, case.to(dtype, device), **options)
            for result, error in self.errors(got, exact, per_head=False).items():
                squares[result] = squares.get(result, 0.0) + error**2 / 8
        return {result: square**0.5 for result, square in squares.items()}


@pytest.fixture
def lab() -> Lab:
    """Tools to build, run and compare cases."""
    return Lab()
