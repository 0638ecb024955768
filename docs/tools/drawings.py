"""Draws the pictures of the site as SVG, each for light and dark pages.

A drawing is made of boxes, arrows and texts at places in pixels. ``python -m docs.tools.drawings`` writes each
into ``docs/drawings`` twice, as ``save.light.svg`` and ``save.dark.svg``. The site shows the one that fits, with
``#only-light`` and ``#only-dark``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]

COLOURS: Mapping[str, Mapping[str, str]] = {
    "light": {
        "text": "#1f2933",
        "soft": "#61707f",
        "line": "#61707f",
        "plain": "#eef2f5",
        "loop": "#d7e8fb",
        "work": "#e4efdc",
        "disk": "#fdeccb",
        "safe": "#bfe3c6",
        "gone": "#f6d3d0",
    },
    "dark": {
        "text": "#e6ebf0",
        "soft": "#9fb0c0",
        "line": "#9fb0c0",
        "plain": "#2b3440",
        "loop": "#1d3f5e",
        "work": "#31482a",
        "disk": "#54431c",
        "safe": "#1f5531",
        "gone": "#5d2f2c",
    },
}
FONT = "font-family='system-ui, sans-serif'"


@dataclass
class Drawing:
    """A picture of a width and height, in pixels; what is drawn later lies on top."""

    title: str
    width: int
    height: int
    parts: list[Callable[[Mapping[str, str]], str]] = field(default_factory=list)

    def box(self, x: int, y: int, w: int, h: int, kind: str, text: str, note: str = "") -> None:
        """Draw a box with a text, and a smaller note below it; lines are divided by ``|``."""
        self.parts.append(
            lambda c: (
                f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='6' fill='{c[kind]}' stroke='{c['line']}' "
                f"stroke-width='1'/>"
            )
        )
        lines = [(line, "text", 14) for line in text.split("|")]
        lines += [(line, "soft", 12) for line in note.split("|") if line]
        top = y + h / 2 - 9 * (len(lines) - 1)
        for number, (line, colour, size) in enumerate(lines):
            self.text(x + w // 2, round(top + 18 * number + 5), line, colour=colour, size=size, anchor="middle")

    def text(
        self,
        x: int,
        y: int,
        text: str,
        *,
        colour: str = "text",
        size: int = 14,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Write a line of text."""
        weight = " font-weight='600'" if bold else ""
        self.parts.append(
            lambda c: (
                f"<text x='{x}' y='{y}' font-size='{size}' text-anchor='{anchor}' fill='{c[colour]}' "
                f"{FONT}{weight}>{escape(text)}</text>"
            )
        )

    def arrow(self, *points: tuple[int, int], dashed: bool = False) -> None:
        """Draw a line through points that ends with an arrowhead."""
        dash = " stroke-dasharray='5 4'" if dashed else ""
        path = " L ".join(f"{x} {y}" for x, y in points)
        self.parts.append(
            lambda c: (
                f"<path d='M {path}' fill='none' stroke='{c['line']}' stroke-width='1.5'{dash} marker-end='url(#end)'/>"
            )
        )

    def line(self, *points: tuple[int, int]) -> None:
        """Draw a dashed line without an arrowhead."""
        path = " L ".join(f"{x} {y}" for x, y in points)
        self.parts.append(lambda c: f"<path d='M {path}' fill='none' stroke='{c['soft']}' stroke-dasharray='3 4'/>")

    def svg(self, scheme: str) -> str:
        """Return the picture in the colours of a scheme."""
        colours = COLOURS[scheme]
        body = "\n".join(part(colours) for part in self.parts)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' role='img'>\n"
            f"<title>{escape(self.title)}</title>\n"
            "<defs><marker id='end' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
            f"<path d='M 0 0 L 8 4 L 0 8 z' fill='{colours['line']}'/></marker></defs>\n{body}\n</svg>\n"
        )


def save() -> Drawing:
    """The time of a save: what the loop waits for, and what happens beside it."""
    d = Drawing("A save: the loop waits for the snapshot alone", 860, 250)
    d.text(10, 52, "training loop", bold=True)
    d.text(10, 152, "background", bold=True)
    for x, w, kind, text in (
        (130, 110, "loop", "step 100"),
        (240, 60, "gone", "copy"),
        (300, 110, "loop", "step 101"),
        (410, 110, "loop", "step 102"),
        (520, 110, "loop", "step 103"),
        (630, 110, "loop", "step 104"),
        (740, 110, "loop", "..."),
    ):
        d.box(x, 28, w, 40, kind, text)
    d.arrow((270, 68), (270, 128), (310, 128), (310, 132))
    for x, w, kind, text in (
        (300, 60, "work", "plan"),
        (360, 180, "disk", "write data files"),
        (540, 90, "disk", "fsync"),
        (630, 90, "safe", "commit"),
    ):
        d.box(x, 132, w, 40, kind, text)
    d.line((240, 68), (240, 215))
    d.line((300, 172), (300, 215))
    d.line((720, 172), (720, 240))
    d.text(270, 210, "blocked", colour="soft", size=12, anchor="middle")
    d.text(712, 232, "durable: save is reported done", colour="soft", size=12, anchor="end")
    return d


