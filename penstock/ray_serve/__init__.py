"""Penstock on Ray Serve: ``serve run penstock.ray_serve:app model=demo max_replicas=3``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, Any]) -> Application:
    """The application of the settings in ``args``, which a Serve config file states, and of those in the environment.

    Raises ConfigError, naming the setting, before anything starts.
    """
    from penstock.ray_serve.application import application
    from penstock.ray_serve.settings import settings_of

    return application(settings_of(args, os.environ))
