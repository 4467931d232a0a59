"""Data and state of a training that is restarted, and goes on with exactly the next sample (paper 002).

`ResumableSampler` says which samples come next, on as many ranks as there are; `StatePack` takes and gives
back all state; `SampleLog` writes down which samples were used, and `python -m understudy.data check` judges
it.
"""

from .checkpoint_files import CheckpointError
from .plan import EpochPlan
from .sample_log import SampleLog
from .sampler import ResumableSampler, Step
from .state_pack import Restored, StatePack
from .writing import Blocking, Overlapped, blocking, overlapped

__all__ = [
    "Blocking",
    "CheckpointError",
    "EpochPlan",
    "Overlapped",
    "Restored",
    "ResumableSampler",
    "SampleLog",
    "StatePack",
    "Step",
    "blocking",
    "overlapped",
]
