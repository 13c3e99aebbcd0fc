from __future__ import annotations

import numpy as np
import pytest
import torch

from sinkflex.attention import SequenceLayout
from sinkflex.attention.forest import Node
from sinkflex.errors import AttentionError


def test_causal() -> None:
    layout = SequenceLayout.causal(2, 3)
    assert layout.position.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert layout.enter.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert layout.exit.tolist() == [[1, 1, 1], [2, 2, 2]]
    assert layout.q_position is layout.position
    assert layout.longest_path == 3


def test_queries_are_the_last_columns() -> None:
    layout = SequenceLayout.causal(1, 5, num_queries=2)
    assert layout.query_start == (3,)
    assert layout.q_position.tolist() == [[3, 4]]
    assert layout.q_enter.tolist() == [[0, 0]]


def test_padding_on_both_sides() -> None:
    layout = SequenceLayout.from_padding(torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]))
    assert layout.position.tolist() == [[0, 0, 1, 0], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert layout.enter.tolist() == [[-1, 0, 0, -1], [1, 1, 1, 1], [-1, -1, -1, -1]]
    assert layout.exit.tolist() == [[-1, 1, 1, -1], [2, 2, 2, 2], [-1, -1, -1, -1]]


def test_a_hole_continues_the_document() -> None:
    layout = SequenceLayout.from_padding(torch.tensor([[True, False, True, True]]))
    assert layout.nodes == (Node(0, 0, 1, 0, -1), Node(0, 2, 2, 1, 0))
    assert layout.position.tolist() == [[0, 0, 1, 2]]


def test_documents_with_padding() -> None:
    layout = SequenceLayout.from_documents([[2, 1], [1]], length=4)
    assert layout.position.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert layout.enter.tolist() == [[0, 0, 1, -1], [2, -1, -1, -1]]
    assert layout.longest_path == 2


def test_documents_equal_position_ids() -> None:
    documents = SequenceLayout.from_documents([[2, 3], [4, 1]])
    positions = SequenceLayout.from_position_ids(torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]))
    assert documents.nodes == positions.nodes


def test_prefix_tree() -> None:
    # 7 prompt tokens, a reply of 2, and a reply of 1 that itself forks into 2 and 1.
    layout = SequenceLayout.from_prefix_tree([7, 2, 1, 2, 1], [-1, 0, 0, 2, 2])
    assert layout.position.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9, 8]]
    assert layout.enter.tolist() == [[0] * 7 + [1] * 2 + [2] + [3] * 2 + [4]]
    assert layout.exit.tolist() == [[5] * 7 + [2] * 2 + [5] + [4] * 2 + [5]]
    assert layout.longest_path == 10


def test_numbers_do_not_depend_on_the_order_of_nodes() -> None:
    layout = SequenceLayout.from_prefix_tree([1, 1, 1, 1, 1], [-1, 0, -1, 0, 1])
    assert layout.enter.tolist() == [[0, 1, 4, 3, 2]]
    assert layout.exit.tolist() == [[4, 3, 5, 4, 3]]


def test_decode() -> None:
    layout = SequenceLayout.decode(torch.tensor([2, 4]), 5)
    assert layout.query_start == (1, 3)
    assert layout.q_position.tolist() == [[1], [3]]
    assert layout.enter.tolist() == [[0, 0, -1, -1, -1], [1, 1, 1, 1, -1]]


def test_chunked() -> None:
    layout = SequenceLayout.from_prefix_tree([5, 4], [-1, 0]).chunked(4)
    # Positions 0-3 | 4, then 5-7 joins 4's chunk | 8 alone.
    assert layout.nodes == (
        Node(0, 0, 4, 0, -1),
        Node(0, 4, 1, 4, -1),
        Node(0, 5, 3, 5, 1),
        Node(0, 8, 1, 8, -1),
    )
    assert layout.position.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8]]


def test_to_moves_and_forgets_plans() -> None:
    layout = SequenceLayout.causal(1, 2)
    layout.cached("plan", lambda: 1)
    assert layout.to("cpu") is layout
    moved = layout.to("meta")
    assert moved.position.device.type == "meta"
    assert moved.cached("plan", lambda: 2) == 2


def test_cached_builds_once() -> None:
    built: list[int] = []
    layout = SequenceLayout.causal(1, 2)
    for _ in range(2):
        layout.cached("x", lambda: built.append(1))
    assert built == [1]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SequenceLayout.causal(0, 3), "batch is 0; expected at least 1"),
        (lambda: SequenceLayout.causal(1, 0), "length is 0; expected at least 1"),
        (lambda: SequenceLayout.causal(1, 3, num_queries=4), "num_queries is 4; expected 1 to the number of keys, 3"),
        (lambda: SequenceLayout.from_padding(torch.ones(1, 1, 2, 2, dtype=torch.bool)), r"expected \[batch, keys\]"),
        (lambda: SequenceLayout.from_position_ids(torch.zeros(3, dtype=torch.long)), r"expected \[batch, length\]"),
        (lambda: SequenceLayout.from_documents([3, 0]), r"lengths\[0\]\[1\] is 0; expected at least 1"),
        (lambda: SequenceLayout.from_documents([3, 4], length=6), "holds 7 tokens but length is 6"),
        (lambda: SequenceLayout.from_documents([[3, 4], 5]), r"lengths is \[\[3, 4\], 5\]; expected whole numbers"),
        (lambda: SequenceLayout.from_documents([3, [4, 5]]), r"lengths is \[3, \[4, 5\]\]; expected whole numbers"),
        (lambda: SequenceLayout.from_documents([2.5]), r"lengths is \[2.5\]; expected whole numbers"),
        (lambda: SequenceLayout.from_prefix_tree([[2], [1]], [[-1], -1]), r"parents is \[\[-1\], -1\]; expected whole"),
        (lambda: SequenceLayout.from_prefix_tree([1, 1], [-1]), "one parent per entry of lengths"),
        (lambda: SequenceLayout.from_prefix_tree([1, 1], [1, -1]), r"parents\[0\]\[0\] is 1; expected -1"),
        (lambda: SequenceLayout.decode([1, 4], 3), "between num_queries=1 and num_keys=3"),
        (lambda: SequenceLayout.decode([2], 3, num_queries=0), "num_queries is 0; expected at least 1"),
        (lambda: SequenceLayout.causal(1, 3).chunked(0), "chunk is 0; expected at least 1"),
    ],
)
def test_refusals(build: object, message: str) -> None:
    with pytest.raises(AttentionError, match=message):
        build()  # type: ignore[operator]


def test_lengths_may_be_arrays() -> None:
    rows = [torch.tensor([2, 1]), torch.tensor([3])]
    assert SequenceLayout.from_documents(rows).nodes == SequenceLayout.from_documents([[2, 1], [3]]).nodes
    assert SequenceLayout.from_documents(np.array([2, 1])).nodes == SequenceLayout.from_documents([2, 1]).nodes


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors made on "cuda" say "cuda:0", and layouts are compared with them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    layout = SequenceLayout.causal(1, 2, device="cuda")
    assert layout.device == torch.device("cuda:1")
    assert layout.to("cuda") is layout
    assert SequenceLayout.causal(1, 2, device="cuda:0").device == torch.device("cuda:0")
