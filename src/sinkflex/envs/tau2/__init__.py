"""τ²-bench's real tasks behind the same contract as the embedded domains; needs the extra ``sinkflex[tau2]``.

Importing this package does not import τ²-bench; making an environment does.
"""

from __future__ import annotations

from sinkflex.envs.tau2.catalogue import DOMAINS
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.envs.tau2.grading import Grade, Judge

__all__ = ["DOMAINS", "Grade", "Judge", "Tau2Env"]
