"""The cluster's store: its rules are the real ones, the way there is long, and now and then closed."""

from __future__ import annotations

import asyncio
import random

from hosts_simulation.lives import LIFE

from understudy.recovery.membership.stores.embedded import EmbeddedStore
from understudy.recovery.membership.stores.store import Unreachable

ASKED_S = 5.0
LOST = 0.02
"""Share of the changes that are made, and of which nobody hears."""


class Etcd(EmbeddedStore):
    """As any host sees it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chance: random.Random) -> None:
        super().__init__(loop.time)
        self._loop, self._chance = loop, chance
        self.rough = False
        """Whether an answer may get lost."""
        self.away_until = 0.0
        self.cut_off: set[str] = set()
        """Hosts that do not reach it."""

    async def _pass_time(self) -> None:
        """Whatever is asked begins with it."""
        await asyncio.sleep(self._chance.uniform(0.001, 0.02))
        life = LIFE.get()
        if self._loop.time() < self.away_until or (life is not None and life.host in self.cut_off):
            await asyncio.sleep(ASKED_S)
            raise Unreachable("no answer")
        await super()._pass_time()

    async def _tell(self) -> None:
        """Whatever is changed ends with it."""
        await super()._tell()
        if self.rough and self._chance.random() < LOST:
            await asyncio.sleep(ASKED_S)
            raise Unreachable("no answer, though it was done")
