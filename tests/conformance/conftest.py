from __future__ import annotations

import sys
from pathlib import Path

# The broken environments must be importable by name here and in the processes that the checker starts.
sys.path.append(str(Path(__file__).parent))
