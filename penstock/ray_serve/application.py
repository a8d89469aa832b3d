"""The application of Ray Serve: an ingress, which is our whole server as a deployment, over replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from penstock.core import CompletionOutput, FinishReason, PipelineError, RequestError
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.resolve import resolve_options
from penstock.engine.stream import RequestStream
from penstock.hosts.placement import RAY
from penstock.ray_serve.remote import (
    Accepted,
    Ended,
    Failed,
    Message,
    News,
    Refused,
    RemoteCall,
    RemoteEngine,
    ReplicaLost,
)
from penstock.ray_serve.routing import REPORTS, Report
from penstock.ray_serve.settings import ReplicaSettings, ServeSettings, front_options
from penstock.server.app import make_app
from penstock.server.http.middleware import configure_logs

# -------------------------------------------------------------------------------------------------------------- replica
# A replica: one engine as a deployment of Ray Serve, which places it, watches it and starts it again.

ADMITTED_S: Final = 0.2
"""Seconds between two checks whether a waiting request has been admitted. The router learns of an admission that much
later."""
MOST_BLOCKS: Final = 4096
"""Most blocks of the prefix cache in a report, those used last: 32 kB of hashes."""
CUT: Final = (FinishReason.ABORT, FinishReason.ERROR)
"""Reasons with which a completion that was cut off ends."""


class Replica:
    """The class of the deployment of replicas. The constructor returns once every stage has loaded its layers."""

    def __init__(self, settings: ServeSettings) -> None:
        self._llm = AsyncLLM(**vars(settings.engine))

    async def answer(self, call: RemoteCall) -> AsyncGenerator[Message]:
        """Run a request, or go on with one; its messages are yielded. A caller who stops iterating ends it."""
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
        """Return if a token can be generated. Ray Serve replaces a replica whose method raises."""
        await self._llm.check_health()

    async def rebalance(self) -> bool:
        """Move stages back to their hosts, as ``AsyncLLM.rebalance`` does. Returns whether any moves."""
        return await self._llm.rebalance()

    async def record_routing_stats(self) -> dict[str, Any]:
        """The replica's report, which Ray Serve carries to the router."""
        stats = self._llm.stats()
        blocks = frozenset(await self._llm.cached_blocks(MOST_BLOCKS)) if stats.ended is None else frozenset()
        return Report(stats, blocks).as_dict()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The share of the KV slots that requests hold, from 0 to 1, and the number of waiting requests."""
        stats = self._llm.stats()
        return {"kv_share": stats.kv_used / stats.kv_slots, "waiting": float(stats.waiting)}

    def __del__(self) -> None:
        """Stop the stages. Ray Serve deletes the replica once its last request has ended, or took too long."""
        if hasattr(self, "_llm"):
            self._llm.close()

    async def _begin(self, call: RemoteCall) -> RequestStream:
        """The stream of a new request, or of one that goes on. Raises RequestError and PipelineError."""
        prompt = {"prompt": call.prompt, "prompt_token_ids": call.token_ids}
        options: dict[str, Any] = {"priority": call.priority, "client": call.client}
        if call.came:
            return await self._llm.resume(prompt, call.params, resumed=call.came, **options)
        await self._llm.prepare(call.params)
        return self._llm.submit(prompt, call.params, **options)


async def told(stream: RequestStream) -> AsyncGenerator[Message]:
    """Yield an answer's messages until it ends, or until a ``Failed`` that says why this replica cannot continue it.

    The last message of an answer that is cut off is withheld, since its text may end in half a character: another
    replica goes on from the messages before it.
    """
    admitted = False
    ends: list[Any] = []
    while True:
        read = asyncio.ensure_future(anext(stream))
        try:
            # Serve hears nothing of a request that waits: an empty message tells the reader when it is admitted.
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
    """The figures of a completion that has ended."""
    return Ended(output.metrics, output.seconds, output.speed_up)


# ---------------------------------------------------------------------------------------------------------- application
# The deployments: the ingress, which is Penstock's server with a ``RemoteEngine``, and the replicas behind it.
@serve.ingress()
class Ingress:
    """Parses requests, and holds the answers: when a replica is lost, another one goes on with its answers."""

    def __init__(self, settings: ServeSettings, replicas: DeploymentHandle) -> None:
        configure_logs(settings.server.log_level)
        setup = resolve_options(front_options(settings.engine))
        self._settings = settings
        self._engine = RemoteEngine(setup, ServedReplicas(replicas), REPORTS, settings.server.max_queue)
        if settings.template is not None:
            self._engine.get_tokenizer().use_chat_template(settings.template)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self._engine, self._settings.server)


class ServedReplicas:
    """The replicas behind a handle of Ray Serve, whose router chooses one of them for each call."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._answers = handle.options(method_name="answer", stream=True)

    def send(self, call: RemoteCall) -> HandleAnswer:
        return HandleAnswer(self._answers.remote(call))

    async def check_health(self) -> None:
        try:
            await self._handle.check_health.remote()
        except RayTaskError as error:
            raise PipelineError(str(error.cause)) from None
        except (RayError, DeploymentUnavailableError) as error:
            raise PipelineError(f"no replica answers: {error}") from error

    async def rebalance(self) -> bool:
        return any(await self._handle.broadcast("rebalance").results_async())


