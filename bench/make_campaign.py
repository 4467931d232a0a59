"""`make campaign`: campaigns/full.yaml in full, and docs/campaign.md from it; --quick: campaigns/quick.yaml.

Interrupted or killed, the same command goes on.  Exit status 1 if a gate is failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from training_run import ROOT, installed

RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "campaign.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few minutes; writes no page for docs/")
    arguments = parser.parse_args()
    name = "quick" if arguments.quick else "full"
    place = RESULTS / f"campaign-{name}"
    file = ROOT / "campaigns" / f"{name}.yaml"
    command = [*installed("recoveryctl"), "campaign", "run", str(file), "--out", str(place)]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status in (0, 1) and not arguments.quick:
        from understudy.campaigns.report import markdown

        PAGE.write_text(markdown(place, RESULTS))
        print(PAGE)
    return status


if __name__ == "__main__":
    sys.exit(main())
