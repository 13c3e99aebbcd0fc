"""Each objective against hand arithmetic and a loop in plain Python that also writes the gradient out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch

from sinkflex.algo import POLICY_LOSSES, BatchTotals, ClipRange, LossInputs, merge_statistics
from sinkflex.algo import losses as losses_module

NAMES, TOKEN_RATIO_NAMES = sorted(POLICY_LOSSES), ["dapo", "dr_grpo", "grpo", "seq_mean"]
BUDGET, WIDE = 10, ClipRange(low=1.0, high=math.inf)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Plain-number tokens: (trajectory, trained, old logprob, logprob, advantage, correction)."""

    tokens: tuple[tuple[int, bool, float, float, float, float], ...]

    def inputs(self, module: ModuleType = losses_module, **changes: torch.Tensor) -> LossInputs:
        columns = list(zip(*self.tokens, strict=True))
        number = {"dtype": torch.float64}
        fields = {
            "trajectory_ids": torch.tensor(columns[0]),
            "loss_mask": torch.tensor(columns[1]),
            "old_logprobs": torch.tensor(columns[2], **number),
            "logprobs": torch.tensor(columns[3], **number, requires_grad=True),
            "advantages": torch.tensor(columns[4], **number),
            "correction": torch.tensor(columns[5], **number),
        }
        return module.LossInputs(**(fields | changes))

    def totals(self) -> BatchTotals:
        trained = [token for token in self.tokens if token[1]]
        return BatchTotals(tokens=len(trained), trajectories=len({token[0] for token in trained}), token_budget=BUDGET)


# ratio 2, A=+1 | ratio 1/2, A=-1; ratio 3/2, A=-1 | a prompt token that must not count
HAND = Case(
    tokens=(
        (0, True, -1.0, -1.0 + math.log(2), 1.0, 1.0),
        (1, True, -1.0, -1.0 + math.log(0.5), -1.0, 1.0),
        (1, True, -1.0, -1.0 + math.log(1.5), -1.0, 1.0),
        (1, False, -9.0, -1.0, 5.0, 1.0),
    )
)
HAND_CASES = {
    # -min(2, 1.2) = -1.2;  -min(-0.5, -0.8) = 0.8;  -min(-1.5, -1.2) = 1.5
    "grpo": (ClipRange(low=0.2, high=0.2), (-1.2 + 0.8 + 1.5) / 3),
    "seq_mean": (ClipRange(low=0.2, high=0.2), (-1.2 + (0.8 + 1.5) / 2) / 2),
    "dr_grpo": (ClipRange(low=0.2, high=0.2), (-1.2 + 0.8 + 1.5) / (2 * BUDGET)),
    # the upper bound is 1.28 and the lower 0.8
    "dapo": (ClipRange(low=0.2, high=0.28), (-1.28 + 0.8 + 1.5) / 3),
    # sequence ratios 2 and sqrt(0.5 * 1.5) = 0.8660, which lies inside [0.8, 1.2]
    "gspo": (ClipRange(low=0.2, high=0.2), (-1.2 + math.sqrt(0.75)) / 2),
    # weights min(2, 1.6) = 1.6, 0.5, 1.5 times A times the logprob
    "cispo": (
        ClipRange(low=1.0, high=0.6),
        -(1.6 * (-1 + math.log(2)) * 1 + 0.5 * (-1 + math.log(0.5)) * -1 + 1.5 * (-1 + math.log(1.5)) * -1) / 3,
    ),
}


