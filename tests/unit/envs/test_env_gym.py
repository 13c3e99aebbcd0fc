from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from sinkflex.envs import ENV_IDS, DualControlEnv
from sinkflex.envs.registry import get_domain, get_user_factory
from sinkflex.envs.spaces import UnicodeText
from sinkflex.errors import EnvError, TaskError
from sinkflex.types import Message, Role, ToolSchema

Play = Callable[..., tuple[float, int, dict[str, Any]]]


@pytest.mark.parametrize("env_id", sorted(ENV_IDS))
def test_gymnasiums_own_checker_is_silent(env_id: str) -> None:
    env = gymnasium.make(env_id)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)


def test_reset_info_follows_the_contract() -> None:
    env = gymnasium.make("sinkflex/Mock-v0")
    observation, info = env.reset(options={"task_id": "mock-both", "group_seed": 3})
    assert set(info) == {"task_id", "split", "tier", "system", "tools", "messages"}
    assert (info["task_id"], info["split"], info["tier"]) == ("mock-both", "train", "easy")
    assert [type(schema) for schema in info["tools"]] == [ToolSchema, ToolSchema]
    assert info["messages"][0].role is Role.USER
    assert info["system"] in observation
    assert "- read_mains(): Read whether the mains are on." in observation
    assert observation.endswith(f"user: {info['messages'][0].content}")
    again = env.reset(options={"task_id": "mock-both", "group_seed": 3})[1]
    assert again == info
    assert again["tools"][0].parameters is not info["tools"][0].parameters


def test_step_info_follows_the_contract() -> None:
    env = gymnasium.make("sinkflex/Mock-v0")
    env.reset(options={"task_id": "mock-switch"})
    observation, reward, terminated, truncated, info = env.step('{"name":"read_mains","arguments":{}}')
    assert (observation, reward, terminated, truncated) == ('tool read_mains: {"mains":true}', 0.0, False, False)
    assert info == {
        "messages": (Message(role=Role.TOOL, content='{"mains":true}', name="read_mains"),),
        "invalid_action": None,
        "stop_reason": None,
    }
    env.step("Please turn the switch on.")
    observation, reward, terminated, truncated, info = env.step("Look at the lamp.")
    assert (reward, terminated, truncated, info["stop_reason"]) == (1.0, True, False, "user_stop")
    assert set(info) - {"messages", "invalid_action", "stop_reason"} == {"score", "components", "metrics", "breaches"}


def test_malformed_text_is_answered_with_the_reason_and_truncates_in_the_end() -> None:
    env = gymnasium.make("sinkflex/Mock-v0", max_invalid_actions=2)
    env.reset(options={"task_id": "mock-both"})
    observation, _, _, _, info = env.step('{"name": "read_mains", ')
    assert info["invalid_action"] is not None
    assert info["invalid_action"] in observation
    _, reward, terminated, truncated, info = env.step("")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["stop_reason"] == "max_invalid_actions"


def test_equal_group_seeds_behave_equally_and_others_paraphrase() -> None:
    env = gymnasium.make("sinkflex/Telecom-v0")

    def opening(seed: int | None) -> str:
        options = {"task_id": "telecom-easy-train-0003", "group_seed": seed}
        return str(env.reset(options=options)[1]["messages"][0].content)

    assert {opening(5) for _ in range(3)} == {opening(5)}
    assert len({opening(seed) for seed in range(20)}) > 1


def test_a_seeded_reset_draws_the_same_tasks() -> None:
    env = gymnasium.make("sinkflex/Telecom-v0", split="test", tier="medium")
    draws = []
    for _ in range(2):
        first = env.reset(seed=11)[1]["task_id"]
        draws.append((first, *[env.reset()[1]["task_id"] for _ in range(5)]))
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 1
    assert all(name.startswith("telecom-medium-test-") for name in draws[0])
    assert env.reset(options={"split": "train", "tier": "long"})[1]["task_id"].startswith("telecom-long-train-")


def test_a_pickled_environment_comes_back_as_newly_made(play_oracle: Play) -> None:
    env = DualControlEnv(domain="telecom", split="test", tier="easy", max_steps=7)
    env.reset(options={"task_id": "telecom-easy-train-0003", "group_seed": 1})
    twin: DualControlEnv = pickle.loads(pickle.dumps(env))
    with pytest.raises(EnvError, match="no episode is running"):
        twin.oracle_message()
    assert twin.options == env.options
    assert twin.reset(seed=4)[0] == env.reset(seed=4)[0]
    assert pickle.loads(pickle.dumps(gymnasium.spec("sinkflex/Telecom-v0"))) == gymnasium.spec("sinkflex/Telecom-v0")


def test_rendering(capsys: pytest.CaptureFixture[str], play_oracle: Play) -> None:
    env = gymnasium.make("sinkflex/Mock-v0", render_mode="ansi")
    play_oracle(env, "mock-both")
    text = env.render()
    assert isinstance(text, str)
    assert "    [user's device] user calls flip_switch()" in text
    assert text.endswith("== user_stop: score 1 (mains=1 seen=1 policy=1 ended=1)")
    human = gymnasium.make("sinkflex/Mock-v0", render_mode="human")
    play_oracle(human, "mock-both")
    assert capsys.readouterr().out == text + "\n"
    assert human.render() is None


