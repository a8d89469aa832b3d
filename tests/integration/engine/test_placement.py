"""A learned drafter beside the engine, on the last stage's device and on one of its own: emulated, over processes."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.cluster import Cluster, load_cluster
from penstock.cluster.load import with_drafter_on
from penstock.config import FieldError
from penstock.engine.build import feature_bytes
from penstock.lab.bench.comparison import decode
from penstock.lab.trace import read_trace
from penstock.lab.trace_summary import summarise
from penstock.trace import FIRST_STAGE, trace_writer
from tests import speculators
from tests.checkpoints import make_checkpoint
from tests.exactness import PROMPTS, TOKENS

pytestmark = pytest.mark.processes

STAGES = 3
CLUSTER = """
name = "boards"
engine = "host"
drafter = "host"
devices = [
  { name = "b1", host = "b1", kind = "board" },
  { name = "b2", host = "b2", kind = "board" },
  { name = "b3", host = "b3", kind = "board" },
  { name = "host", host = "host", kind = "board" },
]
stages = [{ devices = ["b1"] }, { devices = ["b2"] }, { devices = ["b3"] }]

[as_model]
layers = 6
hidden_size = 1000
layer_parameters = 50_000_000
head_parameters = 10_000_000

[draft_as_model]
layers = 1
hidden_size = 1000
layer_parameters = 50_000_000
head_parameters = 10_000_000

[kinds.board]
weight_bandwidth_gb_s = 50
compute_tflops = 10
overhead_ms = 1

[links.network]
bandwidth_gbit_s = 1
latency_ms = 0.1
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that reads a state of every stage."""
    checkpoint = open_checkpoint(str(target))
    draft = speculators.speculators_eagle3(checkpoint, reads=(1, 3, checkpoint.num_layers))
    return draft.save(tmp_path_factory.mktemp("draft") / "eagle3")


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    file = tmp_path_factory.mktemp("cluster") / "boards.toml"
    file.write_text(CLUSTER)
    return load_cluster(str(file))


# A stage's own device is the sample, since there passes and batches have to wait for each other.
@pytest.mark.parametrize(
    "place", [*(pytest.param(one, marks=pytest.mark.whole) for one in ("engine", "last-stage")), "b2"]
)
def test_every_place_gives_plain_decodings_tokens_and_its_device_one_pass_at_a_time(
    target: Path, draft: Path, boards: Cluster, place: str, tmp_path: Path
) -> None:
    cluster = with_drafter_on(boards, place)
    speculation = {"method": "eagle3", "model": str(draft), "width": 6, "children": 3}
    options: dict[str, Any] = {"max_model_len": 128, "prefill_chunk": 8, "skip_tokenizer_init": True}
    params = SamplingParams(seed=3, max_tokens=TOKENS, ignore_eos=True)
    with LLM(
        str(target), cluster=cluster, speculative_config=speculation, enable_prefix_caching=False, **options
    ) as llm:
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        plain = decode(llm, prompts, [params] * len(prompts), None)
        writer = trace_writer(llm.setup, llm.drafter)
        with llm.observing(writer):
            found = llm.generate(prompts, params)
            llm.loop.drain()
        row_bytes = feature_bytes(llm.setup)
    for one, other in zip(found, plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    file = io.StringIO()
    writer.write(file)
    check_device(json.loads(file.getvalue())["traceEvents"], cluster.drafting_stage)
    path = tmp_path / "trace.json"
    path.write_text(file.getvalue())
    check_features(path, row_bytes)


def check_device(events: list[dict[str, Any]], stage: int | None) -> None:
    """The drafter's passes are on the track of the stage that has its device, and overlap none of its batches."""
    assert {event["tid"] for event in events if event["cat"] == "pass"} == ({FIRST_STAGE + stage} if stage else set())
    if stage is None:
        return
    used = [event for event in events if event["tid"] == FIRST_STAGE + stage and event["ph"] == "X" and event["dur"]]
    assert {event["cat"] for event in used} == {"pass", "batch"}
    for one, other in pairwise(used):
        assert one["ts"] + one["dur"] <= other["ts"] + 2e-3, "times are rounded to a nanosecond"


def check_features(path: Path, row_bytes: list[float]) -> None:
    """Every row that a stage computed has sent its states, and the summary counts them."""
    trace = read_trace(path)
    rows = [sum(trip.visits[stage].rows for trip in trace.trips) for stage in range(STAGES)]
    sent = [sum(one.bytes for one in trace.sent if one.stage == stage) for stage in range(STAGES)]
    assert sent == [each * count for each, count in zip(row_bytes, rows, strict=True)]
    assert row_bytes == [1000 * 2] * STAGES, "a state each of the model that is emulated"
    summary = summarise(trace)
    assert summary.features is not None
    assert summary.features.prompt_bytes >= sum(map(len, PROMPTS)) * sum(row_bytes)
    assert summary.features.bytes_per_step > 0
    assert set(summary.drafter_spent) == {"features", "device", "computing"}
    assert summary.drafter_spent["computing"] > 0


def test_a_cluster_that_joins_no_stage_with_the_drafter_is_refused_before_anything_starts(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    file = tmp_path / "apart.toml"
    ends = [("host", "b1"), ("b1", "b2"), ("b2", "b3"), ("b3", "host")]
    joined = [f'[[links.between]]\nends = ["{a}", "{b}"]\nbandwidth_gbit_s = 1\nlatency_ms = 0.1\n' for a, b in ends]
    file.write_text(CLUSTER[: CLUSTER.index("[links.network]")] + "\n".join(joined))
    assert load_cluster(str(file)).emulated, "without features there is a link for every message"
    speculation = {"method": "eagle3", "model": str(draft)}
    with pytest.raises(FieldError, match=r"links.network is missing: 'b2' and 'host' have to be joined"):
        LLM(str(target), cluster=str(file), speculative_config=speculation, skip_tokenizer_init=True)
