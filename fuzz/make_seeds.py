"""Writes the first inputs of both fuzz targets: good logs, in the layout of fuzz/input.h.

python fuzz/make_seeds.py FOLDER
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

INPUT = struct.Struct("<BBHHHHH4I4x4Q6Q2Q3Q2Q")
RECORD = struct.Struct("<IHHQQ")
SEGMENT = 4096
REGION = 520  # of templates
DICTIONARY = 16 * REGION
(PAD, OPERATOR, OPERATOR_SYNC, FREE, ALLOCATE, RESIZE, HOST_TO_DEVICE, DEVICE_TO_HOST, SEED, GENERATOR_GET,
 GENERATOR_SET, GENERATOR_FREE, PHASE, COMMIT, SETTING, COMMUNICATOR_CREATE, COMMUNICATOR_DESTROY, COLLECTIVE,
 SYNCHRONIZE, END, MEMORY) = range(21)  # fmt: skip
NOT_SHADOWED = 2**64 - 1
AREA = 8192 + 4096  # bytes of the shadow area in all of these
MAGIC_AND_BYTES, DIGEST = 1, 2


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def template(name: bytes, key: list[int], outputs: list[int]) -> bytes:
    padded = name + b"\0" * (-len(name) % 8)
    body = padded + words(*key, *outputs)
    return struct.pack("<4I", 16 + len(body), len(name), len(key), len(outputs)) + body


@dataclass
class Log:
    """Records one after the other, numbered, with a pad where one does not fit its segment."""

    content: bytes = b""
    index: int = 0
    first: int = 0
    dictionary: bytes = b""
    shadow: bytes = b""
    fields: dict[str, int] = field(default_factory=dict)

    def append(self, kind: int, aux: int, *body: int, frees: tuple[int, ...] = ()) -> None:
        size = RECORD.size + 8 * (len(frees) + len(body))
        rest = SEGMENT - len(self.content) % SEGMENT
        if rest < size:
            self._put(rest, PAD, 0, b"", 0)
        self._put(size, kind, aux, words(*frees, *body), len(frees))

    def _put(self, size: int, kind: int, aux: int, body: bytes, frees: int) -> None:
        header = RECORD.pack(size, kind, frees, self.first + self.index, aux)
        self.content += header + body + b"\0" * (size - len(header) - len(body))
        self.index += 1

    def encode(self, **fields: int) -> bytes:
        f = {"segments": 3, "tail": len(self.content), "tail_index": self.index, **self.fields, **fields}
        head = INPUT.pack(
            f["segments"], f.get("fill", 0), 512, 8192, len(self.dictionary), len(self.content),
            f.get("mend", 0),
            *(f.get(f"segment_{i}", i) for i in range(4)),
            f.get("page_bytes", 0), f.get("segment_bytes", 0), f.get("segment_count", 0),
            f.get("reply_bytes", 0),
            f["tail"], f["tail_index"], f.get("dictionary_tail", len(self.dictionary)), f.get("cursor", 0),
            f.get("freed", 0),
            f.get("commits", 0),
            f.get("from", 0), f.get("from_index", 0),
            f.get("commit", 0), f.get("manifest_offset", 0), f.get("manifest_bytes", 0),
            f.get("dictionary_begin", 0), f.get("dictionary_bytes", 0),
        )  # fmt: skip
        return head + self.dictionary + self.content + self.shadow


def records() -> dict[str, bytes]:
    every = Log(dictionary=template(b"aten::add_.Tensor", [1 | 6 << 8 | 1 << 16, 0, 4, 1], [0]))
    every.append(ALLOCATE, 1, 16)
    every.append(HOST_TO_DEVICE, 1, 0, 16, 1, 2)
    every.append(OPERATOR, 0, 1, 1)
    every.append(OPERATOR_SYNC, 0, 1, 0, 1, 1, 9)
    every.append(FREE, 0, frees=(1, 2, 3))
    every.append(RESIZE, 1, 32, frees=(4,))
    every.append(DEVICE_TO_HOST, 1, 2, 0, 0, 16)
    every.append(SEED, 0, 7)
    every.append(GENERATOR_GET, 0, 3, 0)
    every.append(GENERATOR_SET, 0, 12, 1, 2)
    every.append(GENERATOR_FREE, 0)
    every.append(PHASE, 1)
    every.append(COMMIT, 0)
    every.append(SETTING, 0, 2)
    every.append(COMMUNICATOR_CREATE, 1, 1, 2, 0, 2, 1000)
    tensor = (1 | 6 << 8 | 1 << 16, 1, 0, 4, 1)
    every.append(COLLECTIVE, 1, 1, 0, 0, 0, 1, 0, 1, 0, *tensor)
    every.append(COLLECTIVE, 1, 9, 0, 0, 0, 2, 1, 1, 4, *tensor, *tensor, 2, 2, 2, 2)
    every.append(COMMUNICATOR_DESTROY, 1)
    every.append(MEMORY, 0, 4, 0)
    every.append(SYNCHRONIZE, 0, 5, 0)
    every.append(END, 0, 6, 0)
    long = Log()
    for i in range(30):
        long.append(HOST_TO_DEVICE, i, 0, 400, *range(50))
    ring = Log()
    for i in range(32):
        ring.append(SEED, i, *[7] * 61)  # 512 bytes: no room is left
    later = Log(first=100)
    for i in range(8):
        later.append(SEED, i, i)
    # An argument of each kind, between tensors.
    tensor_word = 1 | 6 << 8 | 1 << 16
    key = [tensor_word, 0, 4, 1, 0, 2, 3 | 6 << 8, 4 | 2 << 8, 2, tensor_word, 0, 4, 1, 6, 7, 7, 8 | 1 << 8,
           9 | 3 << 8, 0x636261, 10, 11, 12 | 2 << 8, 1, 2, 13 | 1 << 8, 16, 17, 0, 18,
           20 | 4 << 8 | 1 << 16, 4, 21 | 6 << 8 | 1 << 16]  # fmt: skip
    arguments = Log(dictionary=template(b"aten::all", key, [1 | 1 << 8, 6 << 8 | 1 << 16, 0, 16, 4, 1]))
    arguments.append(OPERATOR, 0, 1, 0, 2, 0, 5, 3, 0, 0, *tensor, *tensor, *tensor, 1, *tensor, 4, 1, 0, 9)
    # Each by itself: the first one that is refused ends the reading.
    outside = {}
    for aux in (2**64 - 8, 2**64 - 16, 2**64 - 24, len(every.dictionary) - 8, len(every.dictionary), 2**32):
        log = Log(dictionary=every.dictionary)
        log.append(OPERATOR, aux, 1)
        outside[f"template-{aux:x}"] = log.encode(fill=0x78)
    # The first region is used for the second time; what the dictionary claims to hold is wrong in the others.
    turned = {}
    good = {"dictionary_begin": REGION, "dictionary_tail": DICTIONARY + 8 * 12}
    for name, aux, fields in (
        ("again", DICTIONARY, good),
        ("gone", 0, good),
        ("half-gone", REGION - 8, good),
        ("far-ahead", 3 * DICTIONARY, good),
        ("begins-behind-its-end", DICTIONARY, {**good, "dictionary_begin": 2**64 - 8}),
        ("holds-two-turns", 0, {**good, "dictionary_begin": 0}),
        ("never-ends", 2**64 - DICTIONARY, {**good, "dictionary_tail": 2**64 - 8}),
        ("odd", DICTIONARY, {**good, "dictionary_bytes": 8}),
        ("too-large", DICTIONARY, {**good, "dictionary_bytes": 1 << 40}),
        ("nothing", DICTIONARY, {**good, "dictionary_bytes": DICTIONARY}),
    ):
        log = Log(dictionary=every.dictionary)
        log.append(OPERATOR, aux, 1)
        turned[f"turned-{name}"] = log.encode(fill=0x78, **fields)
    return {
        **outside,
        **turned,
        "every-kind": every.encode(),
        "every-argument": arguments.encode(fill=0x78),
        "full-page": every.encode(fill=0x78),
        "pads": long.encode(),
        "shuffled": long.encode(segment_0=0, segment_1=1, segment_2=3, segment_3=2),
        "recycled": later.encode(
            **{"from": 5 * SEGMENT * 4, "from_index": 100, "freed": 20, "tail": 20 * SEGMENT + 256}
        ),
        "empty": Log().encode(),
        # A ring that is read round and round.
        "endless": ring.encode(tail=2**63),
        "odd-segments": every.encode(segment_bytes=4096 ^ 4100, segment_count=4 ^ 2, **{"from": 4100}),
        "freed-too-much": long.encode(freed=2**63),
    }


def manifest(
    buffers: list[tuple[int, int, int, int, int]],
    generators: list[tuple[int, int, int]],
    communicators: list[tuple[int, ...]],
    settings: list[tuple[int, int]],
) -> bytes:
    rows = [*buffers, *generators, *communicators, *settings]
    body = b"".join(words(*row) for row in rows)
    counts = (len(buffers), len(generators), len(communicators), len(settings))
    return words(0, 0, *counts, 64 + len(body), 0) + body


def manifests() -> dict[str, bytes]:
    def log(content: bytes, **fields: int) -> bytes:
        made = Log(shadow=content)
        size = len(content) - fields.get("manifest_offset", 0)
        given = {
            "commit": 5,
            "commits": 7,
            "manifest_bytes": size,
            "mend": MAGIC_AND_BYTES | DIGEST,
            **fields,
        }
        return made.encode(**given)

    full = manifest(
        [(1, 100, 9, 1024, 1), (2, 64, 0, NOT_SHADOWED, 2), (3, 0, 0, 1152, 0)],
        [(0, 40, 1216)],
        [(1, 1, 2, 0, 2, 10, 1000)],
        [(0, 2), (1, 1)],
    )
    nothing = manifest([], [], [], [])
    return {
        "full": log(full),
        "nothing": log(nothing),
        "further": log(b"\0" * 2048 + full, manifest_offset=2048),
        "unknown-commit": log(full, commits=200),
        "none": log(b"", manifest_bytes=0),
        # Shadows that end where the area ends, but not on a block's border; and one within another.
        "last-bytes": log(manifest([(1, 8, 0, AREA - 8, 0)], [], [], [])),
        "one-place": log(manifest([(1, 8, 0, 1024, 0), (2, 1024, 0, 1024, 0)], [], [], [])),
        "overlap": log(manifest([(1, 1024, 0, 1024, 0), (2, 8, 0, 1088, 0)], [(0, 100, 1984)], [], [])),
        "full-page": log(full, fill=0x78),
    }


def main() -> None:
    for target, seeds in (("record_reader", records()), ("manifest", manifests())):
        folder = Path(sys.argv[1]) / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in seeds.items():
            (folder / f"seed-{name}").write_bytes(content)


if __name__ == "__main__":
    main()
