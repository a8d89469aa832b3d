"""Settings of an application on Ray Serve, from its config file's ``args`` or the environment."""

from __future__ import annotations

import reprlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.config import FieldError, check, check_positive, nearest
from penstock.engine.options import EngineOptions
from penstock.environment import API_KEY_VARIABLE, check_api_key_variable, read_api_keys
from penstock.hosts.placement import asked_hosts
from penstock.server.settings import ServerSettings, name_of
from penstock.speculation import parse_speculative
from penstock.text.chat import read_template

PREFIX: Final = "PENSTOCK_SERVE_"
"""Beginning of the names of environment variables: PENSTOCK_SERVE_MODEL sets ``model``."""
SERVES_OWN: Final = {
    "web": "the page shows the steps of an engine in its own process, and here there are several elsewhere",
    "idle_timeout": "Serve frees replicas that nobody uses: set min_replicas to 0",
    "skip_tokenizer_init": "a server needs the tokenizer",
    "host": "Serve's proxies listen: set http_options in Serve's config file",
    "port": "Serve's proxies listen: set http_options in Serve's config file",
    "num_replicas": "set min_replicas and max_replicas",
}
"""Settings that cannot be used here, with the reason or the remedy."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """How many replicas there are, and what each takes. Serve's own config file may say more of every deployment."""

    min_replicas: int = 1
    """Replicas that there always are; 0 has them all ended while no request comes."""
    max_replicas: int | None = None
    """Most replicas; as many as ``min_replicas`` by default, and at least 1."""
    target_kv_share: float = 0.8
    """Share of the KV slots in use above which replicas are added, whatever the number of requests."""
    upscale_delay: float = 10.0
    """Seconds for which more replicas must be wanted before they are started. The first one is started at once."""
    downscale_delay: float = 300.0
    """Seconds for which fewer replicas must be wanted before some are ended."""
    cpus: float | None = None
    """CPUs that Ray reserves for a replica; by default one for each thread, and one with stages elsewhere."""
    gpus: float | None = None
    """GPUs that Ray reserves for a replica; with device cuda one for each stage by default, else none."""

    def __post_init__(self) -> None:
        check(self.min_replicas >= 0, "min_replicas", self.min_replicas, "0 or above")
        check_positive(self, "cpus")
        check_positive(self, "gpus", "upscale_delay", "downscale_delay", or_zero=True)
        check(0 < self.target_kv_share <= 1, "target_kv_share", self.target_kv_share, "above 0, at most 1")
        if self.max_replicas is None:
            object.__setattr__(self, "max_replicas", max(1, self.min_replicas))
        else:
            least = max(1, self.min_replicas)
            check(self.max_replicas >= least, "max_replicas", self.max_replicas, f"at least {least}")


@dataclass(frozen=True)
class ServeSettings:
    """All settings of an application, checked."""

    engine: EngineOptions
    server: ServerSettings
    replicas: ReplicaSettings
    template: str | None = None
    """The chat template's text in place of the checkpoint's own."""

    @property
    def stages(self) -> int:
        """The stated number of stages; 1 where it follows from a cluster or a split."""
        return self.engine.pipeline_parallel_size or 1

    @property
    def on_ray(self) -> bool:
        """Whether the stages are on nodes of the Ray cluster, not among the replica's own processes."""
        return self.engine.hosts is not None


KINDS: Final = (EngineOptions, ServerSettings, ReplicaSettings)
"""The classes whose fields are the settings."""


