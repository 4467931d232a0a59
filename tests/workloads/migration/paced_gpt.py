"""The example char_gpt, which does as many steps as a file says.

paced_gpt.py LIMIT OPTIONS OF CHAR_GPT
"""

import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "char_gpt.py"

limit = Path(sys.argv.pop(1))
done = 0


def wait_at_the_limit(*_: object) -> None:
    global done
    done += 1
    while done >= int(limit.read_text()):
        time.sleep(0.01)


register_optimizer_step_post_hook(wait_at_the_limit)
sys.argv[0] = str(SCRIPT)
sys.path.insert(0, str(SCRIPT.parent))
runpy.run_path(str(SCRIPT), run_name="__main__")
