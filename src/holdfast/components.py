"""Component trees: a trainer, its learner and its policies, each saved to its own directory.

>>> import tempfile, numpy as np
>>> from holdfast import components
>>> class Policy(components.Checkpointable):
...     def __init__(self, size):
...         self.weights = np.zeros(size)
>>> class Game(components.Checkpointable):
...     def __init__(self):
...         self.policies, self.rounds = {"p0": Policy(2), "p1": Policy(2)}, 0
>>> game = Game()
>>> game.policies["p1"].weights[:] = 7
>>> with tempfile.TemporaryDirectory() as directory:
...     path = game.save_to_path(f"{directory}/game")
...     Policy.from_checkpoint(f"{path}/policies/p1").weights
array([7., 7.])
"""

from .integrations.components import (
    Checkpointable,
    Component,
    ComponentCheckpointHandler,
    ComponentReport,
    allow,
    read_state,
    rename,
)

__all__ = [
    "Checkpointable",
    "Component",
    "ComponentCheckpointHandler",
    "ComponentReport",
    "allow",
    "read_state",
    "rename",
]
