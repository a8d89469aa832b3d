"""A replica: one engine as a deployment of Ray Serve, which places it, watches it and starts it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from penstock.core import CompletionOutput, FinishReason, PipelineError, RequestError
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.stream import RequestStream
from penstock.ray_serve.remote import Accepted, Ended, Failed, Message, News, Refused, RemoteCall
from penstock.ray_serve.routing import Report
from penstock.ray_serve.settings import ServeSettings

ADMITTED_S: Final = 0.2
"""Seconds between two looks at whether a request that waits has been admitted."""
MOST_BLOCKS: Final = 4096
"""Blocks of the prefix cache in a report, those used last: hashes of 32 kB."""
CUT: Final = (FinishReason.ABORT, FinishReason.ERROR)


class Replica:
    """The deployment's class. The constructor returns when every stage has loaded its layers."""

    def __init__(self, settings: ServeSettings) -> None:
        self._llm = AsyncLLM(**vars(settings.engine))

    async def answer(self, call: RemoteCall) -> AsyncGenerator[Message]:
        """Run a request, or go on with one. Leaving the iteration ends it."""
        try:
            stream = await self._begin(call)
        except RequestError as error:
            yield Refused(str(error))
            return
        except PipelineError as error:
            yield Failed(str(error))
            return
        try:
            yield Accepted([output.text for output in stream.output().outputs], self._llm.numerics)
            async with aclosing(told(stream)) as messages:
                async for message in messages:
                    yield message
        finally:
            stream.abort()

    async def check_health(self) -> None:
        """Return if a token can be generated; Serve replaces a replica for which this raises."""
        await self._llm.check_health()

    async def rebalance(self) -> bool:
        return await self._llm.rebalance()

    async def record_routing_stats(self) -> dict[str, Any]:
        """The replica's report, which Serve passes on to whoever sends it requests."""
        stats = self._llm.stats()
        blocks = frozenset(await self._llm.cached_blocks(MOST_BLOCKS)) if stats.ended is None else frozenset()
        return Report(stats, blocks).as_dict()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The share of the KV slots that requests hold, and how many requests wait for some."""
        stats = self._llm.stats()
        return {"kv_share": stats.kv_used / stats.kv_slots, "waiting": float(stats.waiting)}

    def __del__(self) -> None:
        """Stop the stages, once Serve has seen the last request end or has waited for long enough."""
        if hasattr(self, "_llm"):
            self._llm.close()

    async def _begin(self, call: RemoteCall) -> RequestStream:
        prompt = {"prompt": call.prompt, "prompt_token_ids": call.token_ids}
        options: dict[str, Any] = {"priority": call.priority, "client": call.client}
        if call.came:
            return await self._llm.resume(prompt, call.params, resumed=call.came, **options)
        await self._llm.prepare(call.params)
        return self._llm.submit(prompt, call.params, **options)


async def told(stream: RequestStream) -> AsyncGenerator[Message]:
    """Yield an answer's messages until it ends, or until a ``Failed`` that says why this replica cannot continue it.

    If the answer is cut off, its last message is withheld, since its text may end in half a character; another replica
    continues from the messages before it.
    """
    admitted = False
    ends: list[Any] = []
    while True:
        read = asyncio.ensure_future(anext(stream))
        try:
            while not admitted and not read.done():
                if stream.started:
                    admitted = True
                    yield News([], stream.output().num_cached_tokens)
                await asyncio.wait({read}, timeout=ADMITTED_S)
            new = await read
        except StopAsyncIteration:
            if ends:
                yield Failed("the replica is being stopped")
            return
        except RequestError as error:
            if ends:  # it ends everywhere, so its last tokens are told, too
                yield News(ends, stream.output().num_cached_tokens)
            yield Refused(str(error))
            return
        except PipelineError as error:
            yield Failed(str(error))
            return
        finally:
            read.cancel()
        ends += [delta for delta in new.deltas if delta.finish_reason in CUT]
        deltas = [delta for delta in new.deltas if delta.finish_reason not in CUT]
        if deltas:
            outputs = stream.output().outputs
            ended = {one.index: ended_of(outputs[one.index]) for one in deltas if one.finish_reason is not None}
            yield News(deltas, stream.output().num_cached_tokens, ended)


def ended_of(output: CompletionOutput) -> Ended:
    return Ended(output.metrics, output.seconds, output.speed_up)
