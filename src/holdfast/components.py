"""Trees of components: a trainer, its learner, its policies, each saved into its own directory.

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

from .integrations.components import Checkpointable as Checkpointable
from .integrations.components import Component as Component
from .integrations.components import ComponentCheckpointHandler as ComponentCheckpointHandler
from .integrations.components import ComponentReport as ComponentReport
from .integrations.components import allow as allow
from .integrations.components import read_state as read_state
from .integrations.components import rename as rename

__all__ = [name for name in dir() if not name.startswith("_")]
