"""The reference policy of the KL term: adapters switched off under LoRA, a frozen copy otherwise."""

from __future__ import annotations

import copy

from torch import Tensor

from sinkflex.models import Policy
from sinkflex.rollout.packing import PackedRow
from sinkflex.train.scoring import score_packed


class Reference:
    """Scores tokens under the policy as it is when this object is made.

    Args:
        policy: the policy; under LoRA nothing is copied.
    """

    def __init__(self, policy: Policy) -> None:
        if policy.is_lora:
            self._frozen: Policy | None = None
        else:
            model = copy.deepcopy(policy.model).eval().requires_grad_(requires_grad=False)
            self._frozen = Policy(model=model, tokenizer=policy.tokenizer)
        self._policy = policy

    def score(self, packed: PackedRow, *, temperature: float) -> Tensor:
        """Reference logprobs [n] of a packed row's trained tokens; call under ``no_grad``."""
        if self._frozen is not None:
            return score_packed(self._frozen, packed, temperature=temperature)[0]
        with self._policy.without_adapters():
            return score_packed(self._policy, packed, temperature=temperature)[0]
