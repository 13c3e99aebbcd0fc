from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

Mutate = Callable[[str, str, str], ModuleType]


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Mutate:
    """Return a function that loads a copy of a module with one snippet of its source replaced."""

    def load(name: str, original: str, replacement: str) -> ModuleType:
        source = inspect.getsource(importlib.import_module(name))
        assert source.count(original) == 1, f"{original!r} occurs {source.count(original)} times in {name}"
        module = ModuleType(f"{name}_mutant")
        # Dataclasses look their own module up by name.
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(source.replace(original, replacement), f"<mutant of {name}>", "exec"), module.__dict__)
        return module

    return load
