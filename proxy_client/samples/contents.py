"""What each minibatch has brought to the device: the digests that the client makes as it writes the log."""

from __future__ import annotations

import itertools

from understudy.proxy_client.samples import lines
from understudy.proxy_client.samples.recorder import Recorder


class Contents:
    """Of this process; minibatches are numbered from 1, as in drills and in `recoveryctl status`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._number = itertools.count(1)

    def stepped(self) -> None:
        """Behind each optimizer step's commit."""
        from understudy.proxy_client import _client

        for payloads, size, digest in _client.take_minibatch_contents():
            self._note(payloads, size, digest)

    def end(self) -> None:
        """The script has ended."""
        from understudy.proxy_client import _client

        self.stepped()
        number = next(self._number)
        payloads, size, digest = _client.open_minibatch_content()
        self._recorder.note(lambda line: lines.ending(line, number, payloads, size, digest))

    def _note(self, payloads: int, size: int, digest: int) -> None:
        number = next(self._number)
        self._recorder.note(lambda line: lines.minibatch(line, number, payloads, size, digest))