def make_vector(kind: str, **options: Any) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    thunks = [lambda: gymnasium.make("sinkflex/Mock-v0", disable_env_checker=True) for _ in range(2)]
    if kind == "sync":
        return gymnasium.vector.SyncVectorEnv(thunks)
    return gymnasium.vector.AsyncVectorEnv(thunks, **options)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_vector_environments_agree_with_single_ones(kind: str) -> None:
    vector = make_vector(kind, **({"shared_memory": False} if kind == "async" else {}))
    try:
        vector.reset(seed=[1, 2], options={"task_id": "mock-switch", "group_seed": 0})
        observations, rewards, *_ = vector.step(("Please turn the switch on.", '{"name":"read_mains","arguments":{}}'))
        assert tuple(observations) == ("user: ok, it is on", 'tool read_mains: {"mains":true}')
        assert list(rewards) == [0.0, 0.0]
        _, rewards, terminations, *_ = vector.step(("Look at it. Does it shine?", "mumble 🙂"))
        assert list(rewards) == [1.0, 0.0]
        assert list(terminations) == [True, False]
    finally:
        vector.close()


def test_shared_memory_is_refused_with_the_remedy() -> None:
    with pytest.raises(EnvError, match="pass shared_memory=False to AsyncVectorEnv"):
        make_vector("async")


def test_wrong_arguments_name_the_nearest() -> None:
    env = gymnasium.make("sinkflex/Mock-v0")
    with pytest.raises(EnvError, match="no episode is running; call reset first"):
        env.unwrapped.oracle_message()
    with pytest.raises(EnvError, match=r"unknown reset option 'task'.*Did you mean 'task_id'"):
        env.reset(options={"task": "mock-both"})
    with pytest.raises(TaskError, match=r"unknown mock task 'mock-bth'.*Did you mean 'mock-both'"):
        env.reset(options={"task_id": "mock-bth"})
    with pytest.raises(TaskError, match=r"unknown mock split 'tets'.*Did you mean 'test'"):
        env.reset(options={"split": "tets"})
    with pytest.raises(TaskError, match=r"unknown mock tier 'esay'.*Did you mean 'easy'"):
        DualControlEnv(domain="mock", tier="esay")
    with pytest.raises(TaskError, match="mock has no tasks for"):
        DualControlEnv(domain=_EmptyMock()).reset()
    for name, bad in (("prompt", "breif"), ("action_format", "jsn"), ("render_mode", "ansy")):
        with pytest.raises(EnvError, match=f"unknown {name} '{bad}'"):
            DualControlEnv(domain="mock", **{name: bad})
    with pytest.raises(EnvError, match="budgets must be at least 1"):
        DualControlEnv(domain="mock", max_steps=0)
    with pytest.raises(EnvError, match=r"unknown environment option 'max_step'.*Did you mean 'max_steps'"):
        DualControlEnv(domain="mock", max_step=3)
    env.reset()
    with pytest.raises(EnvError, match="an action is text, got int"):
        env.unwrapped.step(3)  # type: ignore[arg-type]


class _EmptyMock(type(get_domain("mock"))):  # type: ignore[misc]
    def tier_task_ids(self, split: str, tier: str) -> tuple[str, ...]:
        return ()


def test_registry_errors() -> None:
    with pytest.raises(EnvError, match=r"unknown domain 'telecm'.*Did you mean 'telecom'.*module:Class"):
        get_domain("telecm")
    with pytest.raises(EnvError, match="domain 'nowhere:Thing' cannot be imported"):
        get_domain("nowhere:Thing")
    with pytest.raises(EnvError, match=r"not a subclass of sinkflex.envs.Domain"):
        get_domain("json:JSONDecoder")
    with pytest.raises(EnvError, match=r"unknown user 'script'.*Did you mean 'scripted'"):
        get_user_factory("script", {})
    with pytest.raises(EnvError, match=r"user 'scripted' does not take options \['mood'\]"):
        get_user_factory("scripted", {"mood": 1})


def test_the_text_space_holds_any_encodable_text() -> None:
    space = UnicodeText(12, seed=3)
    assert space.contains("naïve 🙂 中文")
    assert space.contains("")
    assert not space.contains("x" * 13)
    assert not space.contains("\ud800")
    assert not space.contains(b"x")
    samples = [space.sample() for _ in range(200)]
    assert all(space.contains(sample) for sample in samples)
    assert len(set(samples)) > 190
    twin = UnicodeText(12, seed=3)
    assert [twin.sample() for _ in range(200)] == samples
    assert twin == space
    assert hash(twin) == hash(space)
    assert UnicodeText(13) != space
    assert repr(space) == "UnicodeText(12)"
    assert not space.is_np_flattenable
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples)))) == samples
    with pytest.raises(EnvError, match="max_length must be at least 1, got 0"):
        UnicodeText(0)
    with pytest.raises(EnvError, match="takes neither mask nor probability"):
        space.sample(mask=1)  # type: ignore[arg-type]
