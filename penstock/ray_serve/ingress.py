"""The ingress: our whole server as a deployment of Ray Serve, over an engine whose requests run on replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from penstock.core import PipelineError
from penstock.engine.resolve import resolve_options
from penstock.ray_serve.messages import Message, RemoteCall
from penstock.ray_serve.remote import RemoteEngine, ReplicaLost
from penstock.ray_serve.settings import ServeSettings, front_options
from penstock.ray_serve.state import REPORTS
from penstock.server.app import make_app
from penstock.server.http.middleware import configure_logs


@serve.ingress()
class Ingress:
    """Parses requests, holds what has come of each answer, and has it go on elsewhere when its replica is lost."""

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
    """The replicas behind a handle of Serve's, whose router chooses one for each call."""

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
    """An answer that comes through a handle of Serve's; Ray's errors are told as losses of the replica."""

    def __init__(self, response: Any) -> None:
        self._response: Any = response
        self._messages: AsyncIterator[Message] = response

    async def __anext__(self) -> Message:
        try:
            return await anext(self._messages)
        except RequestCancelledError as error:
            raise ReplicaLost("it was cancelled") from error
        except RayTaskError as error:
            if isinstance(error.cause, RayActorError):
                raise ReplicaLost(summary_of(error.cause)) from error
            raise
        except (RayError, DeploymentUnavailableError) as error:
            raise ReplicaLost(summary_of(error)) from error

    def cancel(self) -> None:
        self._response.cancel()


def summary_of(error: Exception) -> str:
    """The first line of an error of Ray's, which may be a page long."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
