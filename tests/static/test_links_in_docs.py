"""What a page of ours points to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from places import ROOT
from test_installed_names import tracked

LINK = re.compile(r"\[[^\]\n]*\]\((?P<to>[^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def broken_links(page: Path) -> list[str]:
    found = []
    for match in LINK.finditer(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", match["to"]):
            continue  # of the web
        name, _, anchor = match["to"].partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            found.append(match["to"])
        elif anchor and target.suffix == ".md":
            headings = {anchor_of(heading["text"]) for heading in HEADING.finditer(target.read_text())}
            if anchor not in headings:
                found.append(match["to"])
    return found


def test_every_link_of_a_page_leads_somewhere() -> None:
    broken = {str(page.relative_to(ROOT)): broken_links(page) for page in tracked("*.md")}
    assert not {page: links for page, links in broken.items() if links}


@pytest.mark.parametrize("link", ["nowhere.md", "here.md#not-there", "#not-there", "folder/"])
def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path, link: str) -> None:
    page = tmp_path / "here.md"
    page.write_text(
        f"# There, `too`\n[a](here.md#there-too) [b](#there-too) [c](https://x) `[d](e)` [f]({link})"
    )
    assert broken_links(page) == [link]
