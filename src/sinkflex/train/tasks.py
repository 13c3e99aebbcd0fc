"""Which tasks a train step gets: a seeded order without replacement whose position is a plain number."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from sinkflex.errors import TaskError


def derive_seed(*parts: int | str) -> int:
    """Hash the parts to a seed in [0, 2**31): the same parts give the same seed on every machine and run."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


class TaskSampler:
    """Deals tasks in a new seeded order each epoch.

    Its whole state is ``position``, the number of tasks dealt, so a resumed run continues with the very next task.

    Args:
        task_ids: the split's tasks.
        seed: seeds every epoch's order.

    Raises:
        TaskError: there are no tasks.
    """

    def __init__(self, task_ids: Sequence[str], *, seed: int) -> None:
        if not task_ids:
            raise TaskError("the training split has no tasks; check env.train_split and env.tier")
        self._task_ids = tuple(task_ids)
        self._seed = seed
        self._epoch = -1
        self._order: list[str] = []
        self.position = 0

    def take(self, count: int) -> list[tuple[str, int]]:
        """Deal the next tasks.

        Args:
            count: how many.

        Returns:
            (task id, group seed) pairs; a task dealt in two epochs gets two group seeds.
        """
        dealt = []
        for _ in range(count):
            epoch, offset = divmod(self.position, len(self._task_ids))
            if epoch != self._epoch:
                self._order = list(self._task_ids)
                random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(self._order)
                self._epoch = epoch
            dealt.append((self._order[offset], derive_seed(self._seed, "group", self.position)))
            self.position += 1
        return dealt


def held_out_tasks(task_ids: Sequence[str], *, count: int) -> list[str]:
    """Choose the validation tasks: the same ones for every seed and run, spread over the whole split.

    Args:
        task_ids: the held-out split.
        count: how many; all when the split has no more.

    Raises:
        TaskError: the split is empty.
    """
    if not task_ids:
        raise TaskError("the validation split has no tasks; check env.validation_split and env.tier")
    order = sorted(task_ids, key=lambda task_id: derive_seed("held-out", task_id))
    return order[:count]
