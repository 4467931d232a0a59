"""The network between proxyds: real requests by the real stubs, over channels that lose them.

As TCP does, a link that is cut holds back what is under way; what waits for KEEPALIVE_S is broken.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc

from hosts_simulation.lives import LIFE, HostsLoop, Life

KEEPALIVE_S = 10.0
_END = object()


class Failed(grpc.RpcError):  # type: ignore[misc]
    """A call that failed, as grpc.aio tells of it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class Aborted(Exception):
    """A servicer has ended its call."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.failed = Failed(code, details)


class Context:
    """What a servicer is given."""

    def __init__(self, caller: str) -> None:
        self._caller = caller

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_common_name": [self._caller.encode()]}

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code, details)


class Server:
    """What a proxyd serves to other hosts."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The other form is enough."""

    def add_registered_method_handlers(self, service: str, methods: dict[str, Any]) -> None:
        """As grpc's generated code calls it."""
        self.methods.update({f"/{service}/{name}": method for name, method in methods.items()})


class Network:
    """Between all hosts."""

    def __init__(self, loop: HostsLoop, chance: random.Random, complain: Callable[[str], None]) -> None:
        self.loop, self.chance, self.complain = loop, chance, complain
        self.servers: dict[str, tuple[Life, Server]] = {}
        self.rough = True
        """Whether anything goes wrong by itself."""
        self.lost = 0
        self.gone: set[str] = set()
        """Hosts whose links nothing heals, until they are taken out."""
        self._cut: dict[frozenset[str], list[Callable[[], None]]] = {}
        self._since: dict[frozenset[str], float] = {}
        self._calls: set[Call] = set()

    # ------------------------------------------------------------------ links
    def cut(self, one: str, other: str) -> None:
        """Until healed."""
        link = frozenset((one, other))
        if link not in self._cut:
            self._cut[link] = []
            self._since[link] = since = self.loop.time()
            self.loop.outside(KEEPALIVE_S, self._break_if_still_cut, link, since)

    def heal(self, one: str, other: str) -> None:
        """What waited arrives after all, if it has not been given up."""
        if self.gone & {one, other}:
            return
        for arrive in self._cut.pop(frozenset((one, other)), []):
            self.loop.outside(self.delay(), arrive)

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cut

    def heal_all(self) -> None:
        for link in list(self._cut):
            self.heal(*link)

    def _break_if_still_cut(self, link: frozenset[str], since: float) -> None:
        if link in self._cut and self._since[link] == since:
            self._cut[link].clear()
            for call in [one for one in self._calls if one.link == link]:
                call.break_off("keepalive timed out")
            # Whoever asks from now on cannot connect.
            self.loop.outside(KEEPALIVE_S, self._break_if_still_cut, link, since)

    def delay(self) -> float:
        if self.rough and self.chance.random() < 0.02:
            return self.chance.uniform(0.05, 25.0)
        return self.chance.uniform(0.0005, 0.02)

    def carry(self, link: frozenset[str], way: deque[Callable[[], None]], what: Callable[[], None]) -> None:
        """Something of a call to its other end; what goes one `way` keeps its order."""
        way.append(what)

        def arrive() -> None:
            if way:
                way.popleft()()

        def there() -> None:
            if link in self._cut:
                self._cut[link].append(arrive)
            else:
                arrive()

        self.loop.outside(self.delay(), there)

    # ------------------------------------------------------------------ calls
    def channel(self, source: str, destination: str) -> Channel:
        """From one host to another."""
        return Channel(self, source, destination)

    def begun(self, call: Call) -> None:
        self._calls.add(call)

    def over(self, call: Call) -> None:
        self._calls.discard(call)

    def died(self, life: Life) -> None:
        """Its kernel closes its connections, each with all that goes over it."""
        delays: dict[frozenset[str], float] = {}
        for call in [one for one in self._calls if life in (one.client, one.served_by)]:
            if call.link not in delays:
                delays[call.link] = self.delay()
            self.loop.outside(delays[call.link], call.peer_died)


class Channel:
    """As grpc.aio.Channel: what generated stubs use of it."""

    def __init__(self, network: Network, source: str, destination: str) -> None:
        self._network, self._source, self._destination = network, source, destination

    def unary_unary(self, path: str, **codec: Any) -> Callable[..., Call]:
        return lambda request, timeout=None, wait_for_ready=None: Call(
            self._network, self._source, self._destination, path, codec, timeout, request=request
        )

    unary_stream = unary_unary

    def stream_unary(self, path: str, **codec: Any) -> Callable[..., Call]:
        return lambda requests, timeout=None, wait_for_ready=None: Call(
            self._network, self._source, self._destination, path, codec, timeout, requests=requests
        )

    stream_stream = stream_unary


