"""Laws on how the package is written: sizes, names, docstrings, state, privacy, the environment."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.house import law
from tests.house.source import Source, definitions, dotted, imports, sources

Breaches = Iterator[str]


def first_line(source: Source) -> Breaches:
    """The first line of a file says what it is."""
    doc = ast.get_docstring(source.tree)
    if not source.text.startswith('"""') or not doc or not doc.splitlines()[0].strip():
        yield f"{source.path}: the first line is not a docstring that says what the file is"


def size(source: Source) -> Breaches:
    """Files and functions that fit a reader's head, or a named exception."""
    lines = source.text.count("\n")
    if lines > law.MAX_FILE_LINES and source.path not in law.LONG_FILES:
        yield f"{source.path}: {lines} lines, more than {law.MAX_FILE_LINES}"
    for name, node in definitions(source):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        place = f"{source.path}: {name}"
        if not isinstance(node, ast.ClassDef) and length > law.MAX_FUNCTION_LINES and place not in law.LONG_FUNCTIONS:
            yield f"{place} has {length} lines, more than {law.MAX_FUNCTION_LINES}"


def name_of_file(source: Source) -> Breaches:
    """No file or folder is named for what it is not."""
    for part in source.path.removesuffix(".py").split("/"):
        if part.strip("_") in law.VAGUE_NAMES:
            yield f"{source.path}: {part!r} says nothing"


def docstrings(source: Source) -> Breaches:
    """Public functions, classes and methods say what they do."""
    protocols = {
        name
        for name, node in definitions(source)
        if isinstance(node, ast.ClassDef) and any(dotted(base).split(".")[-1] == "Protocol" for base in node.bases)
    }
    for name, node in definitions(source):
        if name.rpartition(".")[0] in protocols:
            continue  # the class says what it stands for; its members are names
        private = any(part.startswith("_") for part in name.split("."))
        overload = any(dotted(d).split(".")[-1] in ("overload", "setter") for d in node.decorator_list)
        if not private and not overload and not ast.get_docstring(node):
            yield f"{source.path}:{node.lineno} {name} has no docstring"


