"""Where things are: imports in `recovery/` go down the table of its README, and files and folders stay small.

What breaks these rules today is named here, in lists that may only get shorter.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import places
import pytest

ROOT = places.ROOT / "recovery"
PACKAGE = "understudy.recovery"
COMMANDS = "(this one)"
MOST_FILES, MOST_LINES = 12, 500
LONG: set[str] = set()
"""Files that are longer today.  This list may only get shorter."""
CROWDED: set[str] = set()
"""Folders of C++ that have more than MOST_FILES modules today.  This list may only get shorter."""
LAYERED = [ROOT / "snapshots" / "csrc", ROOT.parent / "replay" / "csrc"]
"""Folders of C++ whose README has a table of them, in the order in which they include each other."""
CPP = [ROOT.parent / "proxy_client" / "csrc", ROOT.parent / "proxy_server" / "csrc", *LAYERED]
"""All that have such a table."""
IMPURE = {"asyncio", "grpc", "os", "random", "socket", "structlog", "subprocess", "threading", "time"}


def rows(root: Path = ROOT) -> list[tuple[str, str]]:
    """Of the table of a folder's README: a folder in it, and where to begin there."""
    found = re.findall(
        r"^\| (\S+|\(this one\)) \|.*\| `([\w/]+\.(?:py|h|cpp))` \|$", (root / "README.md").read_text(), re.M
    )
    return [(folder.strip("`"), begin) for folder, begin in found]


def modules() -> Iterator[tuple[str, Path]]:
    """The folder of the table that each file is in."""
    for path in sorted(ROOT.rglob("*.py")):
        inside = path.relative_to(ROOT)
        yield inside.parts[0] if len(inside.parts) > 1 else COMMANDS, path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Of a file of Python; each is read once."""
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[Path]:
    """Files of `recovery/`, wherever in the file that stands."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith(PACKAGE)]
        else:
            continue
        for name in names:
            place = ROOT.joinpath(*name.split(".")[2:])
            found = [
                one.with_suffix(".py") for one in (place, place.parent) if one.with_suffix(".py").is_file()
            ]
            yield from found[:1]


def test_imports_go_down() -> None:
    """Those for types alone, too."""
    layers = [folder for folder, _ in rows()]
    up = {
        f"{path.relative_to(ROOT)} -> {other.relative_to(ROOT)}"
        for folder, path in modules()
        for other in imported(path)
        if layers.index(other.relative_to(ROOT).parts[0] if other.parent != ROOT else COMMANDS)
        < layers.index(folder)
    }
    assert up == set(), "these go up: put what both need into a folder below"


def sources() -> Iterator[Path]:
    """Python and C++ of this checkout that somebody here wrote."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.cpp", "*.h", "*.cu"], cwd=ROOT.parent, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a checkout")
    found = (ROOT.parent / line for line in listed.stdout.splitlines() if not line.startswith("third_party/"))
    yield from (path for path in found if path.is_file())


def test_no_file_is_too_long_but_for_those_that_are_known() -> None:
    lengths = {
        str(path.relative_to(ROOT.parent)): len(path.read_bytes().splitlines())
        for path in sources()
        if not path.is_symlink()
    }
    assert len(lengths) > 500, "these are all sources"
    long = {name for name, lines in lengths.items() if lines > MOST_LINES}
    assert long - LONG == set(), "these are too long: give what has a subject of its own a file of its own"
    assert LONG - long == set(), "these are gone: take them from the list"


def test_what_plans_knows_no_clock_no_process_and_no_wire() -> None:
    files = (ROOT / "planning").rglob("*.py")
    nodes = [node for path in files for node in ast.walk(tree_of(path))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert names, "it imports something"
    assert not {name.partition(".")[0] for name in names} & IMPURE


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, also amid functions and for types."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def reached(folder: Path) -> dict[Path, Path | None]:
    """All files of `recovery/` that those of a folder import, by whatever detour -> by which of them."""
    found: dict[Path, Path | None] = dict.fromkeys(sorted(folder.glob("*.py")))
    waiting = list(found)
    while waiting:
        path = waiting.pop()
        for other in imported(path):
            if other not in found:
                found[other] = path
                waiting.append(other)
    return found


@pytest.mark.parametrize("folder", ("planning", "agent_api", "state", "job"))
def test_what_decides_about_a_job_reaches_no_wire_by_any_detour(folder: str) -> None:
    """What it wants done are values, and who carries them out may be on this host or on another."""
    files = reached(ROOT / folder)
    ways = {
        f"{by.relative_to(ROOT) if by is not None else folder} -> {path.relative_to(ROOT)}"
        for path, by in files.items()
        if any(name.partition(".")[0] == "grpc" for name in imports(path))
    }
    assert len(files) > len(list((ROOT / folder).glob("*.py"))), "it imports something"
    assert ways == set()


def test_what_decides_about_a_job_opens_no_log() -> None:
    opens = {
        path.name for path in (ROOT / "job").glob("*.py")
        if any(name.startswith("understudy.replay") for name in imports(path))
    }  # fmt: skip
    assert opens == set()


def test_the_table_has_every_folder_once_and_a_file_to_begin_with() -> None:
    table = rows()
    assert sorted(folder for folder, _ in table) == sorted({folder for folder, _ in modules()})
    for folder, begin in table:
        assert (ROOT / begin if folder == COMMANDS else ROOT / folder / begin).is_file(), begin


def test_the_readme_names_files_that_are_there() -> None:
    _, _, text = (ROOT / "README.md").read_text().partition("## Where do I look?")
    named = re.findall(r"`([\w]+/[\w/]+\.(?:py|h))`", text)
    assert len(named) > 8
    missing = [name for name in named if not (ROOT / name).is_file() and not (ROOT.parent / name).is_file()]
    assert missing == []


@pytest.mark.parametrize("folder", sorted({path.parent for _, path in modules()}), ids=lambda path: path.name)
def test_a_folder_has_at_most_a_dozen_files(folder: Path) -> None:
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= MOST_FILES
    assert (folder / "__init__.py").read_text().startswith('"""')


