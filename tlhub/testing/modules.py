"""Which modules of a plugin its programs import, read off the source without running it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from importlib import metadata


def unnamed_sources(program: str, sources: Sequence[str], plugin: str, distribution: str = "") -> tuple[str, ...]:
    """Return the modules of *plugin* that the module *program* imports, directly or not, and *sources* lacks.

    The plugin's modules are those below its own top-level name, the program's, and those of its *distribution*. A
    package's ``__init__`` counts where a name of it is imported, not where it is only on the way to a module.
    """
    tops = _top_level(distribution) | {program.partition(".")[0], plugin.partition(".")[0]}
    reached, queue = {program}, [program]
    while queue:
        for name in _imported(queue.pop(), tops):
            if name not in reached:
                reached.add(name)
                queue.append(name)
    return tuple(sorted(reached - set(sources)))


def _top_level(distribution: str) -> set[str]:
    """Return the top-level names of the modules that *distribution* installs, the host's own left out."""
    try:
        files = metadata.files(distribution) if distribution else None
    except metadata.PackageNotFoundError:
        files = None
    modules = (file for file in files or () if file.suffix == ".py")
    return {module.parts[0].removesuffix(".py") for module in modules} - {"tlhub"}


def _imported(module: str, tops: set[str]) -> Iterator[str]:
    """Yield the absolute names below *tops* that *module*'s source imports, anywhere but for type checkers."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ImportError(f"no module {module!r}")
    if not spec.origin or not spec.origin.endswith(".py"):
        return
    with open(spec.origin, "rb") as file:
        tree = ast.parse(file.read(), spec.origin)
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in tops)
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            base = importlib.util.resolve_name(dots + (node.module or ""), package) if dots else str(node.module)
            # only the plugin's own names are looked for: finding a module imports its parents
            if base.partition(".")[0] in tops:
                yield from (f"{base}.{a.name}" if _is_module(f"{base}.{a.name}") else base for a in node.names)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield *node* and all below it, but for what only a type checker reads."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from _statements(other)
        else:
            yield from _statements(child)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
