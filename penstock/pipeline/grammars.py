"""The engine's messages about grammars, and a stage's reports: grammars are compiled beside the stage's loop."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable

from penstock.messages import ForgetGrammar, GrammarPrepared, Message, PrepareGrammar
from penstock.stage.grammar import GrammarMasks
from penstock.transport.inbox import Inbox


class GrammarDesk:
    """Handles the engine's messages about grammars, and reports each grammar that has been compiled.

    The compiling thread wakes the stage's inbox for that, since only the loop may send.
    """

    def __init__(self, grammars: GrammarMasks, inbox: Inbox, tell_engine: Callable[[Message], None]) -> None:
        self._grammars = grammars
        self._inbox = inbox
        self._tell_engine = tell_engine
        self._done: deque[int] = deque()
        """Requests whose grammars are compiled: filled by the thread, emptied by the loop."""
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        inbox.watch(self._woken.fileno(), self._report)

    def on_message(self, message: Message) -> bool:
        """Take in a message. Returns whether it was about a grammar."""
        if isinstance(message, PrepareGrammar):
            number = message.request
            self._grammars.prepare(number, message.grammar, lambda: self._wake(number))
        elif isinstance(message, ForgetGrammar):
            self._grammars.forget(message.request)
        else:
            return False
        return True

    def _wake(self, request: int) -> None:
        self._done.append(request)
        with contextlib.suppress(OSError):  # full: already awake; closed: nobody is to be told any more
            self._waker.send(b"!")

    def close(self) -> None:
        """Report no further grammars."""
        self._inbox.unwatch(self._woken.fileno())
        self._woken.close()
        self._waker.close()

    def _report(self) -> None:
        self._woken.recv(4096)
        while self._done:
            self._tell_engine(GrammarPrepared(request=self._done.popleft()))
