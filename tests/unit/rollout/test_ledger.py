"""The ledger only grows, says who wrote each token, and survives a record round trip."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkflex.errors import RolloutError
from sinkflex.rollout import TokenLedger

IDS = st.lists(st.integers(0, 50_000), min_size=1, max_size=6)
SAMPLED = st.lists(st.tuples(st.integers(0, 50_000), st.floats(-40.0, 0.0)), min_size=1, max_size=6)
EPISODES = st.tuples(IDS, st.lists(st.tuples(SAMPLED, IDS), max_size=5), st.none() | SAMPLED)


def ledger_of(prompt: list[int], exchanges: list, last: list | None) -> TokenLedger:
    ledger = TokenLedger()
    ledger.append_prompt(prompt)
    for sampled, observed in exchanges:
        ledger.append_sampled(*zip(*sampled, strict=True))
        ledger.append_observation(observed)
    if last:
        ledger.append_sampled(*zip(*last, strict=True))
    return ledger


def example() -> TokenLedger:
    return ledger_of([7, 8], [([(3, -1.2), (1, -0.1)], [9])], [(4, -0.7)])


def test_fields_of_the_docstring_example() -> None:
    ledger = example()
    assert ledger.ids == (7, 8, 3, 1, 9, 4)
    assert ledger.loss_mask == (False, False, True, True, False, True)
    assert ledger.logprobs == (0.0, 0.0, -1.2, -0.1, 0.0, -0.7)
    assert ledger.turn_ids == (0, 0, 1, 1, 1, 2)
    assert (len(ledger), ledger.num_sampled, ledger.turns, ledger.prompt_length) == (6, 3, 2, 2)
    assert ledger.segments() == [
        ("prompt", slice(0, 2)),
        ("sampled", slice(2, 4)),
        ("observation", slice(4, 5)),
        ("sampled", slice(5, 6)),
    ]
    assert repr(ledger) == "TokenLedger(tokens=6, sampled=3, turns=2)"


@given(EPISODES)
def test_appending_never_changes_what_is_there(episode: tuple) -> None:
    prompt, exchanges, last = episode
    ledger = TokenLedger()
    ledger.append_prompt(prompt)
    steps = [segment for exchange in exchanges for segment in exchange] + ([last] if last else [])
    for index, step in enumerate(steps):
        before = ledger.to_record()
        if index % 2 == 0:
            ledger.append_sampled(*zip(*step, strict=True))
            added = [token for token, _ in step]
        else:
            ledger.append_observation(step)
            added = step
        after = ledger.to_record()
        assert after["ids"] == before["ids"] + added
        for name, values in before.items():
            assert after[name][: len(values)] == values
    assert all(value == 0.0 for value, on in zip(ledger.logprobs, ledger.loss_mask, strict=True) if not on)


@given(EPISODES)
def test_record_round_trip_through_json(episode: tuple) -> None:
    ledger = ledger_of(*episode)
    restored = TokenLedger.from_record(json.loads(json.dumps(ledger.to_record())))
    assert restored == ledger
    assert restored.segments() == ledger.segments()


def test_views_are_immutable_and_detached() -> None:
    ledger = example()
    ids = ledger.ids
    assert isinstance(ids, tuple)
    ledger.append_observation([5])
    assert ids == (7, 8, 3, 1, 9, 4)


def test_ledger_is_no_key_and_equals_only_ledgers() -> None:
    assert example() != "ledger"
    assert example() != TokenLedger()
    with pytest.raises(TypeError, match="unhashable"):
        hash(example())


@pytest.mark.parametrize(
    ("calls", "match"),
    [
        ([("append_sampled", [1], [-1.0])], "append_sampled after an empty ledger: expected append_prompt"),
        ([("append_observation", [1])], "append_observation after an empty ledger: expected append_prompt"),
        ([("append_prompt", [1]), ("append_prompt", [1])], "append_prompt after a prompt segment"),
        ([("append_prompt", [1]), ("append_observation", [1])], "append_observation after a prompt segment"),
        (
            [("append_prompt", [1]), ("append_sampled", [1], [-1.0]), ("append_sampled", [1], [-1.0])],
            "append_sampled after a sampled segment: expected append_observation",
        ),
        ([("append_prompt", [])], "append_prompt: ids is empty"),
        ([("append_prompt", [3, -1])], "token ids must be >= 0, got -1"),
        ([("append_prompt", [1]), ("append_sampled", [1, 2], [-1.0])], "2 ids but 1 logprobs"),
        (
            [("append_prompt", [1]), ("append_sampled", [1, 2], [-1.0, float("nan")])],
            r"logprob nan of sampled token 1 \(id 2, ledger position 2\)",
        ),
        ([("append_prompt", [1]), ("append_sampled", [1], [0.5])], "must be finite and <= 0"),
        ([("append_prompt", [1]), ("append_sampled", [1], [float("-inf")])], "must be finite"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(calls: list, match: str) -> None:
    ledger = TokenLedger()
    for name, *arguments in calls[:-1]:
        getattr(ledger, name)(*arguments)
    before = ledger.to_record()
    name, *arguments = calls[-1]
    with pytest.raises(RolloutError, match=match):
        getattr(ledger, name)(*arguments)
    assert ledger.to_record() == before


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ids": None}, "ledger record lacks ids"),
        ({"ids": [7, 8]}, "2 ids, 6 loss_mask"),
        ({"turn_ids": [0, 0, 1, 1, 2, 2]}, "contradicts itself"),
        ({"logprobs": [-1.0, 0.0, -1.2, -0.1, 0.0, -0.7]}, "contradicts itself"),
        ({"loss_mask": [1, 0, 1, 1, 0, 1]}, "append_sampled after an empty ledger"),
    ],
)
def test_damaged_records_are_refused(change: dict, match: str) -> None:
    record = {**example().to_record(), **change}
    record = {name: value for name, value in record.items() if value is not None}
    with pytest.raises(RolloutError, match=match):
        TokenLedger.from_record(record)
