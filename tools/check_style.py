"""The rules of the house that no linter knows: sizes, names, and text that must never be committed.

Run as ``python tools/check_style.py [ROOT]``; prints one line a finding and exits 1 when there is any.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_PARAMETERS = 8
WIDE_SIGNATURES = frozenset(
    {
        # One attention call: query, key, value and sinks belong together, and so do the masks.
        ("src/sinkflex/attention/api.py", "sink_attention"),
        ("src/sinkflex/attention/flash.py", "flash_attention"),
        ("src/sinkflex/attention/flex.py", "flex_sink_attention"),
    }
)
VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})
TEXT_SUFFIXES = frozenset({".py", ".toml", ".md", ".txt", ".json", ".jsonl", ".yaml", ".yml", ".cfg", ".sh", ""})

# Spelt in pieces, or the checker would find itself.
_HOSTS = ("pypi" + r"\.org", "pythonhosted" + r"\.org", "npmjs" + r"\.org", "deb" + r"\.debian\.org")
FORBIDDEN_TEXT = {
    "a package registry's host": re.compile("|".join(_HOSTS)),
    "a path of one machine": re.compile(r"(?<![\w.~-])/(?:" + "work|ro" + r"ot|ho" + r"me/\w+)/"),
}
SKIPPED = re.compile(r"(?:skip|skipif|xfail)\(\s*\)|mark\.skip\b|pytest\.skip\(")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One broken rule at one place."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check_text(path: Path, text: str) -> Iterator[Finding]:
    """Yield text that must not be committed, whatever the kind of file."""
    for number, line in enumerate(text.splitlines(), start=1):
        for what, pattern in FORBIDDEN_TEXT.items():
            if pattern.search(line):
                yield Finding(path=path, line=number, message=f"names {what}")


def check_python(path: Path, text: str) -> Iterator[Finding]:
    """Yield broken size and name rules of one Python file."""
    lines = text.count("\n") + 1
    if lines > MAX_FILE_LINES:
        yield Finding(path=path, line=1, message=f"{lines} lines, at most {MAX_FILE_LINES}; split it by topic")
    if path.stem in VAGUE_NAMES:
        yield Finding(path=path, line=1, message=f"{path.name} says nothing; name it after what it holds")
    if "tests" in path.parts:
        yield from _check_skips(path, text)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield Finding(path=path, line=error.lineno or 1, message=f"does not parse: {error.msg}")
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _check_function(path, node)


def check_folder(path: Path) -> Iterator[Finding]:
    """Yield a folder's vague name."""
    if path.name in VAGUE_NAMES:
        yield Finding(path=path, line=1, message="this folder's name says nothing; name it after what it holds")


def _check_skips(path: Path, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), start=1):
        if SKIPPED.search(line):
            yield Finding(path=path, line=number, message="an unconditional skip; fix the test or delete it")


def _check_function(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    length = _code_lines(node)
    if "tests" not in path.parts and length > MAX_FUNCTION_LINES:
        message = f"{node.name} has {length} lines, at most {MAX_FUNCTION_LINES}; split it"
        yield Finding(path=path, line=node.lineno, message=message)
    public = not node.name.startswith("_") or node.name == "__init__"
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
    allowed = "tests" in path.parts or (path.as_posix(), node.name) in WIDE_SIGNATURES
    if public and not allowed and count > MAX_PUBLIC_PARAMETERS:
        message = f"{node.name} has {count} parameters, at most {MAX_PUBLIC_PARAMETERS}; group them"
        yield Finding(path=path, line=node.lineno, message=message)


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, the docstring left out: what is explained at length may still be short."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def check_tree(root: Path, files: Iterable[Path]) -> list[Finding]:
    """Return all findings in ``files`` (relative to ``root``), in order of place."""
    findings: list[Finding] = []
    folders: set[Path] = set()
    for path in files:
        folders.update(folder for folder in path.parents if folder.name)
        if path.suffix not in TEXT_SUFFIXES or not (root / path).is_file():
            continue
        text = (root / path).read_text(encoding="utf-8")
        findings += check_text(path, text)
        if path.suffix == ".py":
            findings += check_python(path, text)
    for folder in folders:
        findings += check_folder(folder)
    return sorted(findings, key=lambda finding: (str(finding.path), finding.line, finding.message))


def project_files(root: Path) -> list[Path]:
    """Files git knows or would add, relative to ``root``."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in listing.split("\0") if name]


def main(arguments: list[str]) -> int:
    """Check the tree and print what was found."""
    root = Path(arguments[0]) if arguments else Path.cwd()
    findings = check_tree(root, project_files(root))
    for finding in findings:
        print(finding)
    print(f"{len(findings)} style findings" if findings else "style: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