def no_global(source: Source) -> Breaches:
    """No `global` statement."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno} global {', '.join(node.names)}"


def environment(source: Source) -> Breaches:
    """The environment is read by the launcher alone; everyone else is handed what it needs."""
    if source.room in law.ENVIRONMENT:
        return
    names = [*imports(source)]
    names += [(node.lineno, dotted(node)) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    for line, name in names:
        if name in ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"):
            yield f"{source.path}:{line} {name} outside {', '.join(law.ENVIRONMENT)}"


def frozen(source: Source) -> Breaches:
    """Dataclasses are frozen, except where the work is done."""
    if source.room in law.MUTATING:
        return
    for name, node in definitions(source):
        if not isinstance(node, ast.ClassDef) or f"{source.path}: {name}" in law.MUTABLE_DATACLASSES:
            continue
        for decorator in node.decorator_list:
            called = isinstance(decorator, ast.Call)
            function = decorator.func if isinstance(decorator, ast.Call) else decorator
            if dotted(function).split(".")[-1] == "dataclass":
                keywords = {k.arg: ast.unparse(k.value) for k in decorator.keywords} if called else {}
                if keywords.get("frozen") != "True":
                    yield f"{source.path}:{node.lineno} {name} is not frozen"


def no_module_state(source: Source) -> Breaches:
    """Nothing at module level changes: tuples, frozensets, MappingProxyType, or a type that only reads (Mapping)."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            name = ast.unparse(targets[0])
            type_name = ast.unparse(node.annotation).split("[")[0] if isinstance(node, ast.AnnAssign) else ""
            if type_name.split(".")[-1] in ("Mapping", "Sequence", "Collection", "Set"):
                continue  # mypy refuses every change
            changing = isinstance(node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
            if isinstance(node.value, ast.Call):
                called = dotted(node.value.func).split(".")[-1]
                changing = called in ("list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "local")
            if changing and name != "__all__" and f"{source.path}: {name}" not in law.MODULE_STATE:
                yield f"{source.path}:{node.lineno} {name} can be changed by anyone"


@cache
def own_private_names() -> frozenset[str]:
    """Collect the underscore names that the package itself defines."""
    names: set[str] = set()
    for source in sources():
        names |= {node.name for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
            if isinstance(node, ast.Call) and dotted(node.func) in ("object.__setattr__", "hidden"):
                names |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return frozenset(name for name in names if name.startswith("_"))


def private_names(source: Source) -> Breaches:
    """Other packages' private names are used only where the law lists them with a reason."""

    def private(name: str) -> bool:
        return bool(re.match(r"_(?!_)|__\w*[^_]$", name))

    own = own_private_names()
    used = [
        (node.lineno, node.attr)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own
    ]
    for line, name in imports(source):
        parts = name.split(".")
        if parts[0] not in ("headway", "__future__"):
            used += [(line, part) for part in parts if private(part)]
    for line, name in used:
        if not {name, f"{source.path}: {name}"} & law.PRIVATE_NAMES.keys():
            yield f"{source.path}:{line} uses {name}, which is private"


LAWS: tuple[Callable[[Source], Breaches], ...] = (
    first_line,
    size,
    name_of_file,
    docstrings,
    no_global,
    environment,
    frozen,
    no_module_state,
    private_names,
)

BREACHES: tuple[tuple[Callable[[Source], Breaches], str, str], ...] = (
    (first_line, "cost/model.py", "import math\n"),
    (size, "cost/model.py", "x = 1\n" * (law.MAX_FILE_LINES + 1)),
    (size, "cost/model.py", "def f():\n" + "    x = 1\n" * law.MAX_FUNCTION_LINES),
    (name_of_file, "cost/utils.py", ""),
    (docstrings, "cost/model.py", "class A:\n    '''Says.'''\n    def f(self): ..."),
    (no_global, "cost/model.py", "def f():\n    global x"),
    (environment, "run/stage.py", "import os\nx = os.environ['RANK']"),
    (environment, "run/stage.py", "from os import getenv"),
    (frozen, "cost/model.py", "@dataclass\nclass A: ..."),
    (frozen, "cost/model.py", "@dataclasses.dataclass(order=True)\nclass A: ..."),
    (no_module_state, "cost/model.py", "CACHE = {}"),
    (no_module_state, "cost/model.py", "CACHE: dict[str, int] = collections.defaultdict(int)"),
    (private_names, "run/stage.py", "import torch\ny = x._no_such_name_of_ours"),
    (private_names, "run/stage.py", "from torch._dynamo import config"),
)


@pytest.mark.parametrize("check", LAWS, ids=lambda check: check.__name__)
def test_law(check: Callable[[Source], Breaches]) -> None:
    assert [breach for source in sources() for breach in check(source)] == []


@pytest.mark.parametrize(("check", "path", "text"), BREACHES)
def test_a_breach_is_seen(check: Callable[[Source], Breaches], path: str, text: str) -> None:
    assert list(check(Source(path, text)))


def test_exceptions_have_reasons_and_are_needed() -> None:
    """Each named exception still names something that exists, and says why."""
    tables = (
        law.FACE,
        law.LONG_FILES,
        law.LONG_FUNCTIONS,
        law.PRIVATE_NAMES,
        law.MODULE_STATE,
        law.MUTABLE_DATACLASSES,
    )
    paths = {source.path: source.text for source in sources()}
    for table in tables:
        for place, reason in table.items():
            path, _, name = place.partition(": ")
            if not path.endswith(".py"):
                assert any(path in text for text in paths.values()), f"nobody uses {path}: strike the exception"
                continue
            assert path in paths and name.split(".")[-1] in paths[path], f"{place} is gone: strike the exception"
            assert len(reason.split()) >= 4, f"{place}: say why"
