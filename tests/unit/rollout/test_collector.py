"""The agent loop and its groups: exact transcripts, budgets, order independence, pooling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sinkflex.errors import ModelError, RolloutError
from sinkflex.rollout import EpisodeLimits, FailurePolicy, GroupSpec
from sinkflex.types import Role, StopReason

PAIR = [
    GroupSpec(task_id="a", split="train", group_seed=7, size=3),
    GroupSpec(task_id="b", split="train", group_seed=8, size=2),
]


def test_groups_come_back_in_order_with_their_members(make_bench: Callable[..., Any]) -> None:
    groups = make_bench().collector.run(PAIR, seed=1)
    assert [group.group_id for group in groups] == ["train/a/7", "train/b/8"]
    assert [len(group.trajectories) for group in groups] == [3, 2]
    assert [t.episode_id for t in groups[0].trajectories] == ["train/a/7/0", "train/a/7/1", "train/a/7/2"]
    assert all(not group.failures for group in groups)


def test_the_transcript_is_prompt_then_action_and_observation_in_turns(
    make_bench: Callable[..., Any], renderer: Any
) -> None:
    bench = make_bench()
    trajectory = bench.collector.run(PAIR[:1], seed=1)[0].trajectories[0]
    assert [kind for kind, _ in trajectory.ledger.segments()] == [
        "prompt",
        "sampled",
        "observation",
        "sampled",
        "observation",
        "sampled",
    ]
    # Each prompt the client saw is a prefix of the final ledger: nothing was rendered twice.
    prompts = bench.client.prompts[trajectory.episode_id]
    assert len(prompts) == trajectory.turns == 3
    for prompt in prompts:
        assert trajectory.ledger.ids[: len(prompt)] == prompt
        assert trajectory.ledger.loss_mask[len(prompt)]
    roles = [message.role for message in trajectory.messages]
    assert roles == [Role.SYSTEM, Role.USER] + [Role.ASSISTANT, Role.USER] * 3
    said = renderer.action_text(trajectory.ledger.ids[trajectory.ledger.segments()[1][1]])
    assert trajectory.messages[2].content == said.strip()


def test_reward_score_and_metrics_are_the_environments(make_bench: Callable[..., Any]) -> None:
    trajectories = make_bench().collector.run([PAIR[0]], seed=2)[0].trajectories
    for trajectory in trajectories:
        assert trajectory.reward == trajectory.score == trajectory.components["world"]
        assert trajectory.components["payment"] is None
        assert trajectory.metrics == {"steps": 3.0}
        assert trajectory.stop_reason is StopReason.USER_STOP
        assert (trajectory.tier, trajectory.split, trajectory.sampling_seed) == ("easy", "train", 2)
        assert set(trajectory.timing) == {"env_s", "generate_s"}


def test_members_share_the_start_state_and_differ_in_noise(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    group = bench.collector.run([PAIR[0]], seed=1)[0]
    lengths = {t.ledger.prompt_length for t in group.trajectories}
    assert len(lengths) == 1
    assert len({t.ledger.ids[: lengths.copy().pop()] for t in group.trajectories}) == 1
    assert len({t.ledger.ids for t in group.trajectories}) == 3
    options = [reset for env in bench.envs for reset in env.resets]
    assert all(o == {"seed": 7, "task_id": "a", "split": "train", "group_seed": 7} for o in options)


def test_tools_enter_the_prompt_on_request_only(make_bench: Callable[..., Any]) -> None:
    with_tools = make_bench().collector.run([PAIR[1]], seed=1)[0].trajectories[0]
    without = make_bench(with_tools=False).collector.run([PAIR[1]], seed=1)[0].trajectories[0]
    assert with_tools.ledger.prompt_length - without.ledger.prompt_length == len("look")


@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_results_depend_on_neither_timing_nor_concurrency_nor_order(make_bench: Callable[..., Any], mode: str) -> None:
    expected = make_bench().collector.run(PAIR, seed=3)
    for concurrent in (1, 2, 64):
        bench = make_bench(jitter_s=0.005, env_mode=mode, max_concurrent=concurrent)
        assert bench.collector.run(PAIR, seed=3) == expected
        assert len(bench.envs) <= concurrent
    assert make_bench().collector.run(PAIR[::-1], seed=3) == expected[::-1]
    assert make_bench().collector.run(PAIR, seed=4) != expected


def test_threads_overlap_waiting_environments(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(jitter_s=0.01, env_mode="threads")
    bench.collector.run([GroupSpec(task_id="a", split="train", group_seed=1, size=8)], seed=0)
    assert len(bench.envs) == 8


def test_environments_are_reused_and_closed(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_concurrent=2)
    bench.collector.run(PAIR, seed=1)
    bench.collector.run(PAIR, seed=2)
    assert len(bench.envs) == 2
    bench.collector.close()
    assert [env.closed for env in bench.envs] == [1, 1]


def test_every_request_is_released(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.collector.run(PAIR, seed=1)
    assert sorted(bench.client.released) == sorted(f"{group.group_id}/{i}" for group in PAIR for i in range(group.size))


def test_sampling_settings_reach_the_client_and_the_record(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    trajectory = bench.collector.run(PAIR[:1], seed=9, temperature=0.0, top_p=0.9)[0].trajectories[0]
    assert (trajectory.temperature, trajectory.top_p) == (0.0, 0.9)
    asked = bench.client.sampling[0]
    assert (asked.temperature, asked.top_p, asked.seed, asked.stop_ids) == (0.0, 0.9, 9, frozenset({2}))


def test_malformed_actions_reach_the_environment_and_are_counted(make_bench: Callable[..., Any]) -> None:
    # A turn of one token is the stop id alone: no text, which the environment calls invalid.
    bench = make_bench(turn_length=1)
    trajectory = bench.collector.run(PAIR[:1], seed=1)[0].trajectories[0]
    assert trajectory.invalid_actions == trajectory.turns == 3
    assert trajectory.messages[2].content == ""


def test_an_action_cut_by_its_token_budget_is_closed_by_the_observation(
    make_bench: Callable[..., Any], renderer: Any
) -> None:
    bench = make_bench(turn_length=6, max_new_tokens=3)
    ledger = bench.collector.run(PAIR[:1], seed=1)[0].trajectories[0].ledger
    kinds = ledger.segments()
    sampled, observed = ledger.ids[kinds[1][1]], ledger.ids[kinds[2][1]]
    assert len(sampled) == 3
    assert 2 not in sampled
    assert observed[0] == 2


def test_context_overflow_in_an_observation_truncates(make_bench: Callable[..., Any]) -> None:
    whole = make_bench().collector.run(PAIR[:1], seed=1)[0].trajectories[0].ledger
    end_of_first_action = whole.segments()[1][1].stop
    bench = make_bench(max_length=end_of_first_action + 3)
    trajectory = bench.collector.run(PAIR[:1], seed=1)[0].trajectories[0]
    assert trajectory.stop_reason is StopReason.CONTEXT_LENGTH
    assert trajectory.truncated
    assert trajectory.ledger.ids == whole.ids[:end_of_first_action]
    assert (trajectory.reward, trajectory.score, trajectory.turns) == (0.0, 0.0, 1)


def test_context_overflow_in_an_action_truncates_and_skips_the_environment(make_bench: Callable[..., Any]) -> None:
    whole = make_bench(turn_length=6).collector.run(PAIR[:1], seed=1)[0].trajectories[0].ledger
    start = whole.segments()[3][1].start
    bench = make_bench(turn_length=6, max_length=start + 2)
    trajectory = bench.collector.run(PAIR[:1], seed=1)[0].trajectories[0]
    assert trajectory.stop_reason is StopReason.CONTEXT_LENGTH
    assert trajectory.ledger.ids == whole.ids[: start + 2]
    assert trajectory.turns == 2
    assert bench.envs[0].turn == 1


def test_an_action_that_just_fits_still_counts(make_bench: Callable[..., Any]) -> None:
    whole = make_bench().collector.run(PAIR[:1], seed=1)[0].trajectories[0]
    exact = make_bench(max_length=len(whole.ledger)).collector.run(PAIR[:1], seed=1)[0].trajectories[0]
    assert exact == whole


def test_a_failing_model_ends_the_collection(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(failures=FailurePolicy(retries=3, max_share=1.0))
    bench.client.error = ModelError("NaN logits")
    with pytest.raises(ModelError, match="NaN logits"):
        bench.collector.run(PAIR, seed=1)
    assert all(env.closed == 1 for env in bench.envs)
    bench.client.error = None
    assert len(bench.collector.run(PAIR, seed=1)[0].trajectories) == 3


def test_collect_runs_inside_an_event_loop(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    assert asyncio.run(bench.collector.collect(PAIR, seed=1)) == make_bench().collector.run(PAIR, seed=1)


def test_nothing_asked_nothing_given(make_bench: Callable[..., Any]) -> None:
    assert make_bench().collector.run([], seed=1) == []


def test_a_prompt_without_room_is_refused_by_name(make_bench: Callable[..., Any]) -> None:
    with pytest.raises(
        RolloutError, match=r"EnvError: task 'a': its prompt of \d+ tokens leaves no room in max_length=10"
    ):
        make_bench(max_length=10).collector.run(PAIR[:1], seed=1)


@pytest.mark.parametrize(
    ("groups", "settings", "match"),
    [
        ([PAIR[0], PAIR[0]], {}, "group 'train/a/7' is asked for 2 times"),
        ([GroupSpec(task_id="a", split="train", group_seed=1, size=0)], {}, "has size 0; expected at least 1"),
        (PAIR, {"temperature": -1.0}, "temperature must be finite and >= 0"),
        (PAIR, {"top_p": 2.0}, "top_p must lie in"),
    ],
)
def test_bad_requests(make_bench: Callable[..., Any], groups: Any, settings: Any, match: str) -> None:
    with pytest.raises(RolloutError, match=match):
        make_bench().collector.run(groups, seed=1, **settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_concurrent": 0}, "max_concurrent must be at least 1, got 0"),
        ({"env_mode": "processes"}, "unknown env_mode 'processes'; choose one of inline, threads"),
    ],
)
def test_bad_settings(make_bench: Callable[..., Any], settings: Any, match: str) -> None:
    with pytest.raises(RolloutError, match=match):
        make_bench(**settings)


@pytest.mark.parametrize("name", ["max_length", "max_new_tokens", "step_timeout_s"])
def test_limits_are_positive(name: str) -> None:
    given: dict[str, Any] = {"max_length": 8, "max_new_tokens": 4, "step_timeout_s": 1.0}
    zero = type(given[name])(0)
    with pytest.raises(RolloutError, match=f"{name} must be positive, got 0"):
        EpisodeLimits(**(given | {name: zero}))


@pytest.mark.parametrize("given", [{"retries": -1}, {"max_share": 1.5}, {"max_share": -0.1}])
def test_failure_policy_ranges(given: dict[str, Any]) -> None:
    with pytest.raises(RolloutError, match=r"retries must be >= 0 and max_share lie in \[0, 1\]"):
        FailurePolicy(**given)
