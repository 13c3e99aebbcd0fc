"""What holds for every test: one tensor thread, run-time shape checks, and nothing written to the home folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

# Two xdist workers share two cores; one thread each keeps timings and reductions the same everywhere.
torch.set_num_threads(1)

# Must precede the first import of these packages: their jaxtyping signatures are then checked at every call.
install_import_hook(["sinkflex.algo", "sinkflex.attention", "sinkflex.rollout"], "beartype.beartype")


@pytest.fixture(autouse=True, scope="session")
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the session its own home folder, so that no test depends on a cache that an earlier run left behind."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(folder))
        yield folder
