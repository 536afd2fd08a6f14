"""Reads the package's source as syntax trees, for the laws to look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headway"


@dataclass(frozen=True)
class Source:
    """One file of the package: "graph/model.py", its room "graph" ("" for the package's own file), text and tree."""

    path: str
    text: str

    @property
    def room(self) -> str:
        """First folder, or the file's own name at the top."""
        first = self.path.split("/")[0]
        return "" if first == "__init__.py" else first.removesuffix(".py")

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree."""
        return ast.parse(self.text, self.path)


@cache
def sources() -> tuple[Source, ...]:
    """Read every file of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    return tuple(Source(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in files)


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything imported, wherever the import stands.

    `from a import b` gives "a.b", so that `from headway import errors` counts as headway.errors.
    """
    package = ["headway", *source.path.split("/")[:-1]]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def dotted(node: ast.expr) -> str:
    """Write `torch.distributed.send` for the expression that says so; "" for anything but names and attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def definitions(source: Source) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Yield (qualified name, node) of classes, functions and methods; functions inside functions are left out."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try):
                yield from visit([*node.body, *node.orelse], prefix)

    yield from visit(source.tree.body, "")
