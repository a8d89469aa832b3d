"""What ``penstock worker`` does: a host agent until somebody ends it."""

from __future__ import annotations

import logging
import platform
import signal
import sys
from pathlib import Path

from penstock.config import FieldError, check
from penstock.core import ConfigError
from penstock.hosts.agent import HostAgent
from penstock.hosts.enrolment import join
from penstock.hosts.keys import default_folder, security_for
from penstock.hosts.remote import places_of
from penstock.hosts.weights.cache import WeightCache, default_cache

log = logging.getLogger(__name__)


def run_worker(
    listen: str, keys: str | None, token: str | None, insecure: bool, cache: str | None, cache_gb: float
) -> None:
    """Serve engines until Ctrl-C or SIGTERM. Raises ConfigError for an address that cannot be listened on."""
    check(cache_gb >= 0, "cache_gb", cache_gb, "0 or above")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    if insecure and token is not None:
        raise FieldError("insecure", "takes no keys; remove it, or the token")
    if token is not None:
        join(default_folder() if keys is None else Path(keys).expanduser(), token, platform.node())
    if insecure:
        log.warning("insecure: whoever reaches %s can use this host, and the network sees what is said", listen)
    _, address = places_of(listen)
    kept = WeightCache(default_cache() if cache is None else Path(cache).expanduser(), round(1e9 * cache_gb))
    try:
        agent = HostAgent(address, security_for(keys, insecure), insecure, kept)
    except OSError as error:
        raise ConfigError(f"listen: {listen}: {error.strerror}") from error
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    signal.signal(signal.SIGINT, lambda *_: agent.stop())
    with agent:
        log.info("listening at %s", agent.address.removeprefix("tcp://"))
        agent.serve()
