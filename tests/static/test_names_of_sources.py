"""Names in unnamed namespaces of C++ sources: CMake compiles several files as one, and chooses which.

A name that two of them have breaks the build when a new file moves the others together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
from places import ROOT

UNNAMED = re.compile(r"^namespace \{\n(.*?)^\}  // namespace$", re.MULTILINE | re.DOTALL)
TYPE = re.compile(r"^(?:struct|class|enum(?: class)?) (\w+)[^;]*$")
VARIABLE = re.compile(
    r"^(?=\w)(?!using |class |struct )(?:[\w:,*& ]|<.*>)+?[ *&](\w+)(?:\[.*?\])?(?: = .*|\{.*|;)$"
)
FUNCTION = re.compile(r"^(?=\w)[\w:<>,*& ]+?[ *&](\w+\(.*\)) \{$")


def names(source: str) -> Iterator[str]:
    """Of types, variables and functions (these with their parameters) in its unnamed namespaces."""
    for block in UNNAMED.findall(source):
        for line in block.splitlines():
            for pattern in (TYPE, FUNCTION, VARIABLE):
                if found := pattern.match(line):
                    yield found[1]
                    break


def test_a_made_up_source_has_the_names_that_it_has() -> None:
    source = """
constexpr int kOutside = 1;
namespace {

struct Pair {
  int inside = 0;
};
class Later;
constexpr uint64_t kMost = 3, kLeast = 2;
std::array<int, std::size(kTable)> uses{};
std::atomic<int> stuck{0};
thread_local const Driver* entered = nullptr;
using Tensor = at::Tensor;
void check(Place place) {
  int within = 0;
}

}  // namespace
"""
    assert list(names(source)) == ["Pair", "kMost", "uses", "stuck", "entered", "check(Place place)"]


@pytest.mark.parametrize("folder", ["proxy_client", "proxy_server"])
def test_no_two_files_of_a_library_have_the_same_unnamed_name(folder: str) -> None:
    files = sorted((ROOT / folder / "csrc").rglob("*.cpp"))
    found = Counter(name for file in files for name in set(names(file.read_text())))
    assert len(found) > 150
    assert [name for name, count in found.items() if count > 1] == []
