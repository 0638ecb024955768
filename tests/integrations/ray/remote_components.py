"""Components in actors are saved, restored and constructed: ``remote_components.py DIRECTORY``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.components import Checkpointable
from holdfast.integrations.ray import RemoteComponent

SIZE = 4


class Runner:
    """Draws numbers; its state is there when all runners have been asked for theirs."""

    def __init__(self, seed: int, asked: str) -> None:
        self.generator, self.total, self.seed = np.random.default_rng(seed), np.zeros(3), seed
        self.asked = Path(asked)

    def step(self) -> list[float]:
        self.total += self.generator.random(3)
        return [float(one) for one in self.total]

    def process(self) -> int:
        return os.getpid()

    def get_state(self) -> dict[str, Any]:
        self.asked.mkdir(exist_ok=True)
        (self.asked / str(self.seed)).touch()
        until = time.monotonic() + 30
        while len(list(self.asked.iterdir())) < SIZE:
            assert time.monotonic() < until, "the states are requested one after the other"
            time.sleep(0.01)
        return {"total": self.total, "generator": self.generator.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.total = np.array(state["total"])
        self.generator.bit_generator.state = state["generator"]


class Team(Checkpointable):
    def __init__(self, asked: str) -> None:
        options = {"num_cpus": 0.1}
        self.runners = [RemoteComponent(Runner, seed, asked=asked, options=options) for seed in range(SIZE)]
        self.rounds = 0

    def step(self) -> Any:
        import ray

        self.rounds += 1
        return ray.get([one.actor.step.remote() for one in self.runners])


def main(directory: str) -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False)
    team = Team(f"{directory}/asked")
    for _ in range(3):
        team.step()
    path = team.save_to_path(f"{directory}/team")
    expected = [team.step() for _ in range(3)]
    restored = Team(f"{directory}/asked")
    restored.restore_from_path(path)
    assert restored.rounds == 3
    assert [restored.step() for _ in range(3)] == expected
    made = Team.from_checkpoint(path)
    assert [made.step() for _ in range(3)] == expected
    part = RemoteComponent.from_checkpoint(f"{path}/runners/2", allowed=[Runner])
    assert ray.get(part.actor.step.remote()) == expected[0][2]
    actors = [runner.actor for one in (team, restored, made) for runner in one.runners]
    assert len({*ray.get([actor.process.remote() for actor in [*actors, part.actor]]), os.getpid()}) == 3 * SIZE + 2


if __name__ == "__main__":
    main(*sys.argv[1:])
