"""What holds for every test: one tensor thread, run-time shape checks, and nothing written to the home folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

# A shared machine may stall for longer than any deadline; slow tests are found by their durations instead.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

# Two xdist workers share two cores; one thread each keeps timings and reductions the same everywhere.
torch.set_num_threads(1)

# Must precede the first import of these packages: their jaxtyping signatures are then checked at every call.
# Left out of the attention package: what FlexAttention traces (masks), and what answers a wrong shape itself.
install_import_hook(
    [
        "sinkflex.algo",
        "sinkflex.rollout",
        "sinkflex.attention.reference",
        "sinkflex.attention.diagnostics",
        "sinkflex.attention.merge",
        "sinkflex.attention.flash",
        "sinkflex.attention.cpu",
        "sinkflex.attention.heads",
    ],
    "beartype.beartype",
)


@pytest.fixture(autouse=True, scope="session")
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the session its own home folder, so that no test depends on a cache that an earlier run left behind."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(folder))
        # The font cache takes seconds to build and depends on nothing; it is kept.
        patch.setenv("MPLCONFIGDIR", str(Path(tempfile.gettempdir()) / "sinkflex-matplotlib"))
        yield folder
