"""The tree of a checkpoint, to unfold: containers with the bytes of all below them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...engine.clock import format_size
from ...engine.inspection import LeafSummary
from ..report import count
from .markup import Markup, join, tag

_ROWS = 4000  # the most containers and leaves that are drawn
_CHILDREN = 400  # the most children of one container
_OPEN = 40  # A tree of at most so many leaves is unfolded from the start.
_DEEP = 60  # the deepest nesting of containers


@dataclass(slots=True)
class Node:
    """A container or a leaf."""

    name: str
    children: dict[str, Node] = field(default_factory=dict)
    leaf: LeafSummary | None = None
    leaves: int = 0  # how many leaves are below
    bytes: int = 0
    shown: list[Node] | None = None  # the children that are drawn; None until they are chosen


def draw_tree(leaves: Sequence[LeafSummary]) -> tuple[Markup, int]:
    """Return the HTML of a tree, with its upper levels in any case, and how many leaves are left out."""
    root = _tree(leaves)
    drawn = _choose(root)
    opened = root.shown or []
    is_open = len(opened) == 1 or drawn <= _OPEN
    return join(*(_draw(node, is_open=is_open) for node in opened)), len(leaves) - drawn


def _tree(leaves: Sequence[LeafSummary]) -> Node:
    root = Node("")
    for leaf in leaves:
        keys = [leaf.item, *(leaf.path.split("/") if leaf.path else ())]
        if len(keys) > _DEEP:
            keys = [*keys[: _DEEP - 1], "/".join(keys[_DEEP - 1 :])]
        node = root
        node.leaves, node.bytes = node.leaves + 1, node.bytes + leaf.bytes
        for key in keys:
            node = node.children.setdefault(key, Node(key))
            node.leaves, node.bytes = node.leaves + 1, node.bytes + leaf.bytes
        node.leaf = leaf
    return root


def _choose(root: Node) -> int:
    """Choose the nodes to draw, the upper levels first; return how many leaves are among them."""
    waiting, left, leaves = deque([root]), _ROWS, 0
    while waiting:
        node = waiting.popleft()
        node.shown = list(node.children.values())[: min(_CHILDREN, max(0, left))]
        left -= len(node.shown)
        leaves += sum(child.leaf is not None for child in node.shown)
        waiting.extend(child for child in node.shown if child.children)
    return leaves


def _draw(node: Node, *, is_open: bool) -> Markup:
    size = tag("i", format_size(node.bytes))
    if not node.children:
        assert node.leaf is not None
        leaf = node.leaf
        kind = f"{leaf.dtype}{list(leaf.shape)}" if leaf.dtype else leaf.kind
        about = " ".join(filter(None, [kind, leaf.value or "", leaf.sharding]))
        return tag("div", tag("code", node.name), " ", tag("span", about), size, class_="leaf")
    shown = node.shown or []
    parts = [_draw(child, is_open=False) for child in shown]
    if rest := list(node.children.values())[len(shown) :]:
        below = count(sum(child.leaves for child in rest), "leaf", "leaves")
        text = f"{len(rest)} more, with {below}, {format_size(sum(child.bytes for child in rest))}"
        parts.append(tag("div", text, class_="leaf left-out"))
    about = tag("span", count(node.leaves, "leaf", "leaves"))
    summary = tag("summary", tag("code", node.name), " ", about, size)
    return tag("details", summary, *parts, open=True if is_open else None)
