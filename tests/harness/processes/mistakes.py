"""Our C++ sources with one mistake each: a test that is blind to it shows nothing by passing.

tests/csrc/CMakeLists.txt builds a program with each of them: `mistakes.py list`, `mistakes.py write NAME TO`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COMMIT_RULE = "recovery/snapshots/csrc/format/commit_rule.h"
INDEX_RING = "recovery/snapshots/csrc/slots/index_ring.h"
SLOT_TABLE = "recovery/snapshots/csrc/slots/slot_table.h"
COPY_LIST = "proxy_server/csrc/snapshots/copy_list.cpp"
DIGEST = "replay/csrc/digest/digest.h"
KEPT_BLOCKS = "proxy_server/csrc/driver/kept_blocks.cpp"


@dataclass(frozen=True)
class Mistake:
    """A place in a source file of a program of tests/csrc, as it is and as it would be wrong."""

    program: str
    name: str
    file: str
    right: str
    wrong: str
    scenario: str = ""  # of slot_model, which tells it apart
    violation: str = ""  # what is said of it there

    @property
    def built(self) -> str:
        """The name of the program that is built with it."""
        return f"{self.program}_{self.name}"

    def text(self) -> str:
        """The whole file, with the mistake. Raises where the right text is not there exactly once."""
        text = (ROOT / self.file).read_text()
        if text.count(self.right) != 1:
            raise ValueError(f"{self.file} has {self.right!r} {text.count(self.right)} times, not once")
        return text.replace(self.right, self.wrong)


MISTAKES = (
    Mistake(
        "slot_model", "slot_in_doubt_is_given_back", SLOT_TABLE,
        right="doubtful_.push_back(slot);",
        wrong="give_back(slot);",
        scenario="each-releases-2-2-failing", violation="not whole",
    ),
    Mistake(
        "slot_model", "free_slot_is_not_told_of", SLOT_TABLE,
        right="free_.push(slot);\n    freed_.raise();",
        wrong="free_.push(slot);",
        scenario="each-releases-2-2", violation="waits",
    ),
    Mistake(
        "slot_model", "slot_that_stays_in_doubt_is_not_told_of", SLOT_TABLE,
        right="freed_.raise();  // it stays",
        wrong=";  // it stays",
        scenario="each-releases-2-2-failing", violation="waits",
    ),
    Mistake(
        "slot_model", "older_snapshot_becomes_the_latest", COMMIT_RULE,
        right="r.sequence > next.latest_sequence",
        wrong="true",
        scenario="other-releases-3-2", violation="latest is not the latest",
    ),
    Mistake(
        "slot_model", "last_to_ask_is_the_newest", COMMIT_RULE,
        right="a.serial != b.serial ? a.serial > b.serial : a.sequence > b.sequence",
        wrong="a.sequence > b.sequence",
        scenario="each-releases-3-2", violation="released stays",
    ),
    Mistake(
        "slot_model", "snapshot_below_the_floor_is_registered", COMMIT_RULE,
        right="snapshot.serial >= now.floor",
        wrong="true",
        scenario="each-releases-3-2", violation="is durable",
    ),
    Mistake(
        "slot_model", "superblock_is_not_written", SLOT_TABLE,
        right="put(change, write, !lazy_);",
        wrong=";",
        scenario="each-releases-2-2", violation="is durable",
    ),
    Mistake(
        "slot_model", "superblock_that_is_durable_is_written_over", SLOT_TABLE,
        right="change.next.epoch % 2 == durable_epoch_ % 2",
        wrong="change.next.epoch == durable_epoch_",
        scenario="lazy-each-releases-3-2", violation="no superblock counts",
    ),
    Mistake(
        "slot_model", "slot_is_free_before_the_superblock_is_durable", SLOT_TABLE,
        right="left_.insert(left_.end(), change.freed.begin(), change.freed.end());",
        wrong="for (const uint32_t slot : change.freed) give_back(slot);",
        scenario="lazy-other-releases-3-2-failing", violation="registered is in the queue",
    ),
    Mistake(
        "slot_model", "sync_is_taken_for_that_of_a_later_superblock", SLOT_TABLE,
        right="written == written_ && whole_",
        wrong="written <= written_ && whole_",
        scenario="lazy-each-releases-3-2", violation="no superblock counts",
    ),
    Mistake(
        "slot_model", "newest_is_dropped", COMMIT_RULE,
        right="r.serial < floor && r.sequence != newest.sequence",
        wrong="r.serial < floor",
        scenario="other-releases-3-2", violation="newest never goes back",
    ),
    Mistake(
        "slot_model", "head_is_stored_without_comparing", INDEX_RING,
        right="if (!head_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) continue;",
        wrong="head_.store(at + 1, std::memory_order_relaxed);",
        scenario="ring-2-2", violation="more numbers came back",
    ),
    Mistake(
        "copy_stress", "settled_row_is_not_waited_for", COPY_LIST,
        right="piece < first_[row + 1]; piece++) wait_for(piece);",
        wrong="false;) wait_for(piece);",
    ),
    Mistake(
        "copy_stress", "piece_is_taken_without_exchanging", COPY_LIST,
        right="!piece.state.compare_exchange_strong(state, kCopying, std::memory_order_acquire)",
        wrong="piece.state.load() != state",
    ),
    Mistake(
        "copy_stress", "digest_of_a_row_skips_what_another_thread_took", COPY_LIST,
        right="ours && (piece == first_[number] || piece == digesting.next)",
        wrong="ours",
    ),
    Mistake(
        "digest_pieces", "last_byte_of_a_piece_is_left_out", DIGEST,
        right="stream_.add(data, bytes);",
        wrong="stream_.add(data, bytes - (bytes > 1));",
    ),
    Mistake(
        "digest_pieces", "each_piece_begins_anew", DIGEST,
        right="stream_.add(data, bytes);",
        wrong="stream_ = xxh3::Stream(), stream_.add(data, bytes);",
    ),
    Mistake(
        "kept_blocks", "block_is_given_to_two", KEPT_BLOCKS,
        right="return {kept.blocks[--kept.count], kPutters[size]};",
        wrong="return {kept.blocks[kept.count - 1], kPutters[size]};",
        violation="double-free",
    ),
    Mistake(
        "kept_blocks", "block_is_smaller_than_asked_for", KEPT_BLOCKS,
        right="return {std::aligned_alloc(kStep, (size + 1) * kStep), kPutters[size]};",
        wrong="return {std::aligned_alloc(kStep, (size + 1) * kStep), kPutters[(size + 1) % kSizes]};",
        violation="heap-buffer-overflow",
    ),
    Mistake(
        "kept_blocks", "blocks_are_kept_without_end", KEPT_BLOCKS,
        right="here->sizes_[size].count < kMost)",
        wrong="here->sizes_[size].count < 2 * kMost)",
        violation="out of bounds",
    ),
    Mistake(
        "kept_blocks", "block_is_put_with_another_threads", KEPT_BLOCKS,
        right="thread_local KeptBlocks*",
        wrong="KeptBlocks*",
        violation="a thread that keeps no blocks has one",
    ),
    Mistake(
        "kept_blocks", "kept_blocks_are_lost_with_their_thread", KEPT_BLOCKS,
        right="of_this_thread = nullptr;\n  give_back();",
        wrong="of_this_thread = nullptr;",
        violation="LeakSanitizer",
    ),
)  # fmt: skip


def mistakes_of(program: str) -> list[Mistake]:
    """All that are made in a program."""
    return [mistake for mistake in MISTAKES if mistake.program == program]


def main(words: list[str]) -> None:
    if words == ["list"]:
        sys.stdout.writelines(f"{m.program} {m.name} {m.file}\n" for m in MISTAKES)
        return
    [_, name, to] = words
    [mistake] = [m for m in MISTAKES if m.name == name]
    text, made = mistake.text(), Path(to)
    # A file that stays the same keeps its time, and is not compiled again: another mistake was edited.
    if not made.exists() or made.read_text() != text:
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
