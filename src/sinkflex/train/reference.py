"""The reference policy of the KL term: adapters switched off under LoRA, a frozen copy otherwise."""

from __future__ import annotations

import copy

from torch import Tensor

from sinkflex.models import Policy
from sinkflex.train.scoring import Microbatch, score_microbatch


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

    def score(self, batch: Microbatch, *, temperature: float) -> Tensor:
        """Reference logprobs [n] of a microbatch's trained tokens; call under ``no_grad``."""
        if self._frozen is not None:
            return score_microbatch(self._frozen, batch, temperature=temperature)[0]
        with self._policy.without_adapters():
            return score_microbatch(self._policy, batch, temperature=temperature)[0]
