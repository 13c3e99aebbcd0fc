"""Any forest, window and head grouping: the flash impl equals the reference, and a mask equals its definition."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sinkflex.attention import SequenceLayout, sink_attention, visible


@st.composite
def forests(draw: Any) -> tuple[list[int], list[int]]:
    """Lengths and parents of up to eight nodes."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    return lengths, [draw(st.integers(-1, i - 1)) for i in range(len(lengths))]


windows = st.one_of(st.none(), st.integers(1, 60))
relaxed = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _flash(*args: Any, **options: Any) -> Any:
    return sink_attention(*args, **options, impl="flash", return_lse=True)


@relaxed
@given(forest=forests(), window=windows, num_sink_tokens=st.integers(0, 30), group=st.integers(1, 3))
def test_flash_and_varlen_equal_reference(
    lab: Any, forest: tuple[list[int], list[int]], window: int | None, num_sink_tokens: int, group: int
) -> None:
    case = lab.case(SequenceLayout.from_prefix_tree(*forest), heads=(2 * group, 2), dim=4)
    options = {"window": window, "num_sink_tokens": num_sink_tokens}
    expected = lab.reference(case, **options)
    lab.assert_close(lab.results(_flash, case, **options), expected, 1e-12)
    lab.assert_close(lab.results(lab.run_varlen, case, **options), expected, 1e-12)


@relaxed
@given(forest=forests(), window=windows, num_sink_tokens=st.integers(0, 30))
def test_visibility_by_walking_up(
    forest: tuple[list[int], list[int]], window: int | None, num_sink_tokens: int
) -> None:
    lengths, parents = forest
    layout = SequenceLayout.from_prefix_tree(lengths, parents)
    got = visible(layout, window=window, num_sink_tokens=num_sink_tokens)[0]
    paths: list[list[int]] = []
    column = 0
    for length, parent in zip(lengths, parents, strict=True):
        above = paths[parent] if parent >= 0 else []
        own = list(range(column, column + length))
        for place, query in enumerate(own, start=len(above)):
            path = (above + own)[: place + 1]
            expected = {
                key
                for position, key in enumerate(path)
                if window is None or place - position < window or position < num_sink_tokens
            }
            assert set(got[query].nonzero().flatten().tolist()) == expected
            assert int(layout.q_position[0, query]) == place
        paths.append(above + own)
        column += length


@relaxed
@given(forest=forests(), window=windows)
def test_a_packed_tree_equals_separate_rows(lab: Any, forest: tuple[list[int], list[int]], window: int | None) -> None:
    """Each leaf's path, run alone, gives the outputs that its tokens have in the tree."""
    lengths, parents = forest
    layout = SequenceLayout.from_prefix_tree(lengths, parents)
    case = lab.case(layout, heads=(2, 1), dim=4)
    inputs = (case.query, case.key, case.value)
    packed = sink_attention(*inputs, case.sink_logits, layout=layout, window=window)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for node in set(range(len(lengths))) - set(parents):
        columns: list[int] = []
        above = node
        while above >= 0:
            columns = [*range(starts[above], starts[above] + lengths[above]), *columns]
            above = parents[above]
        alone = sink_attention(*(x[:, :, columns] for x in inputs), case.sink_logits, window=window)
        assert (packed[:, :, columns] - alone).abs().max() < 1e-12
