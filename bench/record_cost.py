"""What it takes until a change of the workers' store is in a job's record, in an etcd on this machine's disk.

    python -P bench/record_cost.py

Some writers add to the store, each waits for its own addition before the next: as workers do that make
process groups, on a job of which CPU images are kept.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / folder)
    for folder in ("tests/harness", "tests/harness/hosts", "tests/harness/processes", "bench")
]

from etcd_server import running_etcd  # noqa: E402

from understudy.recovery.base.control import pb  # noqa: E402
from understudy.recovery.config.cluster_options import parse_endpoints  # noqa: E402
from understudy.recovery.membership.job_leadership import Leading, claim  # noqa: E402
from understudy.recovery.membership.stores.etcd import EtcdStore  # noqa: E402
from understudy.recovery.record.job_record import JobRecord  # noqa: E402
from understudy.recovery.record.log import RecordLog  # noqa: E402
from understudy.recovery.rendezvous.store import Store  # noqa: E402

WRITERS = {1: 2000, 64: 100, 1000: 10}
"""How many at once, and how many additions each makes in a row."""


async def write(store: Store, record: JobRecord, writers: int, each: int) -> None:
    """One row of the result."""
    took: list[float] = []

    async def work(writer: int) -> None:
        for number in range(each):
            began = time.perf_counter()
            await store.add(f"key-{writer}", 1, f"{writers}-{writer}-{number}")
            await record.settle()
            took.append(time.perf_counter() - began)

    began, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work(writer) for writer in range(writers)))
    wall_s, processor_s = time.perf_counter() - began, time.process_time() - processor
    took.sort()
    median, late = 1e3 * statistics.median(took), 1e3 * took[int(0.99 * len(took))]
    print(
        f"{writers:5} at once: {len(took) / wall_s:7.0f} additions a second, median {median:.2f} ms, "
        f"99th percentile {late:.1f} ms, {1e6 * processor_s / len(took):.0f} us of a processor each"
    )


async def main(url: str) -> None:
    cluster = EtcdStore(parse_endpoints(url))
    claimed = await claim(cluster, "bench", "job", "host", 2)
    leading = Leading(cluster, "bench", "job", claimed.record, claimed.leadership)
    leads = asyncio.ensure_future(leading.run(lambda host: None))
    await leading.holds.wait()
    store, log = Store(), RecordLog(cluster, "bench", "job", claimed.record.token)
    record = JobRecord("job", log, leading, lambda: store, lambda: pb.JournaledJob(name="job"))
    await record.begin()
    for writers, each in WRITERS.items():
        await write(store, record, writers, each)
    leads.cancel()
    await cluster.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, running_etcd(Path(folder)) as server:
        asyncio.run(main(server.url))
