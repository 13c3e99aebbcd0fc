"""The tree against its definition: each sequence is a path, and what a token sees is its own past and nothing else."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkflex.attention import SequenceLayout
from sinkflex.rollout import prefix_tree
from sinkflex.rollout.prefix_tree import PrefixTree, SortedSequences, build_tree, lay_side_by_side

EXAMPLE = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7], [1, 2], [9]]
# with min_saved_tokens=2: each node's tokens and its parent
EXAMPLE_NODES = [([1, 2, 3], -1), ([4, 5], 0), ([4, 6], 0), ([7], 0), ([9], -1)]


def fold(
    sequences: list[list[int]], *, min_saved_tokens: int, module: ModuleType = prefix_tree
) -> tuple[PrefixTree, dict[int, list[int]]]:
    """The tree, and each sequence's columns by its index in the list."""
    arrays = [np.array(sequence, dtype=np.int64) for sequence in sequences]
    ranked = module.SortedSequences.of(arrays, range(len(arrays)))
    tree = module.build_tree(ranked, min_saved_tokens=min_saved_tokens)
    return tree, {index: columns.tolist() for index, columns in zip(ranked.order, tree.columns, strict=True)}


def nodes(tree: PrefixTree) -> list[tuple[list[int], int]]:
    ends = np.cumsum(tree.lengths)
    return [
        (tree.tokens[end - length : end].tolist(), parent)
        for end, length, parent in zip(ends, tree.lengths, tree.parents, strict=True)
    ]


def check(sequences: list[list[int]], *, min_saved_tokens: int, module: ModuleType = prefix_tree) -> None:
    tree, columns = fold(sequences, min_saved_tokens=min_saved_tokens, module=module)
    layout = SequenceLayout.from_prefix_tree([list(tree.lengths)], [list(tree.parents)])
    position, enter, leave = (t[0].numpy() for t in (layout.position, layout.enter, layout.exit))
    for index, sequence in enumerate(sequences):
        own = columns[index]
        assert tree.tokens[own].tolist() == sequence
        for at, column in enumerate(own):
            seen = (enter <= enter[column]) & (enter[column] < leave) & (position <= position[column])
            assert np.flatnonzero(seen).tolist() == sorted(own[: at + 1])
            assert position[column] == at
    covered = {column for own in columns.values() for column in own}
    assert covered == set(range(len(tree.tokens)))


def test_the_example_of_the_docstring() -> None:
    tree, columns = fold(EXAMPLE, min_saved_tokens=2)
    assert nodes(tree) == EXAMPLE_NODES
    assert columns == {
        0: [0, 1, 2, 3, 4],
        1: [0, 1, 2, 5, 6],
        2: [0, 1, 2, 7],
        3: [0, 1],
        4: [8],
    }


def test_saving_every_token_gives_one_node_per_distinct_prefix_run() -> None:
    tree, _ = fold(EXAMPLE, min_saved_tokens=1)
    assert nodes(tree) == [([1, 2, 3], -1), ([4], 0), ([5], 1), ([6], 1), ([7], 0), ([9], -1)]


def test_a_sequence_that_begins_another_needs_no_node() -> None:
    tree, columns = fold([[1, 2, 3], [1], [1, 2]], min_saved_tokens=1)
    assert nodes(tree) == [([1, 2, 3], -1)]
    assert columns == {0: [0, 1, 2], 1: [0], 2: [0, 1]}


def test_equal_sequences_are_one_path() -> None:
    tree, columns = fold([[4, 5]] * 3, min_saved_tokens=64)
    assert nodes(tree) == [([4, 5], -1)]
    assert columns == {0: [0, 1], 1: [0, 1], 2: [0, 1]}


def test_a_branching_that_saves_too_little_is_repeated_in_each_branch() -> None:
    # three continuations of two tokens: sharing them saves (3 - 1) * 2 = 4
    sequences = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert len(fold(sequences, min_saved_tokens=4)[0].tokens) == 5
    assert len(fold(sequences, min_saved_tokens=5)[0].tokens) == 9


