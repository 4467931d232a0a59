"""`make campaign`: campaigns/full.yaml, and docs/campaign.md from it; with --more or --quick those.

Interrupted or killed, the same command goes on.  Exit status 1 if a gate is failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from training_run import ROOT, installed

RESULTS = ROOT / "bench" / "results"
PAGES = {"full": "campaign.md", "more": "campaign-more.md"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--more", action="store_true", help="hangs, storage, other numbers of ranks, intervals"
    )
    which.add_argument("--quick", action="store_true", help="a few minutes; writes no page for docs/")
    arguments = parser.parse_args()
    name = "quick" if arguments.quick else "more" if arguments.more else "full"
    place = RESULTS / f"campaign-{name}"
    file = ROOT / "campaigns" / f"{name}.yaml"
    command = [*installed("recoveryctl"), "campaign", "run", str(file), "--out", str(place)]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status in (0, 1) and name in PAGES:
        from understudy.campaigns.report import markdown

        page = ROOT / "docs" / PAGES[name]
        page.write_text(markdown(place, RESULTS))
        print(page)
    return status


if __name__ == "__main__":
    sys.exit(main())
