"""``sinkflex env``: list, check, play and measure environments."""

from __future__ import annotations

import importlib.util
import time
from typing import Annotated, Any

import gymnasium
import typer
from rich.console import Console
from rich.table import Table

from sinkflex.cli.play import Player
from sinkflex.envs import ENV_IDS, TAU2_IDS
from sinkflex.envs.checker import DOMAIN_CHECKS, ENV_CHECKS, check
from sinkflex.envs.checks.play import oracle_policy, play_episode
from sinkflex.envs.registry import get_domain
from sinkflex.envs.world import World
from sinkflex.errors import EnvError, unknown_name

SIDES = ("agent", "user")
_WORLD_RECORDS = 1_000

app = typer.Typer(no_args_is_help=True)

EnvId = Annotated[str, typer.Argument(metavar="ID", help="A registered id, for example sinkflex/Telecom-v0.")]


@app.command("list")
def list_environments() -> None:
    """List the registered environments with their tasks and tools."""
    installed = importlib.util.find_spec("tau2") is not None
    rows = [("id", "tiers", "tasks train/test", "tools agent/user")]
    for env_id, name in ENV_IDS.items():
        domain = get_domain(name)
        counts = "/".join(str(len(domain.task_ids(split))) for split in ("train", "test"))
        tools = f"{len(domain.agent_tools.tools)}/{len(domain.user_tools.tools)}"
        rows.append((env_id, ", ".join(domain.tiers), counts, tools))
    rows += [(env_id, "tau2", "τ²-bench's own" if installed else "needs sinkflex[tau2]", "") for env_id in TAU2_IDS]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command("check")
def check_environment(
    env_id: EnvId,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to play, spread over tiers and splits.")] = 12,
    fuzz: Annotated[int, typer.Option(min=0, help="Nonsensical actions to send.")] = 500,
) -> None:
    """Check that an environment is sound; exit status 1 and the likely causes if it is not."""
    _require(env_id)
    typer.echo(f"up to {len(ENV_CHECKS) + len(DOMAIN_CHECKS)} checks on {tasks} tasks")
    report = check(env_id, tasks=tasks, fuzzed_actions=fuzz)
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)
    typer.echo("sound")


@app.command()
def play(
    env_id: EnvId,
    side: Annotated[str, typer.Option("--as", help="Which side you play: agent or user.")] = "agent",
    task: Annotated[str | None, typer.Option(help="Task id; drawn at random by default.")] = None,
    split: Annotated[str | None, typer.Option(help="Split to draw from; the environment's own by default.")] = None,
    tier: Annotated[str | None, typer.Option(help="Tier to draw from.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seeds the draw and the other side.")] = None,
) -> None:
    """Play a side in the terminal; the oracle or the scripted user plays the other. The score comes at the end."""
    if side not in SIDES:
        raise EnvError(unknown_name("side", side, SIDES))
    _require(env_id)
    asked = {"split": split, "tier": tier, "user": "person" if side == "user" else None}
    kwargs: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    env = gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    options: dict[str, Any] = {} if task is None else {"task_id": task}
    player = Player(env, show=typer.echo)
    if side == "user":
        player.play_user(seed=seed, options=options)
    else:
        player.play_agent(seed=seed, options=options)
    env.close()


@app.command()
def bench(
    env_ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Embedded ones by default.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes an environment.")] = 200,
) -> None:
    """Measure agent steps and episodes a second on one core, and a world's snapshot and restore."""
    table = Table("id", "steps/s", "episodes/s", "steps an episode")
    for env_id in env_ids or list(ENV_IDS):
        _require(env_id)
        steps, seconds = measure_steps(env_id, episodes)
        table.add_row(env_id, f"{steps / seconds:,.0f}", f"{episodes / seconds:,.1f}", f"{steps / episodes:.1f}")
    console = Console()
    console.print(table)
    micros = measure_snapshot() * 1e6
    console.print(f"snapshot, one write and restore at {_WORLD_RECORDS:,} records: {micros:.1f} µs")


def measure_steps(env_id: str, episodes: int) -> tuple[int, float]:
    """Return agent steps taken and the processor seconds they took; what to do is worked out beforehand.

    Args:
        env_id: a registered id.
        episodes: how many to play, spread over the train tasks.
    """
    env = gymnasium.make(env_id, disable_env_checker=True)
    unwrapped: Any = env.unwrapped
    ids = unwrapped.task_ids(unwrapped.split)
    chosen = [ids[number * len(ids) // episodes % len(ids)] for number in range(episodes)]
    scripts = [play_episode(env, task_id, policy=oracle_policy).actions for task_id in chosen]
    started = time.process_time()
    for task_id, actions in zip(chosen, scripts, strict=True):
        env.reset(options={"task_id": task_id, "group_seed": 0})
        for action in actions:
            env.step(action)
    seconds = time.process_time() - started
    env.close()
    return sum(map(len, scripts)), seconds


def measure_snapshot() -> float:
    """Return the median seconds of a snapshot, one write and a restore in a world of ``_WORLD_RECORDS`` records."""
    world = World({"rows": {str(key): {"value": key} for key in range(_WORLD_RECORDS)}})
    timings = []
    for key in range(_WORLD_RECORDS):
        started = time.perf_counter()
        mark = world.snapshot()
        world.update("rows", str(key), value=-1)
        world.restore(mark)
        timings.append(time.perf_counter() - started)
    return sorted(timings)[len(timings) // 2]


def _require(env_id: str) -> None:
    """Refuse an id that Gymnasium does not know; ``module:ID`` is left to Gymnasium, which imports the module."""
    if ":" not in env_id and env_id not in gymnasium.registry:
        ours = [name for name in gymnasium.registry if name.startswith("sinkflex/")]
        raise EnvError(unknown_name("environment", env_id, ours) + " An own one is given as module:ID.")
