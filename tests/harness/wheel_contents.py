"""What the wheel has put into the environment of this Python: one package, and nothing beside it.

Exit status 1, with a sentence, if there is more.
"""

import sys
from importlib import metadata

DISTRIBUTION, PACKAGE = "torch-understudy", "understudy"


def main() -> str:
    """Empty, or what is wrong."""
    distribution = metadata.distribution(DISTRIBUTION)
    files = [path.parts for path in distribution.files or []]
    tops = {parts[0] for parts in files} - {".."}
    beside = {top for top in tops if top != PACKAGE and not top.endswith(".dist-info")}
    commands = {parts[-1] for parts in files if parts[0] == ".."}
    named = {point.name for point in distribution.entry_points if point.group == "console_scripts"}
    if beside or PACKAGE not in tops:
        return f"the wheel puts {sorted(tops)} into site-packages, and is to put {PACKAGE} there alone"
    if commands != named:
        return f"the wheel puts {sorted(commands)} beside Python, and is to put {sorted(named)} there"
    return ""


if __name__ == "__main__":
    sys.exit(main() or 0)