def settings_of(args: Mapping[str, Any], environment: Mapping[str, str]) -> ServeSettings:
    """The settings that ``args`` state, then those of the environment. Texts may stand for numbers and lists.

    Raises FieldError, naming the field or the variable, for one that is unknown, of a wrong type, or of no use here.
    """
    check_api_key_variable(environment)
    known = {field.name: kind for kind in KINDS for field in fields(kind)}
    known = {name: kind for name, kind in known.items() if name not in SERVES_OWN}
    stated = {
        name.removeprefix(PREFIX).lower(): (name, value)
        for name, value in environment.items()
        if name.startswith(PREFIX)
    }
    # After the environment, so that ``args`` win. The name as written is for errors.
    stated |= {str(name): (str(name), value) for name, value in args.items()}
    values: dict[type, dict[str, Any]] = {kind: {} for kind in KINDS}
    for name, (said, value) in stated.items():
        if name in SERVES_OWN:
            raise FieldError(said, f"is not set here: {SERVES_OWN[name]}")
        if name not in known:
            raise FieldError(said, f"is not a setting; {nearest(name, known)}")
        values[known[name]][name] = typed(known[name], name, value, said)
    if "api_keys" not in values[ServerSettings] and (keys := environment.get(API_KEY_VARIABLE, "").split()):
        values[ServerSettings]["api_keys"] = tuple(keys)
    try:
        engine, named = engine_of(values[EngineOptions]), values[ServerSettings]
        named.setdefault("served_model_name", (name_of(engine.model),))
        return settled(engine, ServerSettings(**named, web=False), ReplicaSettings(**values[ReplicaSettings]))
    except FieldError as error:
        name, dot, within = error.field.partition(".")
        raise FieldError(f"{stated.get(name, (name, None))[0]}{dot}{within}", error.problem) from None


def engine_of(values: dict[str, Any]) -> EngineOptions:
    """The engine's options, with the table of speculation parsed. Raises FieldError, naming the field, as these do."""
    config = values.get("speculative_config")
    if isinstance(config, Mapping):
        values = values | {"speculative_config": parse_speculative(config, values.get("model", EngineOptions.model))}
    return EngineOptions(**values)


def typed(kind: type, name: str, value: Any, said: str) -> Any:
    """A value as its field has it: environment variables and the command line give everything as text.

    Raises FieldError, naming the setting as it was written (``said``).
    """
    hint = typing.get_type_hints(kind)[name]
    if name == "speculative_config" and isinstance(value, str):
        try:
            return msgspec.json.decode(value, type=dict[str, Any] | None)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise FieldError(said, f"is {reprlib.repr(value)}, which is not a JSON object: {error}") from None
    if name in ("cluster", "speculative_config"):
        return value  # checked by the options themselves
    if typing.get_origin(hint) is tuple and isinstance(value, str):
        value = value.split(",")
    if hint == Path | None and value is not None:
        return Path(str(value)).expanduser()
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        raise FieldError(said, f"is {value!r}: {str(error)[0].lower()}{str(error)[1:]}") from None


def settled(engine: EngineOptions, server: ServerSettings, replicas: ReplicaSettings) -> ServeSettings:
    """The settings with the keys and the template read from their files, here and once for all replicas."""
    if engine.hosts is not None:
        asked = asked_hosts(engine.hosts)
        known = bool(asked.ray) and not asked.ray.startswith("ray://")
        check(known, "hosts", engine.hosts, "ray, which is the cluster that Serve runs on, or left out")
    if engine.threads is None and engine.device == "cpu" and engine.hosts is None:
        each = (replicas.cpus or 0) // (engine.pipeline_parallel_size or 1)
        engine = replace(engine, threads=max(1, int(each)))  # all of a node's cores are not one replica's
    keys = server.api_keys + (read_api_keys(server.api_key_file) if server.api_key_file is not None else ())
    template = None if server.chat_template is None else read_template(server.chat_template)
    server = replace(server, api_keys=keys, api_key_file=None, chat_template=None)
    return ServeSettings(engine, server, replicas, template)


def front_options(engine: EngineOptions) -> EngineOptions:
    """The options with which the ingress reads the model's files: it runs neither stages nor a drafter."""
    return EngineOptions(
        model=engine.model, max_model_len=engine.max_model_len, kv_slots=engine.kv_slots, speculative_config=None
    )
