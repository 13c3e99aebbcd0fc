"""token_logprobs: a hand case, an fp64 loop oracle, gradients, invariances, mutants, memory and low precision."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinkflex.algo import logprobs as module
from sinkflex.algo.logprobs import LowRankDelta, OutputHead, token_logprobs
from sinkflex.errors import AlgorithmError


def case(n: int = 11, d: int = 6, v: int = 37, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "hidden": draw(n, d),
        "weight": draw(v, d),
        "bias": draw(v),
        "down": draw(2, d),
        "up": draw(v, 2),
        "targets": torch.randint(v, (n,), generator=made),
    }


def oracle(
    parts: dict[str, Tensor], *, temperature: float = 1.0, softcap: float | None = None, scale: float = 0.5
) -> tuple[Tensor, Tensor]:
    """The definition, token by token, with the whole vocabulary in hand."""
    weight = parts["weight"] + scale * parts["up"] @ parts["down"]
    logprobs, entropies = [], []
    for h, target in zip(parts["hidden"], parts["targets"], strict=True):
        logits = weight @ h + parts["bias"]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        log_p = logits - torch.log(torch.exp(logits - logits.max()).sum()) - logits.max()
        logprobs.append(log_p[target])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def head_of(parts: dict[str, Tensor], softcap: float | None = None) -> OutputHead:
    lora = LowRankDelta(down=parts["down"], up=parts["up"], scale=0.5)
    return OutputHead(weight=parts["weight"], bias=parts["bias"], lora=lora, softcap=softcap)


def gradients(loss: Tensor, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    wanted = {name: t for name, t in parts.items() if t.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


def test_hand_case() -> None:
    # Logits are the hidden state itself: (ln 1, ln 2, ln 5) -> p = 1/8, 2/8, 5/8.
    hidden = torch.tensor([[math.log(1.0), math.log(2.0), math.log(5.0)]], dtype=torch.float64)
    logprob, entropy = token_logprobs(
        hidden, torch.eye(3, dtype=torch.float64), torch.tensor([1]), with_entropy=True, chunk_vocab=2
    )
    assert logprob.item() == pytest.approx(math.log(0.25), abs=1e-15)
    expected = -(0.125 * math.log(0.125) + 0.25 * math.log(0.25) + 0.625 * math.log(0.625))
    assert entropy.item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("tokens", "columns"), [(None, None), (1, 1), (4, 5), (11, 36), (100, 38)])
def test_equals_the_loop_oracle_with_all_gradients(
    tokens: int | None, columns: int | None, temperature: float, softcap: float | None
) -> None:
    parts = case()
    weights = torch.randn(2, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = token_logprobs(
        parts["hidden"],
        head_of(parts, softcap),
        parts["targets"],
        temperature=temperature,
        with_entropy=True,
        chunk_tokens=tokens,
        chunk_vocab=columns,
    )
    want = oracle(parts, temperature=temperature, softcap=softcap)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    got_grads = gradients((torch.stack(list(got)) * weights).sum(), parts)
    want_grads = gradients((torch.stack(want) * weights).sum(), parts)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-11, atol=1e-11, msg=name)


def test_each_output_alone_carries_its_gradient() -> None:
    parts = case()
    for index in (0, 1):
        got = token_logprobs(
            parts["hidden"], head_of(parts), parts["targets"], with_entropy=True, chunk_vocab=7, chunk_tokens=3
        )
        got_grads = gradients(got[index].sum(), parts)
        for name, grad in gradients(oracle(parts)[index].sum(), parts).items():
            torch.testing.assert_close(got_grads[name], grad, rtol=1e-11, atol=1e-11, msg=f"{index} {name}")


def test_gradcheck() -> None:
    parts = case(n=3, d=2, v=5)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor) -> Any:
        head = OutputHead(weight=weight, bias=bias, lora=LowRankDelta(down=down, up=up), softcap=2.0)
        return token_logprobs(
            hidden, head, parts["targets"], temperature=1.3, with_entropy=True, chunk_tokens=2, chunk_vocab=3
        )

    names = ("hidden", "weight", "bias", "down", "up")
    assert torch.autograd.gradcheck(run, tuple(parts[name] for name in names))


def test_tied_head_adds_both_gradients() -> None:
    made = torch.Generator().manual_seed(0)
    table = torch.randn(9, 4, generator=made, dtype=torch.float64, requires_grad=True)
    ids, targets = torch.tensor([1, 2, 8]), torch.tensor([2, 8, 0])

    def loss(use: Any) -> Tensor:
        return use(torch.tanh(F.embedding(ids, table)))

    (got,) = torch.autograd.grad(loss(lambda h: token_logprobs(h, table, targets, chunk_vocab=4).sum()), table)
    (want,) = torch.autograd.grad(
        loss(lambda h: torch.log_softmax(h @ table.T, -1).gather(1, targets[:, None]).sum()), table
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_frozen_head_gets_no_gradient_and_no_buffer() -> None:
    parts = case()
    parts["weight"] = parts["weight"].detach()
    got = token_logprobs(parts["hidden"], head_of(parts), parts["targets"], chunk_vocab=5).sum()
    want = oracle(parts)[0].sum()
    grads = gradients(got, parts)
    assert "weight" not in grads
    for name, grad in gradients(want, parts).items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-11, atol=1e-11, msg=name)


def test_adding_a_constant_to_every_logit_changes_nothing() -> None:
    parts = case()
    base = token_logprobs(parts["hidden"], OutputHead(weight=parts["weight"], bias=parts["bias"]), parts["targets"])
    moved = token_logprobs(
        parts["hidden"], OutputHead(weight=parts["weight"], bias=parts["bias"] + 50.0), parts["targets"]
    )
    torch.testing.assert_close(base, moved, rtol=0, atol=1e-12)


def test_large_logits_stay_finite() -> None:
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]])
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 0]), with_entropy=True, chunk_vocab=1)
    assert logprobs.tolist() == [0.0, -2000.0]
    assert entropy.tolist() == [0.0, 0.0]
    (logprobs + entropy).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == [0.0, 2.0]


def test_fp32_is_within_1e_5_of_fp64() -> None:
    exact, single = case(n=40, d=64, v=3000), case(n=40, d=64, v=3000, dtype=torch.float32)
    for parts in (exact, single):
        parts["hidden"] = (parts["hidden"] / 8).detach().requires_grad_()
    outs = {
        name: token_logprobs(parts["hidden"], head_of(parts), parts["targets"], with_entropy=True, chunk_vocab=700)
        for name, parts in {"exact": exact, "single": single}.items()
    }
    for a, b in zip(outs["single"], outs["exact"], strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    want = gradients(sum(o.sum() for o in outs["exact"]), exact)
    for name, grad in gradients(sum(o.sum() for o in outs["single"]), single).items():
        torch.testing.assert_close(grad.double(), want[name], rtol=1e-5, atol=1e-5 * float(want[name].abs().max()))


def test_bf16_is_no_worse_than_rounding_the_inputs() -> None:
    parts = case(n=30, d=64, v=2000, dtype=torch.bfloat16)
    rounded = {k: t.detach().double().requires_grad_() if t.is_floating_point() else t for k, t in parts.items()}
    got = token_logprobs(parts["hidden"], parts["weight"], parts["targets"], chunk_vocab=300)
    want = token_logprobs(rounded["hidden"], rounded["weight"], rounded["targets"])
    assert got.dtype == torch.float32
    # The inputs are what they are; every sum runs in fp32, so bf16 adds nothing to fp32's own error.
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    got_grads = torch.autograd.grad(got.sum(), [parts["hidden"], parts["weight"]])
    want_grads = torch.autograd.grad(want.sum(), [rounded["hidden"], rounded["weight"]])
    for a, b in zip(got_grads, want_grads, strict=True):
        assert a.dtype == torch.bfloat16
        # One rounding to bf16 at the end: half a unit in the 8th bit.
        torch.testing.assert_close(a.double(), b, rtol=2.0**-8, atol=1e-5)


def test_autocast_does_not_lower_the_precision() -> None:
    parts = case(dtype=torch.float32)
    plain = token_logprobs(parts["hidden"], parts["weight"], parts["targets"], chunk_vocab=5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = token_logprobs(parts["hidden"], parts["weight"], parts["targets"], chunk_vocab=5)
    assert torch.equal(plain, cast)


def test_no_tokens() -> None:
    logprobs, entropy = token_logprobs(
        torch.zeros(0, 4), torch.zeros(7, 4), torch.zeros(0, dtype=torch.long), with_entropy=True
    )
    assert logprobs.shape == entropy.shape == (0,)


def test_the_logits_are_never_whole() -> None:
    n, v, tokens, columns = 64, 5000, 16, 250
    parts = case(n=n, d=8, v=v, dtype=torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor) and tensor.dim() == 2 and 8 not in tensor.shape:
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        logprobs, entropy = token_logprobs(
            parts["hidden"],
            parts["weight"],
            parts["targets"],
            with_entropy=True,
            chunk_tokens=tokens,
            chunk_vocab=columns,
        )
        (logprobs + entropy).sum().backward()
    assert largest == tokens * columns


def _flip(*args: Any) -> Tensor:
    return -_DLOGITS(*args)


def _forget_entropy(logits: Tensor, lse: Tensor, entropy: Any, rows: slice, g: Any, g_entropy: Any) -> Tensor:
    return _DLOGITS(logits, lse, None, rows, g, None)


def _shift(targets: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    return _LOCATE(targets, start + 1, stop + 1)


_DLOGITS, _LOCATE = module._dlogits, module._locate


@pytest.mark.parametrize(("name", "mutant"), [("_dlogits", _flip), ("_dlogits", _forget_entropy), ("_locate", _shift)])
def test_mutants_fail(monkeypatch: pytest.MonkeyPatch, name: str, mutant: Any) -> None:
    monkeypatch.setattr(module, name, mutant)
    with pytest.raises(AssertionError):
        test_equals_the_loop_oracle_with_all_gradients(4, 5, 0.7, 1.5)


def test_reads_a_linear_head() -> None:
    linear = nn.Linear(4, 7)
    head = OutputHead.from_module(linear, softcap=3.0)
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert head.lora is None
    assert head.softcap == 3.0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lora_bias", [False, True])
def test_reads_a_peft_lora_head_and_equals_its_forward(bias: bool, lora_bias: bool) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("lm_head", nn.Linear(6, 19, bias=bias or lora_bias))
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["lm_head"], init_lora_weights=False, lora_bias=lora_bias
    )
    layer = peft.inject_adapter_in_model(config, model).lm_head
    hidden, targets = torch.randn(5, 6), torch.randint(19, (5,))
    head = OutputHead.from_module(layer)
    assert head.lora is not None
    got = token_logprobs(hidden, head, targets, chunk_vocab=4)
    want = torch.log_softmax(layer(hidden), -1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    got.sum().backward()
    mine = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    want.sum().backward()
    theirs = [p.grad for p in layer.parameters() if p.grad is not None]
    assert len(mine) == len(theirs) == 2 + lora_bias
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    layer.merge()
    assert OutputHead.from_module(layer).lora is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_dropout": 0.5}, "adapter 'default' on the head has dropout"),
        ({"use_dora": True}, "adapter 'default' on the head is DoRA"),
    ],
)
def test_refuses_adapters_that_are_no_low_rank_sum(options: dict[str, Any], message: str) -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential()
    model.add_module("lm_head", nn.Linear(6, 19, bias=False))
    layer = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["lm_head"], **options), model).lm_head
    with pytest.raises(AlgorithmError, match=message):
        OutputHead.from_module(layer)


def test_refuses_two_active_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential()
    model.add_module("lm_head", nn.Linear(6, 19, bias=False))
    config = peft.LoraConfig(r=2, target_modules=["lm_head"])
    layer = peft.inject_adapter_in_model(config, model).lm_head
    layer.update_layer("second", 2, lora_alpha=2, config=config)
    layer.set_adapter(["default", "second"])
    with pytest.raises(AlgorithmError, match="the head has 2 active adapters"):
        OutputHead.from_module(layer)


def test_refuses_a_head_that_is_not_linear() -> None:
    with pytest.raises(AlgorithmError, match="cannot read an output head from Embedding"):
        OutputHead.from_module(nn.Embedding(3, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 4)}, r"hidden has shape \(3, 4\); expected \(N, d\) = \(2, 4\)"),
        ({"targets": torch.tensor([0, 7])}, r"targets span \[0, 7\]; expected ids in \[0, 7\)"),
        ({"targets": torch.tensor([-100, 1])}, r"targets span \[-100, 1\].*Drop ignored positions"),
        ({"temperature": 0.0}, "temperature is 0.0; expected > 0"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0; expected a number > 0"),
        ({"chunk_vocab": -1}, "chunk_vocab is -1; expected a number > 0"),
        ({"head": OutputHead(weight=torch.zeros(7, 4), softcap=0.0)}, "softcap is 0.0; expected > 0"),
        (
            {
                "head": OutputHead(
                    weight=torch.zeros(7, 4),
                    lora=LowRankDelta(down=torch.zeros(1, 4), up=torch.zeros(6, 1)),
                )
            },
            "lora.up has 6 rows; expected one per token of the vocabulary, 7",
        ),
    ],
)
def test_refuses_wrong_arguments(change: dict[str, Any], message: str) -> None:
    arguments = {"hidden": torch.zeros(2, 4), "head": torch.zeros(7, 4), "targets": torch.tensor([0, 1])} | change
    # Unwrapped: the tests' run-time shape checks would speak before the function's own message.
    with pytest.raises(AlgorithmError, match=message):
        inspect.unwrap(token_logprobs)(**arguments)
