"""Runs the Python snippets of README.md and docs/ as tests; a page is one namespace, read from top to bottom.

They run in a pytest of their own (``make test``), in order and in one process: a page's later snippets build on its
earlier ones, which neither a shuffle nor a split over workers respects.
"""

from __future__ import annotations

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
).pytest()
