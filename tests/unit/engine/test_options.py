"""Facts that follow from options alone, without devices or checkpoints, and options that are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cluster import load_cluster
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.engine.options import EngineOptions
from penstock.speculation import SpeculativeConfig


@pytest.mark.parametrize("device", ["", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:0:1", "CUDA"])
def test_what_is_no_device(device: str) -> None:
    with pytest.raises(FieldError, match=r"^device is .*cpu, cuda or cuda:N"):
        EngineOptions(device=device)


def test_a_name_stands_for_its_cluster_and_a_table_for_its_configuration() -> None:
    options = EngineOptions(cluster="demo", speculative_config={"method": "ngram", "width": 8})
    assert options.cluster == load_cluster("demo")
    assert options.speculative_config == SpeculativeConfig(method="ngram", width=8)
    assert EngineOptions(**vars(options)) == options


def test_speculation_is_left_to_auto_unless_plain_decoding_is_asked_for() -> None:
    """The default is the same on the command line, in Python and in the server."""
    assert EngineOptions().speculative_config == SpeculativeConfig(method="draft_model", model="demo")
    assert EngineOptions(model="m").speculative_config == SpeculativeConfig()
    assert EngineOptions(model="m", speculative_config=None).speculative_config is None


@pytest.mark.parametrize("given", [{}, {"device": "cuda:1"}, {"device": "cuda", "hosts": "a,a,join://a:1"}])
def test_a_host_is_named_several_times_for_its_gpus_alone(given: dict[str, str]) -> None:
    assert EngineOptions(hosts="a,b,a", device="cuda").hosts == "a,b,a"
    with pytest.raises(FieldError, match=r"hosts is .*each"):
        EngineOptions(**{"hosts": "a,b,a", "pipeline_parallel_size": 3, **given})


def test_hosts_may_play_an_emulated_cluster_and_no_other(tmp_path: Path) -> None:
    assert EngineOptions(cluster="demo", hosts="a:1,b:1").hosts == "a:1,b:1"
    real = tmp_path / "real.toml"
    real.write_text('name = "real"\ndevices = [{ name = "a", host = "a:1" }]\nstages = [{ devices = ["a"] }]\n')
    with pytest.raises(ConfigError, match="left out: the cluster says where its stages are"):
        EngineOptions(cluster=str(real), hosts="b:1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cluster": "dmo"}, "cluster 'dmo' is unknown; did you mean 'demo'?"),
        ({"speculative_config": {"widht": 3}}, "speculative_config.widht is unknown; did you mean 'width'?"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"quantization": "int3"}, "quantization is 'int3'; it has to be one of auto, none, int8, int4"),
        ({"transport": "pigeon"}, "transport is 'pigeon'; it has to be ipc or tcp"),
        ({"kv_slots": 0}, "kv_slots is 0; it has to be a whole number, at least 1"),
        ({"threads": 1025}, "threads is 1025; it has to be a whole number, at most 1024"),
        ({"tensor_parallel_size": 65}, "tensor_parallel_size is 65; it has to be a whole number, at most 64"),
        ({"speculative_slots": -1}, "speculative_slots is -1; it has to be a whole number, 0 or above"),
        ({"prefill_stretch": 0.5}, "prefill_stretch is 0.5; it has to be a number, at least 1"),
    ],
)
def test_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineOptions(**given)
    assert str(refused.value).startswith(said)
