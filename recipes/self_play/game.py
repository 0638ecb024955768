"""A game for two, played many times at once: stones fall into columns, and who has enough of them in a line wins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...integrations.components import allow

Boards = NDArray[np.int8]
"""int8[n, rows * columns], row by row from the bottom: 1 is a stone of one player, -1 of the other, 0 is no stone."""


@allow  # checkpoints may name it, as an argument of constructors
@dataclass(frozen=True)
class Rules:
    """The size of the board, and the length of a line that wins.

    Attributes:
        rows: Stones that fit into a column.
        columns: Columns, which are also the actions.
        connect: Stones in a line, in any of the four directions, that win.
    """

    rows: int = 4
    columns: int = 5
    connect: int = 3

    @property
    def cells(self) -> int:
        """Places for stones."""
        return self.rows * self.columns

    @cached_property
    def lines(self) -> NDArray[np.intp]:
        """intp[lines, connect]: the cells of every line that wins."""
        found = []
        for row in range(self.rows):
            for column in range(self.columns):
                for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                    rows = [row + down * i for i in range(self.connect)]
                    columns = [column + right * i for i in range(self.connect)]
                    if rows[-1] < self.rows and 0 <= columns[-1] < self.columns:
                        found.append([r * self.columns + c for r, c in zip(rows, columns, strict=True)])
        return np.array(found, np.intp).reshape(-1, self.connect)

    def legal(self, boards: Boards) -> NDArray[np.bool_]:
        """Return bool[n, columns]: the columns with room for a stone."""
        top: NDArray[np.bool_] = boards[:, -self.columns :] == 0
        return top

    def has_won(self, boards: Boards, sign: int) -> NDArray[np.bool_]:
        """Return bool[n]: whether the player with the stones of this sign, 1 or -1, has a line."""
        won: NDArray[np.bool_] = (boards[:, self.lines] == sign).all(axis=2).any(axis=1)
        return won


class Games:
    """Games that began together; in each of them it is the same player's turn, who has the stones of :attr:`sign`.

    Args:
        rules: The rules.
        count: How many games.

    Attributes:
        boards: int8[count, cells], 1 for stones of who began.
        winner: int8[count], 1 where the player who began has won, -1 where the other has, 0 where neither has.
        over: bool[count], the games that are finished.
        ply: Moves done, by both players together.
    """

    def __init__(self, rules: Rules, count: int) -> None:
        self.rules = rules
        self.boards: Boards = np.zeros((count, rules.cells), np.int8)
        self.winner = np.zeros(count, np.int8)
        self.over = np.zeros(count, np.bool_)
        self.ply = 0

    @property
    def sign(self) -> int:
        """1 if it is the turn of who began, -1 if it is the other's."""
        return -1 if self.ply % 2 else 1

    def seen(self, games: NDArray[np.intp]) -> Boards:
        """Return int8[k, cells], the boards of some games as seen by the player whose turn it is: 1 is its own."""
        boards: Boards = self.boards[games] * np.int8(self.sign)
        return boards

    def legal(self, games: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return bool[k, columns]: the columns with room, in some games."""
        return self.rules.legal(self.boards[games])

    def play(self, games: NDArray[np.intp], columns: NDArray[np.int64]) -> None:
        """Let stones fall, one in each of some games that are not over.

        Args:
            games: intp[k], the games.
            columns: int64[k], where the stones fall.

        Raises:
            ValueError: A column is full, or a game is over.
        """
        if self.over[games].any() or not self.rules.legal(self.boards)[games, columns].all():
            raise ValueError(f"ply {self.ply}: a stone in a game that is over, or in a column that is full")
        stacked = self.boards.reshape(-1, self.rules.rows, self.rules.columns)
        rows = (stacked[games, :, columns] != 0).sum(axis=1)
        stacked[games, rows, columns] = self.sign
        won = self.rules.has_won(self.boards[games], self.sign)
        self.winner[games[won]] = self.sign
        self.over[games] = won | ~self.rules.legal(self.boards[games]).any(axis=1)

    def next_ply(self) -> None:
        """Pass the turn, in all games."""
        self.ply += 1

    def active(self, games: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return those of some games that go on."""
        going: NDArray[np.intp] = games[~self.over[games]]
        return going