class HandleAnswer:
    """An answer that comes through a handle of Ray Serve. Ray's errors are raised as ReplicaLost."""

    def __init__(self, response: Any) -> None:
        self._response: Any = response
        self._messages: AsyncIterator[Message] = response

    async def __anext__(self) -> Message:
        try:
            return await anext(self._messages)
        except RequestCancelledError as error:
            raise ReplicaLost("it was cancelled") from error
        # A task's error is the replica's own fault, unless it wraps the end of the actor that ran it.
        except RayTaskError as error:
            if isinstance(error.cause, RayActorError):
                raise ReplicaLost(summary_of(error.cause)) from error
            raise
        except (RayError, DeploymentUnavailableError) as error:
            raise ReplicaLost(summary_of(error)) from error

    def cancel(self) -> None:
        self._response.cancel()


def summary_of(error: Exception) -> str:
    """The first line of an error of Ray, whose text may be a page long."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


REPORTS_EVERY_S: Final = 1.0
"""Seconds between two reports of a replica to the routers. Longer pauses route by older loads; shorter ones send the
blocks more often."""


def application(settings: ServeSettings) -> Application:
    """The application: an ingress over replicas. Serve's config file may change the options of each by its name."""

    server, engine = settings.server, settings.engine
    running = server.max_queue + engine.max_num_seqs * most_of(settings.replicas)
    replicas = serve.deployment(
        Replica,
        name="Replica",
        # All requests wait in the replicas, whose queues know priorities: an answer that goes on is served first.
        max_ongoing_requests=engine.max_num_seqs + server.max_queue,
        graceful_shutdown_timeout_s=server.drain_timeout,
        request_router_config=RequestRouterConfig(
            request_router_class="penstock.ray_serve.policies.PrefixRouter",
            request_routing_stats_period_s=REPORTS_EVERY_S,
        ),
        **scale_of(settings),
        **placement_of(settings),
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=1,
        max_surge_percent=100,  # at an update a new ingress takes over before the old one begins to end
        max_ongoing_requests=2 * running,  # above ``running``, so that the ingress itself refuses, in the API's form
        graceful_shutdown_timeout_s=server.request_timeout,  # an ingress's answers end with it: nobody else has them
        ray_actor_options={"num_cpus": 0},  # it mostly waits, so that Ray need not reserve a core for it
    )
    return ingress.bind(settings, replicas.bind(settings))


def most_of(replicas: ReplicaSettings) -> int:
    """The most replicas that there may be."""
    assert replicas.max_replicas is not None
    return replicas.max_replicas


def scale_of(settings: ServeSettings) -> dict[str, Any]:
    """Ray Serve's options for the number of replicas: fixed, or scaled by requests and KV slots."""
    replicas = settings.replicas
    if replicas.min_replicas == replicas.max_replicas:
        return {"num_replicas": replicas.min_replicas}
    policy = {"requests": float(settings.engine.max_num_seqs), "kv_share": replicas.target_kv_share}
    config = AutoscalingConfig(
        min_replicas=replicas.min_replicas,
        max_replicas=most_of(replicas),
        initial_replicas=max(1, replicas.min_replicas),
        target_ongoing_requests=float(settings.engine.max_num_seqs),
        upscale_delay_s=replicas.upscale_delay,
        downscale_delay_s=replicas.downscale_delay,
        policy=AutoscalingPolicy(policy_function="penstock.ray_serve.policies:RequestsAndSlots", policy_kwargs=policy),
    )
    return {"autoscaling_config": config}


def placement_of(settings: ServeSettings) -> dict[str, Any]:
    """The resources that Ray reserves for a replica, as options of Ray Serve.

    They are those of the actor itself, or with stages elsewhere a placement group: a bundle for the actor and one for
    each node.
    """
    engine, replicas = settings.engine, settings.replicas
    gpus = replicas.gpus
    if gpus is None:
        gpus = float(settings.stages) if engine.device != "cpu" else 0.0
    threads = settings.stages * (engine.threads or 1) if engine.device == "cpu" else 1
    cpus = replicas.cpus if replicas.cpus is not None else float(threads)
    if not settings.on_ray:
        return {"ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus}}
    from penstock.hosts.ray import bundles_at_hand, connect

    if not ray.is_initialized():  # `serve run` builds the application before it connects
        connect(RAY)
    # First the bundle of the engine itself, then one for the agent on each node of its stages.
    own = {"CPU": replicas.cpus or 1.0}
    return {
        "ray_actor_options": {"num_cpus": own["CPU"]},
        "placement_group_bundles": [own, *bundles_at_hand(settings.stages, engine.device)],
        "placement_group_strategy": "SPREAD",
    }
