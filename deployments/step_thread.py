"""The thread that runs a verifier's engine: takes commands, steps, sends each gateway one message a step."""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from deployments.token_link import GatewayAddress, TokenOutbox
from engine.engine import Engine
from engine.request import GenerationRequest, TokenChunk

logger = logging.getLogger(__name__)

T = TypeVar("T")
IDLE_S = 0.2


class StepThread:
    """Owns the engine while it runs; everybody else talks to it through `call`.

    Args:
        engine: the engine.
        outbox: where tokens go; used by this thread only.

    Attributes:
        error: why the thread has ended, if it has.
    """

    def __init__(self, engine: Engine, outbox: TokenOutbox) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._outbox = outbox
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sessions: dict[str, tuple[GatewayAddress, Future[TokenChunk]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function between two steps; its result or exception. Cancelled before its turn, it does not run."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self.engine))
            except BaseException as error:
                future.set_exception(error)

        self._commands.put(command)
        return future

    def begin(self, request: GenerationRequest, gateway: GatewayAddress) -> Future[Future[TokenChunk]]:
        """Start a session: a future of (a future of) its last chunk; the outer one raises what `Engine.add` does."""

        def command(engine: Engine) -> Future[TokenChunk]:
            engine.add(request)
            done: Future[TokenChunk] = Future()
            done.set_running_or_notify_cancel()  # whoever waits may stop waiting; the result can still be set
            self._sessions[request.request_id] = (gateway, done)
            return done

        return self.call(command)

    def abort(self, request_id: str) -> None:
        """End a session before its time; takes effect before the next step."""

        def command(engine: Engine) -> None:
            engine.abort(request_id)
            self._sessions.pop(request_id, None)

        self.call(command)

    def stop(self) -> None:
        """End the thread after the step it is in."""
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._take_commands()
                if self.engine.has_work:
                    self._deliver(self.engine.step())
        except BaseException as error:  # the health check tells Serve, which starts another replica
            logger.exception("the step loop has ended")
            self.error = error
            for _, done in self._sessions.values():
                done.set_exception(RuntimeError(f"the step loop has ended: {error!r}"))
        finally:
            self._outbox.close()

    def _take_commands(self) -> None:
        try:
            # Idle: sleep until something comes. Busy: take what is there.
            command = self._commands.get(block=not self.engine.has_work, timeout=IDLE_S)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        by_gateway: dict[GatewayAddress, list[TokenChunk]] = defaultdict(list)
        ended: list[tuple[Future[TokenChunk], TokenChunk]] = []
        for chunk in chunks:
            gateway, done = self._sessions[chunk.request_id]
            by_gateway[gateway].append(chunk)
            if chunk.finish_reason is not None:
                del self._sessions[chunk.request_id]
                ended.append((done, chunk))
        for gateway, batch in by_gateway.items():
            self._outbox.send(gateway, batch)
        for done, chunk in ended:
            done.set_result(chunk)


def describe(error: BaseException) -> dict[str, Any]:
    """A request's error as plain data, for the way back through a handle."""
    return {"error": str(error), "param": getattr(error, "param", None)}