class Call:
    """One request, or one conversation."""

    def __init__(
        self, network: Network, source: str, destination: str, path: str, codec: dict[str, Any],
        timeout: float | None, request: Any = None, requests: AsyncIterator[Any] | None = None,
    ) -> None:  # fmt: skip
        self.link = frozenset((source, destination))
        self.client = LIFE.get()
        self.served_by: Life | None = None
        self._network, self._source, self._destination, self._path = network, source, destination, path
        self._codec = codec
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        self._asked: asyncio.Queue[Any] = asyncio.Queue()
        self._handler: asyncio.Task[Any] | None = None
        self._up: deque[Callable[[], None]] = deque()
        self._down: deque[Callable[[], None]] = deque()
        self._done = self._served = False
        self._timer: asyncio.TimerHandle | None = None
        self._pump: asyncio.Task[Any] | None = None
        network.begun(self)
        if timeout is not None:
            self._timer = network.loop.outside(timeout, self._ran_out)
        data = codec["request_serializer"](request) if requests is None else b""
        if network.rough and network.chance.random() < 0.01 and requests is None:
            network.lost += 1  # with its connection: the client learns of it, the server does not
            network.loop.outside(network.delay(), self.break_off, "connection reset")
        else:
            self._send_up(lambda: self._arrive(data, requests is not None))
        if requests is not None:
            self._pump = asyncio.get_running_loop().create_task(self._send(requests))

    # ------------------------------------------------------------------ the client's end
    def __await__(self) -> Any:
        return self._one().__await__()

    async def _one(self) -> Any:
        try:
            return await anext(self)
        except StopAsyncIteration:
            raise Failed(grpc.StatusCode.INTERNAL, "no reply") from None

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        if self._done and self._replies.empty():
            raise StopAsyncIteration
        try:
            reply = await self._replies.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if reply is _END:
            raise StopAsyncIteration
        if isinstance(reply, BaseException):
            raise reply
        return self._codec["response_deserializer"](reply)

    def cancel(self) -> None:
        """The client is not interested any more."""
        if not self._done:
            self._end(asyncio.CancelledError())
            self._send_up(self._cancel_handler)

    def _end(self, how: Any) -> None:
        if self._done:
            return
        self._done = True
        if self._timer is not None:
            self._timer.cancel()
        if self._pump is not None:
            self._pump.cancel()
        self._replies.put_nowait(how)
        if self._served or self.served_by is None:
            self._network.over(self)

    def _ran_out(self) -> None:
        self._end(Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
        self._send_up(self._cancel_handler)

    def break_off(self, why: str) -> None:
        """Both ends notice."""
        self._end(Failed(grpc.StatusCode.UNAVAILABLE, why))
        self._cancel_handler()

    def peer_died(self) -> None:
        """One end is not there any more."""
        if self.client is not None and not self.client.alive:
            self._cancel_handler()
            self._network.over(self)
        else:
            self._end(Failed(grpc.StatusCode.UNAVAILABLE, "Socket closed"))

    async def _send(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            data = self._codec["request_serializer"](request)
            await asyncio.sleep(self._network.chance.uniform(0.0001, 0.01))
            self._send_up(partial(self._asked.put_nowait, data))
        self._send_up(partial(self._asked.put_nowait, _END))

    def _send_up(self, what: Callable[[], None]) -> None:
        self._network.carry(self.link, self._up, what)

    def _send_down(self, what: Callable[[], None]) -> None:
        self._network.carry(self.link, self._down, what)

    # ------------------------------------------------------------------ the server's end
    def _arrive(self, data: bytes, streams: bool) -> None:
        life, server = self._network.servers.get(self._destination, (None, None))
        if life is None or server is None or not life.alive:
            self._send_down(lambda: self._end(Failed(grpc.StatusCode.UNAVAILABLE, "refused")))
            return
        method = server.methods.get(self._path)
        if method is None:
            self._end(Failed(grpc.StatusCode.UNIMPLEMENTED, self._path))
            return
        self.served_by = life
        asked = self._requests(method) if streams else method.request_deserializer(data)
        self._handler = life.start(self._serve(method, asked))

    async def _requests(self, method: Any) -> AsyncIterator[Any]:
        while (data := await self._asked.get()) is not _END:
            yield method.request_deserializer(data)

    async def _serve(self, method: Any, asked: Any) -> None:
        context = Context(self._source)
        last: Any = _END
        try:
            if method.response_streaming:
                serve = method.unary_stream or method.stream_stream
                async for reply in serve(asked, context):
                    self._reply(method.response_serializer(reply))
            else:
                serve = method.unary_unary or method.stream_unary
                self._reply(method.response_serializer(await serve(asked, context)))
        except Aborted as problem:
            last = problem.failed
        except asyncio.CancelledError:
            last = Failed(grpc.StatusCode.CANCELLED, "cancelled")
            raise
        except Exception as problem:  # noqa: BLE001 - as grpc.aio answers it
            last = Failed(grpc.StatusCode.UNKNOWN, repr(problem))
            if not self._network.loop.over:
                self._network.complain(f"{self._path} failed: {problem!r}")
        finally:
            self._served = True
            self._send_down(lambda: self._end(last))

    def _reply(self, data: bytes) -> None:
        self._send_down(lambda: None if self._done else self._replies.put_nowait(data))

    def _cancel_handler(self) -> None:
        if self._handler is not None and not self._handler.done():
            self._handler.cancel()
        self._network.over(self)
