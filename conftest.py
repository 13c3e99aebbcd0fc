"""Runs the Python snippets of README.md and docs/ as tests; a page is one namespace, read from top to bottom."""

from __future__ import annotations

import pytest
from sybil import Sybil
from sybil.integration.pytest import SybilItem
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
).pytest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each page's snippets back in order after the shuffle, and keep a page on one xdist worker."""
    places = [index for index, item in enumerate(items) if isinstance(item, SybilItem)]
    snippets = sorted((items[index] for index in places), key=lambda item: (str(item.path), item.example.line))
    for index, snippet in zip(places, snippets, strict=True):
        snippet.add_marker(pytest.mark.xdist_group(str(snippet.path)))
        items[index] = snippet
