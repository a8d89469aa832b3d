"""Which requests run, and which of them fill the next batch."""

from __future__ import annotations

from collections import deque

from penstock.core import RequestError
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool
from penstock.tree import Node


class Scheduler:
    """First come, first served admission by KV slots; batches are shared among the requests that are ready.

    ``chunk`` bounds the prompt rows that one request puts in a batch: chunks follow each other through the stages.
    """

    def __init__(self, pool: SlotPool, stages: int, chunk: int, max_running: int, max_model_len: int) -> None:
        self.pool = pool
        self.stages = stages
        self.chunk = chunk
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, with the numbers, if it could never run."""
        length, tokens = len(request.prompt), request.max_tokens
        if not length:
            raise RequestError("the prompt is empty: give at least one token")
        if request.slots_needed > self.max_model_len:
            raise RequestError(
                f"prompt of {length} tokens + max_tokens {tokens} = {request.slots_needed} exceeds "
                f"max_model_len {self.max_model_len}: shorten one or raise max_model_len"
            )
        if request.slots_needed > self.pool.certain_capacity:
            raise RequestError(
                f"prompt of {length} tokens + max_tokens {tokens} needs {request.slots_needed} KV slots of "
                f"{self.pool.certain_capacity}: shorten one or raise kv_slots"
            )
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Move waiting requests to running, in order, as long as slots for their whole length can be reserved."""
        admitted = []
        while self.waiting and len(self.running) < self.max_running:
            if not self.pool.reserve(self.waiting[0].slots_needed):
                break
            admitted.append(self.waiting.popleft())
        self.running.extend(admitted)
        return admitted

    def remove(self, request: Request) -> None:
        """Take out a request that has ended, running or still waiting."""
        if request in self.running:
            self.running.remove(request)
            self.pool.unreserve(request.slots_needed)
        elif request in self.waiting:
            self.waiting.remove(request)

    def compose(self, held: bool = False) -> list[tuple[Request, list[Node]]]:
        """Rows for the next batch, request by request; the requests that were served go to the back of the queue.

        With many requests ready at once a batch takes ceil(ready / stages) of them, so that they spread over the
        stages instead of marching in one clump. While ``held``, strategies that are paced wait, unless their root has
        yet to enter.
        """
        ready = [request for request in self.running if self._is_ready(request, held)]
        entries: list[tuple[Request, list[Node]]] = []
        for request in ready[: -(-len(ready) // self.stages)]:
            if entries and not self._is_ready(request, held):
                continue  # those before it have taken the last speculative slots
            self.running.remove(request)
            self.running.append(request)
            entries.append((request, self._rows(request)))
        return entries

    def _is_ready(self, request: Request, held: bool) -> bool:
        if request.prefilling:
            return True
        if held and request.strategy.paced and request.tree.root.entered:
            return False
        return request.strategy.ready(request.tree)

    def _rows(self, request: Request) -> list[Node]:
        if not request.prefilling:
            return request.strategy.enter(request.tree)
        first, request.entered = request.entered, min(request.entered + self.chunk, len(request.prompt))
        return request.certain[first : request.entered]
