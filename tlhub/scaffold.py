"""Writing the project of a new plugin: the template under another name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tlhub.errors import ArgumentError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_FILES = ("README.md", "pyproject.toml", "test_xyz.py", "tlhub_plugin_xyz.py")


def write(name: str, folder: str | Path = ".") -> Path:
    """Write the project ``tlhub-plugin-NAME`` into a new folder of that name in *folder*; return its path.

    *name*: lower-case letters and digits in words joined by ``-``. Its kernel is called ``NAME_rms_norm``, so
    that two new plugins can be installed at once. Raises ArgumentError for another name, for a *folder* that
    is not there, and for a project that is: nothing is overwritten.
    """
    if not _NAME.fullmatch(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.removeprefix("tlhub-plugin-").lower()).strip("-0123456789")
        raise ArgumentError(
            f"the plugin's name is {name!r}; a name is lower-case letters and digits in words joined by '-', "
            "and begins with a letter",
            argument="name",
            hint=f"tlhub plugin new {near or 'my-kernels'}",
        )
    if name.startswith("tlhub-plugin-"):
        short = name.removeprefix("tlhub-plugin-")
        raise ArgumentError(
            f"the plugin's name is {name!r}; the prefix 'tlhub-plugin-' is put before it",
            argument="name",
            hint=f"tlhub plugin new {short}",
        )
    project = Path(folder) / f"tlhub-plugin-{name}"
    contents = {_renamed(file, name): _renamed((_template() / file).read_text("utf-8"), name) for file in _FILES}
    try:
        project.mkdir()
    except FileExistsError:
        raise ArgumentError(
            f"{str(project)!r} is there already; nothing was written",
            argument="name",
            hint=f"tlhub plugin new {name}-2",
        ) from None
    except OSError as error:
        parent = str(folder)
        raise ArgumentError(
            f"the folder {parent!r} cannot be written into: {error.strerror or error}; nothing was written",
            argument="into",
            hint=f"mkdir -p {shlex.quote(parent)}",
        ) from error
    for file, text in contents.items():
        (project / file).write_text(text, "utf-8")
    return project


def _renamed(text: str, name: str) -> str:
    """Put *name* where the template says ``xyz``: in dashes in the distribution's name, as an identifier elsewhere."""
    names = {"tlhub-plugin-xyz": f"tlhub-plugin-{name}", "xyz": name.replace("-", "_")}
    return re.sub("|".join(names), lambda match: names[match.group()], text)


def _template() -> Path:
    """Return the template's folder: inside the package of a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    shipped = package / "template"
    return shipped if shipped.is_dir() else package.parent / "plugins" / "template"