def load() -> Drawing:
    """The way of a load: the template decides what is read."""
    d = Drawing("A load: what the template needs, and nothing else", 860, 300)
    d.box(20, 30, 170, 54, "plain", "commit record", "verified first")
    d.box(20, 122, 170, 54, "plain", "tree and index", "names, shapes, places")
    d.box(20, 214, 170, 54, "loop", "template", "like=, select=")
    d.arrow((105, 84), (105, 122))
    d.box(270, 122, 170, 54, "work", "compare", "one error for all leaves")
    d.arrow((190, 149), (270, 149))
    d.arrow((190, 241), (355, 241), (355, 176))
    d.box(490, 122, 150, 54, "disk", "read chunks", "only those needed")
    d.arrow((440, 149), (490, 149))
    d.box(490, 30, 150, 54, "safe", "checksum", "of every chunk")
    d.arrow((565, 122), (565, 84))
    d.box(690, 122, 150, 54, "loop", "arrays", "numpy, torch, jax")
    d.arrow((640, 57), (765, 57), (765, 122))
    d.text(765, 200, "on the template's devices", colour="soft", size=12, anchor="middle")
    d.text(565, 20, "damage is an error, never data", colour="soft", size=12, anchor="middle")
    return d


def commit() -> Drawing:
    """The commit: what is on the disk at each moment, and what a crash leaves."""
    d = Drawing("A commit: the record is written last", 860, 300)
    columns = (
        (20, "1. marker", ("checkpoint.partial",), "gone", "no checkpoint"),
        (235, "2. data", ("checkpoint.partial", "state/ ... fsynced"), "gone", "no checkpoint"),
        (
            450,
            "3. record, renamed",
            ("checkpoint.partial", "state/ ...", "checkpoint.json"),
            "safe",
            "the checkpoint",
        ),
        (665, "4. marker removed", ("state/ ...", "checkpoint.json"), "safe", "the checkpoint"),
    )
    for number, (x, title, files, kind, left) in enumerate(columns):
        d.text(x + 87, 30, title, anchor="middle", bold=True)
        d.box(x, 46, 175, 140, "plain", "")
        for row, name in enumerate(files):
            colour = "safe" if name == "checkpoint.json" else "disk"
            d.box(x + 12, 58 + 40 * row, 151, 32, colour, name)
        d.text(x + 87, 212, "a crash now leaves", colour="soft", size=12, anchor="middle")
        d.box(x, 224, 175, 46, kind, left)
        if number < 3:
            d.arrow((x + 178, 116), (x + 212, 116))
    return d


def retention() -> Drawing:
    """Retention: a step stays if any rule wants it."""
    d = Drawing("Retention: a step stays if any rule wants it", 860, 290)
    steps = [(100, 0.9), (200, 0.7), (300, 0.5), (400, 0.2), (500, 0.3), (600, 0.25), (700, 0.4), (800, 0.45)]
    kept = {
        "keep_period=400: the first|at or past each multiple": (400, 800),
        'best_fn="loss", max_to_keep=2:|the best two': (400, 600),
        "keep_latest=1, and always|the newest": (800,),
    }
    stays = {step for found in kept.values() for step in found}
    left, width = 250, 74
    for index, (step, loss) in enumerate(steps):
        x = left + index * width
        d.box(x, 20, 66, 52, "safe" if step in stays else "gone", str(step), f"loss {loss}")
    for row, (rule, found) in enumerate(kept.items()):
        y = 104 + 52 * row
        for number, line in enumerate(rule.split("|")):
            d.text(10, y + 12 + 17 * number, line, size=13)
        for index, (step, _) in enumerate(steps):
            if step in found:
                d.box(left + index * width + 8, y, 50, 30, "safe", "keep")
    for index, (step, _) in enumerate(steps):
        text = "stays" if step in stays else "deleted"
        d.text(
            left + index * width + 33, 276, text, colour="text" if step in stays else "soft", size=13, anchor="middle"
        )
    d.line((10, 252), (850, 252))
    return d


def benchmarks() -> Drawing:
    """Draw the times of the first workload of ``docs/benchmarks.md``, those of one library beside each other."""
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    rows = text[text.index("**1 GB in 436 leaves") :].split("\n\n")[1].splitlines()
    times = {
        cells[1]: (cells[3], cells[5]) for row in rows if len(cells := [one.strip() for one in row.split("|")]) > 5
    }
    d = Drawing("1 GB in 436 arrays: seconds until a save is durable, and to load it with a cold cache", 860, 316)
    groups: dict[str, tuple[str, ...]] = {
        "jax": ("holdfast (jax)", "orbax (tuned)", "orbax"),
        "torch": ("holdfast (torch)", "safetensors", "torch dcp", "torch.save"),
    }
    for column, (left, title) in enumerate(((190, "until a save is durable"), (550, "load with a cold cache"))):
        d.text(left, 22, f"{title} [s]", size=13, bold=True)
        y = 36
        for library, names in groups.items():
            for name in names:
                value = times[name][column]
                kind = "safe" if name.startswith("holdfast") else "loop"
                d.box(left, y, round(120 * float(value)), 24, kind, "")
                d.text(left + round(120 * float(value)) + 8, y + 17, value, size=13)
                if column == 0:
                    d.text(
                        180,
                        y + 17,
                        f"{library}: {name.removeprefix('torch ').removesuffix(f' ({library})')}",
                        anchor="end",
                    )
                y += 34
            y += 26
    return d


DRAWINGS = (save, load, commit, retention, benchmarks)


def files() -> dict[str, str]:
    """Return the drawings by their file names."""
    return {f"{make.__name__}.{scheme}.svg": make().svg(scheme) for make in DRAWINGS for scheme in COLOURS}


if __name__ == "__main__":
    (DOCS / "drawings").mkdir(exist_ok=True)
    for name, text in files().items():
        (DOCS / "drawings" / name).write_text(text, encoding="utf-8")
