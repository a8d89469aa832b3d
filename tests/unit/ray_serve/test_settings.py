"""Settings of an application on Ray Serve: from args and environment, with errors that name what was set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.ray_serve.settings import settings_of


def test_texts_stand_for_every_kind_of_value() -> None:
    """`serve run` passes on texts alone, as the environment does."""
    found = settings_of(
        {"pipeline_parallel_size": "2", "served_model_name": "a,b", "max_replicas": "3", "target_kv_share": "0.5"},
        {"PENSTOCK_SERVE_MAX_QUEUE": "7", "PENSTOCK_SERVE_ENABLE_PREFIX_CACHING": "false", "PENSTOCK_API_KEY": "k l"},
    )
    assert (found.stages, found.server.served_model_name, found.replicas.max_replicas) == (2, ("a", "b"), 3)
    assert (found.replicas.target_kv_share, found.server.max_queue) == (0.5, 7)
    assert (found.engine.enable_prefix_caching, found.server.api_keys) == (False, ("k", "l"))
    assert not found.server.web


def test_args_come_before_the_environment() -> None:
    found = settings_of({"max_num_seqs": 4}, {"PENSTOCK_SERVE_MAX_NUM_SEQS": "8", "PENSTOCK_SERVE_SEED": "3"})
    assert (found.engine.max_num_seqs, found.server.seed) == (4, 3)


def test_a_speculative_config_is_json_or_a_table() -> None:
    for config in ('{"method": "ngram"}', {"method": "ngram"}):
        found = settings_of({"speculative_config": config}, {})
        assert found.engine.speculative_config.method == "ngram"  # type: ignore[union-attr]
    assert settings_of({"speculative_config": "null"}, {}).engine.speculative_config is None


def test_a_replica_has_its_cpus_alone() -> None:
    assert settings_of({"cpus": 8, "pipeline_parallel_size": 2}, {}).engine.threads == 4
    assert settings_of({}, {}).engine.threads == 1
    assert settings_of({"threads": 3, "cpus": 8}, {}).engine.threads == 3


def test_template_and_keys_are_read_once(tmp_path: Path) -> None:
    template, keys = tmp_path / "chat.jinja", tmp_path / "keys"
    template.write_text("{{ messages }}")
    keys.write_text("one\ntwo\n")
    found = settings_of({"chat_template": str(template), "api_key_file": str(keys)}, {})
    assert (found.template, found.server.api_keys) == ("{{ messages }}", ("one", "two"))
    assert (found.server.chat_template, found.server.api_key_file) == (None, None)


@pytest.mark.parametrize(
    ("args", "environment", "said"),
    [
        ({"modle": "demo"}, {}, r"^modle is not a setting; did you mean 'model'\?"),
        ({}, {"PENSTOCK_SERVE_MAX_REPLICA": "2"}, r"^PENSTOCK_SERVE_MAX_REPLICA is not a setting; .*'max_replicas'"),
        ({"max_queue": "many"}, {}, r"^max_queue is 'many': "),
        ({}, {"PENSTOCK_SERVE_THREADS": "0"}, r"^PENSTOCK_SERVE_THREADS is 0; it has to be"),
        ({"min_replicas": 3, "max_replicas": 2}, {}, r"^max_replicas is 2; it has to be at least 3"),
        ({"target_kv_share": 2}, {}, r"^target_kv_share is 2.*above 0, at most 1"),
        ({"web": True}, {}, r"^web is not set here: the page"),
        ({"idle_timeout": 5}, {}, r"^idle_timeout is not set here: .*min_replicas to 0"),
        ({"hosts": "a,b"}, {}, r"^hosts is 'a,b'; it has to be ray"),
        ({"hosts": "ray"}, {}, r"^pipeline_parallel_size is None"),
        ({"speculative_config": "{"}, {}, r"^speculative_config is '{', which is not a JSON object"),
        ({"speculative_config": {"method": "magic"}}, {}, r"^speculative_config.method is 'magic'"),
        ({}, {"PENSTOCK_API_KEY": " "}, r"^PENSTOCK_API_KEY is set and holds no key"),
        ({"cpus": 0}, {}, r"^cpus is 0"),
    ],
)
def test_errors_name_what_was_set(args: dict[str, Any], environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(args, environment)


def test_an_unknown_name_is_a_field_error() -> None:
    with pytest.raises(FieldError):
        settings_of({"num_replicas": 2}, {})