def cpp_modules() -> dict[str, set[str]]:
    """Of each folder with C++: names of its files, of which a header and its source have one."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in sources():
        if path.suffix != ".py":
            found[str(path.parent.relative_to(ROOT.parent))].add(path.stem)
    return found


def test_a_folder_of_cpp_has_at_most_a_dozen_modules_but_for_those_that_are_known() -> None:
    found = cpp_modules()
    assert sum(map(len, found.values())) > 200, "these are all sources"
    crowded = {folder for folder, modules in found.items() if len(modules) > MOST_FILES}
    assert crowded - CROWDED == set(), "these are too full: give modules of one subject a folder of their own"
    assert CROWDED - crowded == set(), "these are gone: take them from the list"


@pytest.mark.parametrize("root", CPP, ids=lambda root: root.parent.name)
def test_the_table_of_cpp_has_every_folder_once_and_a_file_to_begin_with(root: Path) -> None:
    inside = Path(root.relative_to(ROOT.parent))
    folders = {Path(folder) for folder in cpp_modules() if Path(folder).is_relative_to(inside)}
    names = sorted(COMMANDS if folder == inside else str(folder.relative_to(inside)) for folder in folders)
    table = rows(root)
    assert sorted(folder for folder, _ in table) == names
    for folder, begin in table:
        assert (root / begin if folder == COMMANDS else root / folder / begin).is_file(), begin


@pytest.mark.parametrize("root", LAYERED, ids=lambda root: root.parent.name)
def test_includes_of_cpp_go_down_where_the_readme_says_so(root: Path) -> None:
    layers = [folder for folder, _ in rows(root)]
    words = " ".join((root / "README.md").read_text().split())
    assert "a folder includes only from folders **below** it in this table" in words
    include = re.compile(rf'^#include "{root.relative_to(ROOT.parent)}/(\w+)/', re.M)
    files = [path for path in sources() if path.is_relative_to(root)]
    up = {
        f"{path.relative_to(root)} -> {folder}"
        for path in files
        for folder in include.findall(path.read_text())
        if layers.index(folder) < layers.index(path.relative_to(root).parts[0])
    }
    assert up == set(), "these go up: put what both need into a folder below"


# ------------------------------------------------------------------ who is given what, and when
DATA = {
    # What is known of a job, of its ranks, and of the device servers that they have and had.
    "job", "session", "span", "server", "source", "former",
    # What is known of workers on their way to and from other hosts.
    "incoming", "follower",
    # Counts.
    "account", "spares", "persist", "mirror", "stored_log", "of",
    # Messages that are being written.
    "header", "news", "end", "departure",
    # What `Watched.gone` makes, a constructor beside `__init__`.
    "gone",
}  # fmt: skip
"""Names by which the code has what may be written to from outside.  This list may only get shorter."""
SUBSCRIBED = {"Store.tell_changes", "JobRecord._follow"}
"""Whom a store of workers tells while a job's record follows it, which begins and ends as the job runs."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    """Classes that are no dataclasses: what has its collaborators from its constructor."""
    for _, path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not any(
                "dataclass" in ast.unparse(one) for one in node.decorator_list
            ):
                yield path, node


def methods(made: ast.ClassDef) -> Iterator[Function]:
    return (node for node in made.body if isinstance(node, Function))


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned to there."""
    return (
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )


def named(node: ast.expr) -> str:
    """By which name the code has an object."""
    found = node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)
    return found.removeprefix("_")


def of_constructors() -> set[str]:
    """Names of the attributes that constructors make."""
    return {
        node.attr
        for _, made in classes()
        for method in methods(made) if method.name == "__init__"
        for node in assigned(method) if named(node.value) == "self"
    }  # fmt: skip


def test_nobody_assigns_what_another_object_has_from_its_constructor() -> None:
    """What others fill in later is missing until then, and nobody sees in which order all must begin."""
    made = of_constructors()
    assert len(made) > 500, "these are those of all classes"
    written = [(path, node) for _, path in modules() for node in assigned(tree_of(path))]
    others = [
        (path, node) for path, node in written
        if node.attr in made and named(node.value) not in {"self", "cls"}
    ]  # fmt: skip
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path, node in others if named(node.value) not in DATA
    }  # fmt: skip
    assert found == set(), "give it to the constructor, or let a method say what happens"
    unused = DATA - {named(node.value) for _, node in others}
    assert unused == set(), "these are gone: take them from the list"


def keeps(method: Function, services: set[str]) -> bool:
    """Whether it puts an argument of one of these types into its own object."""
    given = {
        one.arg for one in [*method.args.args, *method.args.kwonlyargs]
        if one.annotation is not None and services & set(re.findall(r"\w+", ast.unparse(one.annotation)))
    }  # fmt: skip
    return any(
        isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in given
        and any(isinstance(one, ast.Attribute) and named(one.value) == "self" for one in node.targets)
        for node in ast.walk(method)
    )  # fmt: skip


def test_no_method_takes_what_the_constructor_should_have_got() -> None:
    services = {made.name for _, made in classes()} | {"Callable"}
    found = {
        f"{made.name}.{method.name}"
        for _, made in classes()
        for method in methods(made) if method.name != "__init__" and keeps(method, services)
    }  # fmt: skip
    assert found == SUBSCRIBED, "give it to the constructor"