def oracle(name: str, case: Case, clip: ClipRange) -> tuple[float, list[float]]:
    """Loss and its gradient with respect to each logprob, written as loops over trajectories and tokens."""
    trained = [index for index, token in enumerate(case.tokens) if token[1]]
    members: dict[int, list[int]] = {}
    for index in trained:
        members.setdefault(case.tokens[index][0], []).append(index)
    value, gradient = 0.0, [0.0] * len(case.tokens)
    for indices in members.values():
        sequence_ratio = math.exp(sum(case.tokens[i][3] - case.tokens[i][2] for i in indices) / len(indices))
        for i in indices:
            _, _, old, new, advantage, correction = case.tokens[i]
            ratio = sequence_ratio if name == "gspo" else math.exp(new - old)
            bounded = max(min(ratio, 1 + clip.high), 1 - clip.low)
            if name == "cispo":
                loss, slope = -bounded * advantage * new, -bounded * advantage
            elif ratio * advantage <= bounded * advantage:
                loss, slope = -ratio * advantage, -ratio * advantage
            else:
                loss, slope = -bounded * advantage, 0.0
            if clip.dual is not None and advantage < 0 and loss > -clip.dual * advantage:
                loss, slope = -clip.dual * advantage, 0.0
            weight = {
                "seq_mean": 1 / (len(indices) * len(members)),
                "gspo": 1 / (len(indices) * len(members)),
                "dr_grpo": 1 / (len(members) * BUDGET),
            }.get(name, 1 / len(trained))
            value += weight * correction * loss
            gradient[i] += weight * correction * slope
    return value, gradient


