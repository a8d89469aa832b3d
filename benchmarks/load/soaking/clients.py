"""Clients of every kind: patient and slow ones, those that leave, and those that send nonsense."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import h11

from benchmarks.load.soaking.answers import problem_of
from benchmarks.load.soaking.cases import Case
from benchmarks.load.soaking.wire import Address, Connection, Reply, connected

KEY: Final = "soak"
HUNG: Final = 120.0
"""Seconds after which a request counts as hanging."""
BUSY: Final = {429: "rate_limit_exceeded", 503: "queue_timeout"}
"""Codes of replies that refuse for now, by status."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one request. ``answered``: a whole reply has come; ``problem``: its error."""

    kind: str
    request_id: str
    status: int = 0
    answered: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class Asking:
    """One request to be made: ``case`` is its content, and ``rng`` decides everything random."""

    address: Address
    request_id: str
    case: Case
    rng: random.Random

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEY}", "X-Request-Id": self.request_id}

    def body(self, **more: Any) -> bytes:
        return json.dumps({**self.case.body, **more}).encode()

    def answered(self, kind: str, reply: Reply, stream: bool) -> Outcome:
        """The outcome of a whole reply that has to be the case's answer."""
        problem = problem_of(self.case, reply, stream) if reply.status == 200 else f"no answer: {reply}"
        return self.judged(kind, reply, problem)

    def judged(self, kind: str, reply: Reply, problem: str | None) -> Outcome:
        """The outcome of a reply with this problem, which does not count where the server was too busy."""
        if reply.status in BUSY and BUSY[reply.status] == code_of(reply):
            return Outcome("refused", self.request_id, reply.status, True)
        return Outcome(kind, self.request_id, reply.status, True, problem)


def code_of(reply: Reply) -> str | None:
    code: str | None = reply.json()["error"]["code"]
    return code


# ------------------------------------------------------------------------------------------- clients that want answers


async def whole(asking: Asking) -> Outcome:
    async with connected(asking.address) as connection:
        await connection.send(connection.request(asking.case.path, asking.body(), asking.headers))
        return asking.answered("whole", await connection.reply(), stream=False)


async def stream(asking: Asking) -> Outcome:
    async with connected(asking.address) as connection:
        await connection.send(connection.request(asking.case.path, asking.body(stream=True), asking.headers))
        return asking.answered("stream", await connection.reply(), stream=True)


async def twice(asking: Asking) -> Outcome:
    """Send two requests over one connection. The first has a name of its own."""
    async with connected(asking.address) as connection:
        first = asking.headers | {"X-Request-Id": f"{asking.request_id}-first"}
        await connection.send(connection.request(asking.case.path, asking.body(), first))
        outcome = asking.answered("twice", await connection.reply(), stream=False)
        if outcome.problem is not None:
            return outcome
        await connection.send(connection.request(asking.case.path, asking.body(stream=True), asking.headers))
        return asking.answered("twice", await connection.reply(), stream=True)


async def slow(asking: Asking) -> Outcome:
    """Read a few bytes at a time, then nothing for some seconds, then the rest, through a socket with a
    small buffer."""
    logprobs = {"logprobs": 20} if "prompt" in asking.case.body else {"logprobs": True, "top_logprobs": 20}
    async with connected(asking.address, narrow=True) as connection:
        body = asking.body(stream=True, **logprobs)
        await connection.send(connection.request(asking.case.path, body, asking.headers))
        head = await connection.head()
        pieces, trickle = [], asking.rng.randrange(10, 40)
        async for data in connection.data(most=asking.rng.randrange(8, 64)):
            pieces.append(data)
            if len(pieces) < trickle:
                await asyncio.sleep(0.1)
            elif len(pieces) == trickle:
                await asyncio.sleep(asking.rng.uniform(1, 4))
        return asking.answered("slow", Reply(head.status_code, {}, b"".join(pieces)), stream=True)


# --------------------------------------------------------------------------------------------------- those that leave


def leave(asking: Asking, connection: Connection) -> None:
    """Abort the connection in half of the cases; otherwise it is closed in order when the block ends."""
    if asking.rng.random() < 0.5:
        connection.abort()


async def leaves_before(asking: Asking) -> Outcome:
    """Leave before any reply, at once or after a while."""
    async with connected(asking.address) as connection:
        body = asking.body(stream=asking.rng.random() < 0.5)
        await connection.send(connection.request(asking.case.path, body, asking.headers))
        await asyncio.sleep(asking.rng.choice((0.0, 0.02, 0.2)))
        leave(asking, connection)
    return Outcome("leaves before", asking.request_id)


async def leaves_amid(asking: Asking) -> Outcome:
    """Leave after a few pieces of the stream."""
    async with connected(asking.address) as connection:
        await connection.send(connection.request(asking.case.path, asking.body(stream=True), asking.headers))
        head, left = await connection.head(), asking.rng.randrange(1, 4)
        async for _ in connection.data():
            left -= 1
            if not left:
                break
        leave(asking, connection)
    return Outcome("leaves amid", asking.request_id, head.status_code)


