"""JSON that other processes wrote, read as hostile: it has the form that is known, or is refused."""

from __future__ import annotations

from typing import TypeVar

import msgspec

Known = TypeVar("Known")


class Line(msgspec.Struct, frozen=True, tag=str.lower, forbid_unknown_fields=True):
    """What processes of ours say to each other: a line of JSON with the name of its class, and its fields."""

    def encode(self) -> bytes:
        """With its end."""
        return msgspec.json.encode(self) + b"\n"


def read(content: bytes, form: msgspec.json.Decoder[Known]) -> Known:
    """Raises ValueError with a sentence."""
    try:
        return form.decode(content)
    except (msgspec.MsgspecError, RecursionError) as problem:
        raise ValueError(f"{content[:200]!r} is not what it should be: {problem}") from problem


def convert(plain: object, form: type[Known]) -> Known:
    """The same, of what is objects, lists, texts and numbers already; raises ValueError."""
    try:
        return msgspec.convert(plain, form)
    except msgspec.MsgspecError as problem:
        raise ValueError(str(problem)) from problem


def read_plain(content: bytes) -> dict[str, object]:
    """An object of whatever form; raises ValueError."""
    return read(content, _PLAIN)


_PLAIN = msgspec.json.Decoder(dict[str, object])