def random_case(generator: torch.Generator, *, tokens: int = 40, trajectories: int = 6) -> Case:
    """Trajectories of random lengths in shuffled order, ratios from about 1/4 to 4, a third of the tokens masked."""
    ids = torch.randint(trajectories, (tokens,), generator=generator).tolist()
    draw = torch.rand(tokens, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(tokens, generator=generator, dtype=torch.float64) * 0.7
    advantage = torch.randn(trajectories, generator=generator, dtype=torch.float64).tolist()
    return Case(
        tokens=tuple(
            (
                ids[i],
                bool(draw[i, 0] > 1 / 3),
                float(-4 * draw[i, 1] - 1),
                float(-4 * draw[i, 1] - 1 + noise[i]),
                advantage[ids[i]],
                float(0.2 + draw[i, 2]),
            )
            for i in range(tokens)
        )
    )


def clip_of(name: str, *, low: float = 0.2, high: float = 0.35) -> ClipRange:
    return ClipRange(low=low, high=low if name == "grpo" else high)


def evaluate(
    name: str, inputs: LossInputs, totals: BatchTotals, clip: ClipRange, module: ModuleType = losses_module
) -> tuple[float, list[float]]:
    output = module.POLICY_LOSSES[name](inputs, totals=totals, clip=clip)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    return float(output.loss.detach()), gradient.tolist()


def check_against_oracle(module: ModuleType, name: str, clip: ClipRange) -> None:
    case = random_case(torch.Generator().manual_seed(3))
    value, gradient = evaluate(name, case.inputs(module), case.totals(), clip, module)
    expected_value, expected_gradient = oracle(name, case, clip)
    assert value == pytest.approx(expected_value, rel=1e-12)
    assert gradient == pytest.approx(expected_gradient, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_hand_case(name: str) -> None:
    clip, expected = HAND_CASES[name]
    value, gradient = evaluate(name, HAND.inputs(), HAND.totals(), clip)
    assert value == pytest.approx(expected, rel=1e-12)
    assert gradient[3] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_equal_the_loop(name: str) -> None:
    check_against_oracle(losses_module, name, clip_of(name))


@pytest.mark.parametrize("name", TOKEN_RATIO_NAMES)
def test_dual_clip_equals_the_loop(name: str) -> None:
    check_against_oracle(losses_module, name, replace(clip_of(name), dual=1.5))


def test_dual_clip_bounds_a_large_ratio_of_a_bad_token() -> None:
    # ratio 4, A = -2: -min(-8, -2.4) = 8, capped at 3 * 2 = 6 with no gradient
    case = Case(tokens=((0, True, -3.0, -3.0 + math.log(4), -2.0, 1.0),))
    clip = ClipRange(low=0.2, high=0.2, dual=3.0)
    value, gradient = evaluate("grpo", case.inputs(), case.totals(), clip)
    assert (value, gradient) == (pytest.approx(6.0), [0.0])
    plain, slope = evaluate("grpo", case.inputs(), case.totals(), replace(clip, dual=None))
    assert (plain, slope) == (pytest.approx(8.0), [pytest.approx(8.0)])


# CISPO's gradient is by design not that of its value, so the loop oracle is its only check.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "cispo"])
def test_gradcheck(name: str) -> None:
    case = random_case(torch.Generator().manual_seed(4), tokens=12, trajectories=3)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        # Without correction weights: gspo's token form has the gradient of its value for weights equal in a trajectory.
        inputs = replace(case.inputs(logprobs=logprobs), correction=None)
        return POLICY_LOSSES[name](inputs, totals=case.totals(), clip=clip_of(name)).loss

    assert torch.autograd.gradcheck(loss, case.inputs().logprobs)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_masked_positions_never_leak(name: str, poison: float) -> None:
    case = random_case(torch.Generator().manual_seed(5))
    clean = evaluate(name, case.inputs(), case.totals(), clip_of(name))
    poisoned = Case(
        tokens=tuple(token if token[1] else (token[0], False, poison, poison, poison, poison) for token in case.tokens)
    )
    inputs = poisoned.inputs()
    assert evaluate(name, inputs, case.totals(), clip_of(name)) == clean
    stats = POLICY_LOSSES[name](inputs, totals=case.totals(), clip=clip_of(name)).stats
    assert all(math.isfinite(value) for value in merge_statistics([stats]).values())


@pytest.mark.parametrize("name", NAMES)
def test_an_unmasked_nan_is_not_hidden(name: str) -> None:
    case = Case(tokens=((0, True, -1.0, math.nan, 1.0, 1.0), (0, True, -1.0, -1.0, 1.0, 1.0)))
    assert math.isnan(evaluate(name, case.inputs(), case.totals(), clip_of(name))[0])


@pytest.mark.parametrize("name", NAMES)
def test_splitting_into_microbatches_changes_nothing(name: str) -> None:
    case = random_case(torch.Generator().manual_seed(6))
    totals, clip = case.totals(), clip_of(name)
    whole = case.inputs()
    output = POLICY_LOSSES[name](whole, totals=totals, clip=clip)
    (gradient,) = torch.autograd.grad(output.loss, whole.logprobs)

    parts, value, split_gradient = [], 0.0, torch.zeros_like(gradient)
    for trajectories in ((0,), (1, 3, 5), (2, 4)):
        index = torch.tensor([i for i, token in enumerate(case.tokens) if token[0] in trajectories])
        part = Case(tokens=tuple(case.tokens[i] for i in index.tolist())).inputs()
        piece = POLICY_LOSSES[name](part, totals=totals, clip=clip)
        (piece_gradient,) = torch.autograd.grad(piece.loss, part.logprobs)
        parts.append(piece.stats)
        value += float(piece.loss.detach())
        split_gradient[index] = piece_gradient
    assert value == pytest.approx(float(output.loss.detach()), rel=1e-12)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=0)
    assert merge_statistics(parts) == pytest.approx(merge_statistics([output.stats]), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_order_change_nothing(name: str) -> None:
    case = random_case(torch.Generator().manual_seed(7))
    value, gradient = evaluate(name, case.inputs(), case.totals(), clip_of(name))
    order = torch.randperm(len(case.tokens), generator=torch.Generator().manual_seed(1)).tolist()
    padding = ((99, False, 0.0, 0.0, 0.0, 0.0),) * 5
    shuffled = Case(tokens=(*padding, *(case.tokens[i] for i in order)))
    moved, moved_gradient = evaluate(name, shuffled.inputs(), case.totals(), clip_of(name))
    assert moved == pytest.approx(value, rel=1e-12)
    assert moved_gradient[5:] == pytest.approx([gradient[i] for i in order], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", TOKEN_RATIO_NAMES)
def test_on_policy_is_the_vanilla_policy_gradient(name: str) -> None:
    case = random_case(torch.Generator().manual_seed(8))
    on_policy = Case(tokens=tuple((t[0], t[1], t[2], t[2], t[4], 1.0) for t in case.tokens))
    _, gradient = evaluate(name, on_policy.inputs(), case.totals(), clip_of(name))
    _, unclipped = evaluate("dapo", on_policy.inputs(), case.totals(), WIDE)
    scale = oracle(name, on_policy, WIDE)[1]
    assert gradient == pytest.approx(scale, rel=1e-12)
    expected = [-t[4] / case.totals().tokens if t[1] else 0.0 for t in case.tokens]
    assert unclipped == pytest.approx(expected, rel=1e-12)


def test_without_bounds_the_ratio_weighs_every_token() -> None:
    case = random_case(torch.Generator().manual_seed(9))
    value, _ = evaluate("dapo", case.inputs(), case.totals(), WIDE)
    plain = [-t[5] * t[4] * math.exp(t[3] - t[2]) for t in case.tokens if t[1]]
    assert value == pytest.approx(sum(plain) / len(plain), rel=1e-12)


def test_without_bounds_cispo_has_the_gradient_of_grpo() -> None:
    case = random_case(torch.Generator().manual_seed(10))
    _, cispo = evaluate("cispo", case.inputs(), case.totals(), WIDE)
    _, grpo = evaluate("dapo", case.inputs(), case.totals(), WIDE)
    assert cispo == pytest.approx(grpo, rel=1e-12)


def test_one_token_a_trajectory_makes_all_token_and_sequence_objectives_one() -> None:
    case = random_case(torch.Generator().manual_seed(11), tokens=6)
    single = Case(tokens=tuple((i, True, *t[2:]) for i, t in enumerate(case.tokens)))
    results = {
        name: evaluate(name, single.inputs(), single.totals(), ClipRange(low=0.2, high=0.2))
        for name in ("grpo", "seq_mean", "dapo", "gspo")
    }
    value, gradient = results["grpo"]
    for other, other_gradient in results.values():
        assert other == pytest.approx(value, rel=1e-12)
        assert other_gradient == pytest.approx(gradient, rel=1e-12, abs=1e-15)


def test_gspo_takes_token_advantages() -> None:
    # s = exp((0.2 - 0.1) / 2); gradient of each token is -s A_t / (T K)
    case = Case(tokens=((0, True, -1.0, -0.8, 2.0, 1.0), (0, True, -1.0, -1.1, 0.5, 1.0)))
    _, gradient = evaluate("gspo", case.inputs(), case.totals(), ClipRange(low=0.2, high=0.2))
    ratio = math.exp(0.05)
    assert gradient == pytest.approx([-ratio * 2.0 / 2, -ratio * 0.5 / 2], rel=1e-12)


def test_a_huge_ratio_stays_finite_and_keeps_pushing_down() -> None:
    case = Case(tokens=((0, True, -200.0, -1.0, -1.0, 1.0),))
    inputs = case.inputs()
    single = replace(inputs, logprobs=inputs.logprobs.detach().float().requires_grad_())
    output = POLICY_LOSSES["grpo"](single, totals=case.totals(), clip=ClipRange(low=0.2, high=0.2))
    (gradient,) = torch.autograd.grad(output.loss, single.logprobs)
    assert math.isfinite(float(output.loss.detach()))
    assert float(gradient[0]) == pytest.approx(math.exp(10), rel=1e-5)


def test_single_precision_gradients_keep_their_digits() -> None:
    case = random_case(torch.Generator().manual_seed(13))
    inputs = replace(case.inputs(), correction=None)
    _, expected = evaluate("dapo", inputs, case.totals(), WIDE)
    logprobs = inputs.logprobs.detach().float().requires_grad_()
    single = replace(
        inputs,
        logprobs=logprobs,
        old_logprobs=inputs.old_logprobs.float(),
        advantages=inputs.advantages.float(),
    )
    _, gradient = evaluate("dapo", single, case.totals(), WIDE)
    assert gradient == pytest.approx(expected, rel=2e-6)


def test_single_precision_stays_within_its_rounding() -> None:
    case = random_case(torch.Generator().manual_seed(12))
    for name in NAMES:
        inputs = case.inputs()
        fields = {field: getattr(inputs, field) for field in inputs.__dataclass_fields__}
        single = LossInputs(**{k: v.detach().float() if v.is_floating_point() else v for k, v in fields.items()})
        output = POLICY_LOSSES[name](single, totals=case.totals(), clip=clip_of(name))
        expected, _ = oracle(name, case, clip_of(name))
        # 27 summands of size about 1, each with a few roundings of 6e-8.
        assert float(output.loss.detach()) == pytest.approx(expected, abs=2e-6)


def test_statistics_of_the_hand_case() -> None:
    log_ratios = [math.log(2), math.log(0.5), math.log(1.5)]
    clip = ClipRange(low=0.2, high=0.2)
    figures = merge_statistics([POLICY_LOSSES["grpo"](HAND.inputs(), totals=HAND.totals(), clip=clip).stats])
    assert figures == pytest.approx(
        {
            "ppo_kl": -sum(log_ratios) / 3,
            "pg_clipfrac": 2 / 3,
            "pg_clipfrac_lower": 0.0,
            "ratio_mean": (2 + 0.5 + 1.5) / 3,
            "ratio_max": 2.0,
        },
        rel=1e-12,
    )
    dual = replace(clip, dual=1.25)
    figures = merge_statistics([POLICY_LOSSES["grpo"](HAND.inputs(), totals=HAND.totals(), clip=dual).stats])
    assert figures["pg_clipfrac_lower"] == pytest.approx(1 / 3)


def test_gspo_statistics_count_trajectories() -> None:
    clip = ClipRange(low=0.2, high=0.2)
    figures = merge_statistics([POLICY_LOSSES["gspo"](HAND.inputs(), totals=HAND.totals(), clip=clip).stats])
    # one of two trajectories is clipped, though it holds one of three tokens
    assert figures["pg_clipfrac"] == pytest.approx(1 / 2)
    assert figures["ratio_mean"] == pytest.approx((2 + math.sqrt(0.75)) / 2)
    assert figures["ratio_max"] == pytest.approx(2.0)


def test_cispo_counts_bounded_weights() -> None:
    clip, _ = HAND_CASES["cispo"]
    figures = merge_statistics([POLICY_LOSSES["cispo"](HAND.inputs(), totals=HAND.totals(), clip=clip).stats])
    assert figures["pg_clipfrac"] == pytest.approx(1 / 3)


MUTANTS = {
    "flipped sign": ("dapo", "return -torch.minimum(", "return torch.minimum("),
    "max for min": ("dapo", "return -torch.minimum(", "return -torch.maximum("),
    "clip bounds swapped": (
        "dapo",
        "bounded = ratio.clamp(1 - clip.low, 1 + clip.high)",
        "bounded = ratio.clamp(1 - clip.high, 1 + clip.low)",
    ),
    "no clip": ("dapo", "bounded = ratio.clamp(1 - clip.low, 1 + clip.high)", "bounded = ratio"),
    "gspo without the length": ("gspo", "sums / lengths.clamp(min=1)", "sums"),
    "gspo ratio carries gradient twice": (
        "gspo",
        "trajectory_sums(log_ratio.detach(), inputs.trajectory_ids)",
        "trajectory_sums(log_ratio, inputs.trajectory_ids)",
    ),
    "cispo weight carries gradient": ("cispo", "ratio.detach().clamp", "ratio.clamp"),
    "cispo sign": ("cispo", "losses = -weight", "losses = weight"),
    "correction ignored": ("dapo", "losses = losses * _masked(inputs.correction, inputs.loss_mask)", "pass"),
    "dapo over trajectories": (
        "seq_mean",
        "return _clipped_loss(inputs, totals, clip, Aggregation.SEQUENCE_MEAN)",
        "return _clipped_loss(inputs, totals, clip, Aggregation.TOKEN_MEAN)",
    ),
    "mask ignored": (
        "dapo",
        "    ratio = safe_exp(log_ratio)\n    advantages = _masked(inputs.advantages, mask)",
        "    log_ratio = inputs.logprobs - inputs.old_logprobs\n    mask = torch.ones_like(mask)\n"
        "    object.__setattr__(inputs, 'loss_mask', mask)\n"
        "    ratio = safe_exp(log_ratio)\n    advantages = _masked(inputs.advantages, mask)",
    ),
}


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_mutants_fail(mutant: str, mutate) -> None:
    name, original, replacement = MUTANTS[mutant]
    module = mutate("sinkflex.algo.losses", original, replacement)
    with pytest.raises(AssertionError):
        check_against_oracle(module, name, clip_of(name))


def test_a_mutant_dual_clip_fails(mutate) -> None:
    module = mutate("sinkflex.algo.losses", "(advantages < 0) & (losses > cap)", "losses > cap")
    with pytest.raises(AssertionError):
        check_against_oracle(module, "dapo", replace(clip_of("dapo"), dual=1.5))