async def leaves_after(asking: Asking) -> Outcome:
    """Leave with the last byte."""
    async with connected(asking.address) as connection:
        await connection.send(connection.request(asking.case.path, asking.body(stream=True), asking.headers))
        outcome = asking.answered("leaves after", await connection.reply(), stream=True)
        connection.abort()
    return outcome


async def leaves_in_body(asking: Asking) -> Outcome:
    async with connected(asking.address) as connection:
        data = connection.request(asking.case.path, asking.body(), asking.headers)
        await connection.send(data[: -asking.rng.randrange(1, 60)])
        await asyncio.sleep(asking.rng.choice((0.0, 0.05)))
        leave(asking, connection)
    return Outcome("leaves in body", asking.request_id)


# ------------------------------------------------------------------------------------------- those that are refused


@dataclass(frozen=True)
class Bad:
    """A request that has to be refused with this status, field and code."""

    status: int
    param: str | None
    code: str
    body: Callable[[Asking], bytes]
    headers: Mapping[str, str]
    path: str = "/v1/completions"


def field(name: str, value: Any, param: str | None = None, status: int = 400, code: str = "invalid_value") -> Bad:
    """A body with one invalid field."""
    given = {"prompt": "a", "max_tokens": 2, name: value}
    return Bad(status, name if param is None else param, code, lambda _: json.dumps(given).encode(), {})


BAD: Final = (
    Bad(400, None, "invalid_json", lambda asking: asking.body()[:-1], {}),
    Bad(400, None, "invalid_json", lambda _: b'{"prompt": "\xff"}', {}),
    Bad(400, None, "invalid_type", lambda _: b"[]", {}),
    Bad(400, "prompt", "missing_required_parameter", lambda _: b"{}", {}),
    Bad(413, None, "body_too_large", lambda _: json.dumps({"prompt": "a" * 50_000}).encode(), {}),
    Bad(401, None, "invalid_api_key", lambda asking: asking.body(), {"Authorization": "Bearer soap"}),
    Bad(404, None, "unknown_url", lambda asking: asking.body(), {}, "/v1/nothing"),
    field("no_such_field", 1, code="unknown_parameter"),
    field("max_tokens", "4", code="invalid_type"),
    field("max_tokens", 0, code="integer_below_min_value"),
    field("max_tokens", 10**6, code="context_length_exceeded"),
    field("temperature", -1, code="integer_below_min_value"),
    field("prompt", [], code="invalid_type"),
    field("prompt", [10**6]),
    field("n", 0, code="integer_below_min_value"),
    field("stop", [1], param="stop[0]", code="invalid_type"),
    field("logit_bias", {"a": 1}),
    field("model", "other", status=404, code="model_not_found"),
    field("structured_outputs", {"regex": "("}, param="structured_outputs.regex"),
    field("structured_outputs", {"grammar": "no grammar"}, param="structured_outputs.grammar"),
)


async def bad(asking: Asking) -> Outcome:
    one = asking.rng.choice(BAD)
    async with connected(asking.address) as connection:
        await connection.send(connection.request(one.path, one.body(asking), asking.headers | dict(one.headers)))
        reply = await connection.reply()
    problem, found = f"instead of {one}: {reply}", reply.json().get("error", {})
    if (reply.status, found.get("param"), found.get("code")) == (one.status, one.param, one.code):
        return Outcome("bad", asking.request_id, reply.status, True)
    return asking.judged("bad", reply, problem)


async def late_body(asking: Asking) -> Outcome:
    """Send half a body, and then nothing."""
    async with connected(asking.address) as connection:
        await connection.send(connection.request(asking.case.path, asking.body(), asking.headers)[:-5])
        reply = await connection.reply()
        await connection.closed()
    problem = None if reply.status == 408 and code_of(reply) == "body_timeout" else f"{reply}"
    return Outcome("late body", asking.request_id, reply.status, True, problem)


CLIENTS: Final[Mapping[Callable[[Asking], Awaitable[Outcome]], int]] = {
    whole: 28,
    stream: 28,
    twice: 4,
    slow: 4,
    leaves_before: 7,
    leaves_amid: 8,
    leaves_after: 4,
    leaves_in_body: 5,
    bad: 11,
    late_body: 1,
}
"""Weight of each kind of client."""


async def ask(asking: Asking) -> Outcome:
    """Make a request as one of ``CLIENTS``. Failures of the server are in the outcome and never raised."""
    (client,) = asking.rng.choices(list(CLIENTS), list(CLIENTS.values()))
    kind = client.__name__.replace("_", " ")
    try:
        async with asyncio.timeout(HUNG):
            return await client(asking)
    except TimeoutError:
        return Outcome(kind, asking.request_id, problem=f"no end after {HUNG:.0f} s")
    except (OSError, h11.RemoteProtocolError) as error:
        return Outcome(kind, asking.request_id, problem=f"{error!r}")