def test_large_ids_sort_as_numbers() -> None:
    check([[256, 1], [1, 256], [65536, 0], [255, 255], [1, 255]], min_saved_tokens=1)


def test_side_by_side_shares_nothing() -> None:
    tree = lay_side_by_side([np.array([1, 2]), np.array([1, 2, 3])])
    assert nodes(tree) == [([1, 2], -1), ([1, 2, 3], -1)]
    assert [columns.tolist() for columns in tree.columns] == [[0, 1], [2, 3, 4]]


sequences_of_few_letters = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(sequences=sequences_of_few_letters, min_saved_tokens=st.integers(1, 6))
def test_every_token_sees_its_own_past_only(sequences: list[list[int]], min_saved_tokens: int) -> None:
    check(sequences, min_saved_tokens=min_saved_tokens)


@settings(max_examples=80, deadline=None)
@given(sequences=sequences_of_few_letters)
def test_full_sharing_holds_each_distinct_prefix_once(sequences: list[list[int]]) -> None:
    tree, _ = fold(sequences, min_saved_tokens=1)
    prefixes = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
    assert len(tree.tokens) == len(prefixes)


@settings(max_examples=80, deadline=None)
@given(sequences=sequences_of_few_letters, min_saved_tokens=st.integers(1, 6))
def test_nodes_come_depth_first(sequences: list[list[int]], min_saved_tokens: int) -> None:
    tree, _ = fold(sequences, min_saved_tokens=min_saved_tokens)
    open_path: list[int] = []
    for node, parent in enumerate(tree.parents):
        while open_path and open_path[-1] != parent:
            open_path.pop()
        assert parent == (open_path[-1] if open_path else -1)
        open_path.append(node)


def test_a_part_forgets_what_its_first_sequence_shared_before() -> None:
    arrays = [np.array(sequence) for sequence in EXAMPLE]
    ranked = SortedSequences.of(arrays, range(5))
    assert (ranked.order, ranked.common) == ((3, 0, 1, 2, 4), (0, 2, 4, 3, 0))
    part = ranked.part(1, 4)
    assert (part.order, part.common) == ((0, 1, 2), (0, 4, 3))
    assert len(build_tree(part, min_saved_tokens=1).tokens) == 7


def check_hand_cases(module: ModuleType) -> None:
    assert nodes(fold(EXAMPLE, min_saved_tokens=2, module=module)[0]) == EXAMPLE_NODES
    for case in (
        EXAMPLE,
        [[1, 256], [256, 1], [1, 255], [256, 1, 7], [1, 256, 3]],
        [[1, 2, 3], [1], [1, 2, 4], [1, 2]],
    ):
        for min_saved_tokens in (1, 2, 3):
            check(case, min_saved_tokens=min_saved_tokens, module=module)
        sharing, _ = fold(case, min_saved_tokens=1, module=module)
        assert len(sharing.tokens) == len({tuple(s[: end + 1]) for s in case for end in range(len(s))})


def test_hand_cases() -> None:
    check_hand_cases(prefix_tree)


MUTANTS = {
    "columns of the parent": ("paths[member] = (*branch.path, (used,", "paths[member] = (*branch.path, (0,"),
    "branch from the root": ("parents.append(branch.parent)", "parents.append(-1)"),
    "savings counted per branch": ("(len(live) - 1) < min_saved_tokens", "len(live) < min_saved_tokens"),
    "never repeated": ("(len(live) - 1) < min_saved_tokens", "(len(live) - 1) < 1"),
    "riders lost": ("for member in (*branch.riders, *ended):", "for member in (*ended,):"),
    "order of the list": (
        "sorted(members, key=lambda index: (sequences[index].tobytes(), index))",
        "list(members)",
    ),
}


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_mutants_fail(mutant: str, mutate) -> None:
    module = mutate("sinkflex.rollout.prefix_tree", *MUTANTS[mutant])
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_hand_cases(module)
