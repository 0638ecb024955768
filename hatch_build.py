"""Maps the repository's top-level folders onto the ``holdfast`` import package.

A wheel carries a copy of each folder as a sub-package. An editable install carries one ``.pth`` file that points
at ``build/editable``, a git-ignored tree of symbolic links, so that edits and new files are seen at once by
Python, pytest and mypy.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = {
    "integrations/_package.py": "holdfast/__init__.py",
    "integrations/_graph.py": "holdfast/graph.py",
    "integrations/_components.py": "holdfast/components.py",
    "integrations/py.typed": "holdfast/py.typed",
    "engine": "holdfast/engine",
    "integrations": "holdfast/integrations",
    "recipes": "holdfast/recipes",
    "configs": "holdfast/configs",
    "cli": "holdfast/cli",
    "cli/__main__.py": "holdfast/__main__.py",
}


class PackageMapping(BuildHookInterface[Any]):
    """Places every folder of ``PACKAGE`` where the import system expects it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Tells the wheel builder which files to include.

        Args:
            version: ``"standard"`` for a regular wheel, ``"editable"`` for an editable install.
            build_data: What the builder reads; the files are added to it.
        """
        root = Path(self.root)
        package = {source: target for source, target in PACKAGE.items() if (root / source).exists()}
        if version != "editable":
            build_data["force_include"].update({str(root / source): target for source, target in package.items()})
            return
        tree = root / "build" / "editable"
        for source, target in package.items():
            link = tree / target
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(root / source, target_is_directory=(root / source).is_dir())
        pth = tree / "_holdfast.pth"
        pth.write_text(f"{tree}\n", encoding="utf-8")
        build_data["force_include_editable"][str(pth)] = pth.name
