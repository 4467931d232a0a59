"""One vocabulary: docs/glossary.md has the terms, and names have no words that nobody in the field knows.

What still has such words is named here, in lists that may only get shorter.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from man_pages import PROGRAMS
from places import ROOT

from understudy.recovery.planning.agreement import HostState

RECOVERY = ROOT / "recovery"
MOST_TERMS = 60
UNKNOWN = frozenset((
    "bequeath", "bequest", "desk", "elsewhere", "estate", "foster", "guest", "guests", "heir", "heirs",
    "hollow", "homes", "inherit", "inheritance", "lose", "meeting", "parcel", "passage", "passenger",
    "passengers", "returning", "standing", "stash", "whoever",
))  # fmt: skip
"""Words of a language of our own, where the field has others."""
NAMES = {
    "planning/planner.py": "stash",
}
"""Files of `recovery/` that give such names.  This list may only get shorter."""
SHOWN = {
    "STASH_RESTART_RESTORE = 'stash-restart-restore'",
}
"""What a user is shown.  This list may only get shorter."""


def words(name: str) -> frozenset[str]:
    """Those of a name in any spelling, or of a sentence."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return frozenset(part.lower() for part in parts)


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    paths = sorted(RECOVERY.rglob("*.py"))
    return [(str(path.relative_to(RECOVERY)), ast.parse(path.read_text())) for path in paths]


def given_names(tree: ast.Module) -> Iterator[str]:
    """Of classes, functions, parameters, variables and attributes, where they get their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def members(tree: ast.Module) -> Iterator[str]:
    """Names and texts of enumerations: reports, journals and status lines have them."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            yield from (ast.unparse(line) for line in node.body if isinstance(line, ast.Assign))


def events(tree: ast.Module) -> Iterator[str]:
    """What is logged, and the names of its fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
            yield from (str(text.value) for text in node.args if isinstance(text, ast.Constant))
            yield from (keyword.arg or "" for keyword in node.keywords)


def metrics(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(
            r"(understudy_)?[a-z]+(_[a-z]+)*", str(node.value)
        ):
            yield str(node.value)


def commands() -> Iterator[str]:
    """Of all programs: names of commands and options."""

    def within(command: object) -> Iterator[str]:
        for parameter in getattr(command, "params", []):
            yield from parameter.opts
        for name, inner in getattr(command, "commands", {}).items():
            yield name
            yield from within(inner)

    for make in PROGRAMS.values():
        yield from within(make())


def rows() -> list[tuple[str, str, str]]:
    """Of the glossary: a term, what it is, where."""
    found = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| `([^|`]+)` \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M
    )
    assert found
    return found


def test_the_glossary_is_short_and_sorted_and_says_where_things_are() -> None:
    terms = [term for term, _, _ in rows()]
    assert len(terms) <= MOST_TERMS
    assert terms == sorted(set(terms), key=str.lower)
    missing = [where for _, _, where in rows() if not (ROOT / where).is_file()]
    assert missing == []


def test_a_term_is_told_in_one_or_two_sentences_of_known_words() -> None:
    long = [term for term, text, _ in rows() if not 1 <= len(re.findall(r"[.?!](?= |$)", text)) <= 2]
    assert long == []
    unknown = {term: words(term + text) & UNKNOWN for term, text, _ in rows()}
    assert not any(unknown.values()), unknown


def test_states_that_status_shows_are_in_the_glossary() -> None:
    told = {word for _, text, _ in rows() for word in re.findall(r"`([\w-]+)`", text)}
    of_ranks = {"running", "recovering", "lost", "ended"}
    assert of_ranks | {state.value for state in HostState} <= told


def test_such_words_are_found_in_any_spelling_and_wherever_a_name_is_given() -> None:
    source = ast.parse(
        "class TheDesk:\n def close_guest(self, HEIRS): self._stash = homes = 1\n"
        "class Kind(Enum):\n GIVEN = 'foster'\nlog.info('a parcel', passage=passenger)"
    )
    assert {word for name in given_names(source) for word in words(name)} & UNKNOWN == {
        "desk", "guest", "heirs", "stash", "homes",
    }  # fmt: skip
    assert [words(text) & UNKNOWN for text in members(source)] == [{"foster"}]
    assert [words(text) & UNKNOWN for text in events(source)] == [{"parcel"}, {"passage"}]


def test_names_in_recovery_have_no_unknown_words_but_for_those_that_are_listed() -> None:
    found = {}
    for file, tree in sources():
        unknown = words(file) | {word for name in given_names(tree) for word in words(name)}
        if unknown & UNKNOWN:
            found[file] = unknown & UNKNOWN
    listed = {file: frozenset(text.split()) for file, text in NAMES.items()}
    more = {file: here - listed.get(file, frozenset()) for file, here in found.items()}
    assert not any(more.values()), f"see docs/glossary.md for better names: {more}"
    gone = {file: there - found.get(file, frozenset()) for file, there in listed.items()}
    assert not any(gone.values()), f"take these from the list: {gone}"


def test_what_a_user_is_shown_has_no_unknown_words_but_for_those_that_are_listed() -> None:
    texts = list(commands())
    assert "drill" in texts and "--persist" in texts
    for file, tree in sources():
        here = [*members(tree), *events(tree), *(metrics(tree) if file == "daemon/metrics.py" else ())]
        texts += here
    assert "understudy_recoveries" in texts and "job opened" in texts
    found = {text for text in texts if words(text) & UNKNOWN}
    assert found - SHOWN == set(), "see docs/glossary.md for better words"
    assert SHOWN - found == set(), "take these from the list"


def test_no_docstring_leaves_to_the_reader_what_it_is_about() -> None:
    """Such as "Of one job.": it says neither what a thing is nor what it does."""
    told = {
        f"{file}: {node.name}": ast.get_docstring(node) or ""
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(told) > 1000
    assert [name for name, text in told.items() if text.startswith("Of ")] == []
