"""The control plane's messages: a file for each service, and one page with every request."""

from __future__ import annotations

import re
from collections.abc import Iterator

from places import ROOT

from understudy.protos import control_pb2, services

FILES = {path.stem: path.read_text() for path in sorted((ROOT / "protos").glob("*.proto"))}
PAGE = (ROOT / "docs" / "protocol.md").read_text()
MOST_LINES = 200
Row = tuple[str, str, str, str]


def described(kind: str) -> list[tuple[str, str]]:
    """Names of all services or messages, and the file of each."""
    return [
        (name, file) for file, text in FILES.items() for name in re.findall(rf"^{kind} (\w+)", text, re.M)
    ]


def requests() -> Iterator[Row]:
    """Service, name, what it takes and what it gives, of each one in the files."""
    for text in FILES.values():
        for service, body in re.findall(r"^service (\w+) \{(.*?)^\}", text, re.M | re.S):
            for row in re.findall(r"rpc (\w+)\((?:stream )?(\w+)\) returns \((?:stream )?(\w+)\)", body):
                yield (service, *row)


def told() -> Iterator[Row]:
    """The same, of each one on the page."""
    for section in PAGE.split("\n## ")[1:]:
        if service := re.match(r"`(\w+)`", section):
            for row in re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \|", section, re.M):
                yield (service[1], *row)


def test_one_page_has_every_request_and_where_it_is_described() -> None:
    assert list(told()) != []
    assert sorted(told()) == sorted(requests())
    for service, file in described("service"):
        (section,) = [one for one in PAGE.split("\n## ") if one.startswith(f"`{service}`")]
        assert f"[{file}.proto]" in section.splitlines()[0]


def test_no_file_of_messages_is_long_and_one_has_them_all() -> None:
    assert {name: text.count("\n") for name, text in FILES.items() if text.count("\n") > MOST_LINES} == {}
    messages = described("message")
    assert len({name for name, _ in messages}) == len(messages) > 150
    assert [name for name, _ in messages if not hasattr(control_pb2, name)] == []


def test_every_service_can_be_asked_and_served() -> None:
    wanted = {
        name
        for service, _ in described("service")
        for name in (f"{service}Stub", f"{service}Servicer", f"add_{service}Servicer_to_server")
    }
    assert wanted == set(services.__all__)


def test_every_message_is_used() -> None:
    """By another one, or by the product."""
    product = "".join(
        path.read_text()
        for folder in ("recovery", "proxy_client", "proxy_server")
        for path in (ROOT / folder).rglob("*.py")
    )
    every_file = "".join(FILES.values())
    unused = [
        name
        for name, _ in described("message")
        if len(re.findall(rf"\b{name}\b", every_file)) == 1 and not re.search(rf"\bpb\.{name}\b", product)
    ]
    assert unused == []
