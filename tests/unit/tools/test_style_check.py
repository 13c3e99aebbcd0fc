"""The style check finds each rule's breach at its place, and passes what is fine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def style():
    spec = importlib.util.spec_from_file_location("check_style", ROOT / "tools" / "check_style.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_style"] = module
    spec.loader.exec_module(module)
    return module


def found(style, tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return [str(finding) for finding in style.check_tree(tmp_path, [Path(name)])]


def function(length, *, name="work", parameters="x"):
    return f"def {name}({parameters}):\n" + "    x\n" * (length - 1)


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("src/a.py", "x = 1\n" * 400, "src/a.py:1: 401 lines, at most 400; split it by topic"),
        ("src/a.py", "x = 1\nif x:\ny = 2\n", "src/a.py:3: does not parse: expected an indented block"),
        ("src/utils.py", "", "src/utils.py:1: utils.py says nothing; name it after what it holds"),
        ("src/common/a.py", "", "src/common:1: this folder's name says nothing; name it after what it holds"),
        ("src/a.py", "\n" + function(61), "src/a.py:2: work has 61 lines, at most 60; split it"),
        ("src/a.py", function(2, parameters="a, /, b, c, d, e, *, f, g, h, i"), "src/a.py:1: work has 9 parameters"),
        ("src/a.py", "class A:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ...\n", "__init__ has 9 parameters"),
        ("docs/a.md", "see https://pypi" + ".org/x", "docs/a.md:1: names a package registry's host"),
        ("Makefile", "\n\ncp /wo" + "rk/x .", "Makefile:3: names a path of one machine"),
        ("a.toml", "x = '/ro" + "ot/.cache'", "a.toml:1: names a path of one machine"),
        ("tests/test_a.py", "@pytest.mark" + ".skip\ndef test_a(): ...\n", "tests/test_a.py:1: an unconditional skip"),
    ],
)
def test_each_breach_is_found(style, tmp_path, name, text, finding):
    findings = found(style, tmp_path, name, text)
    assert len(findings) == 1
    assert finding in findings[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("src/a.py", "x = 1\n" * 399),
        ("src/a.py", function(60)),
        ("src/a.py", function(60).replace(":\n", ':\n    """Long\n    story."""\n', 1)),
        ("src/sinkflex/attention/api.py", function(2, name="sink_attention", parameters="a, b, c, d, e, f, g, h, i")),
        ("src/a.py", function(2, parameters="self, a, b, c, d, e, f, g, h")),
        ("src/a.py", function(2, name="_inner", parameters="a, b, c, d, e, f, g, h, i")),
        ("tests/test_a.py", function(80, parameters="a, b, c, d, e, f, g, h, i")),
        ("docs/a.md", "the network/work/ratio, ~/work/x and path/to/root/"),
        ("a.png", "https://pypi" + ".org"),
    ],
)
def test_what_is_fine_passes(style, tmp_path, name, text):
    assert found(style, tmp_path, name, text) == []


def test_the_command_lists_findings_and_fails(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "helpers.py").write_text("")
    command = [sys.executable, str(ROOT / "tools" / "check_style.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (1, "1 style findings")
    (tmp_path / "helpers.py").rename(tmp_path / "layout.py")
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "style: ok\n")
