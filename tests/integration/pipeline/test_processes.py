"""Stage processes under attack: killed, broken, lied to by strangers and by their own; nothing hangs or is left."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, ConfigError, PipelineError, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.messages import (
    MAX_HEADER_BYTES,
    NO_SLOT,
    PROTOCOL,
    Batch,
    Failed,
    HeartbeatAck,
    Loading,
    Message,
    Opened,
    Result,
    Rows,
    SampledToken,
    Sampling,
    Started,
    Stop,
    encode,
    opening,
)
from penstock.pipeline.forkserver import shared_fork_server
from penstock.pipeline.processes import ProcessExecutor, ProcessPipeline
from penstock.transport.addresses import LinkSecurity
from penstock.transport.outbox import Sockets
from tests import speculators
from tests.happening import AfterResults
from tests.hostile import example, fits, kinds_of, odd_structs
from tests.links import KINDS, host_of
from tests.processes import alive, descendants
from tests.serving import until

pytestmark = pytest.mark.processes

PROMPT = {"prompt_token_ids": [40, 50, 60, 70]}
NOWHERE = "tcp://127.0.0.1:1"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=490, ignore_eos=True)


def start(model: Path, stages: int = 3, **options: Any) -> LLM:
    """Plain decoding, without recovery: a loss is an error that says what was lost, and why."""
    plain = {"speculative_config": None, "recovery_timeout": 0.0}
    return LLM(str(model), pipeline_parallel_size=stages, skip_tokenizer_init=True, **(plain | options))


def stage_processes() -> list[psutil.Process]:
    """Children of this process's fork server, in the order of their start."""
    return [process for process in descendants(shared_fork_server()._process.pid) if alive(process)]


def pipeline_of(llm: LLM) -> ProcessPipeline:
    pipeline = llm.loop.pipeline
    assert isinstance(pipeline, ProcessPipeline)
    return pipeline


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Check that nothing is left once ``close`` has returned."""
    yield
    assert stage_processes() == []


# ------------------------------------------------------------------------------------------------------- lost stages


# Each kind of link, and the first stage, one in the middle and the last one.
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("ipc", 0),
        ("tcp", 1),
        ("tls", 2),
        *(pytest.param(*one, marks=pytest.mark.whole) for one in (("ipc", 1), ("ipc", 2), ("tls", 0))),
    ],
)
def test_a_killed_stage_ends_the_requests_with_its_name_and_cause(
    target: Path, security: LinkSecurity, kind: str, stage: int
) -> None:
    with start(target, host=host_of(kind, security), speculative_config={"method": "ngram"}) as llm:
        cause = rf"stage {stage} \(layers .*\) was lost: killed by signal 9 \(SIGKILL\)"
        killing = AfterResults(7, stage_processes()[stage].kill)
        with llm.observing(killing), pytest.raises(PipelineError, match=cause):
            llm.generate([PROMPT, PROMPT], ENDLESS)
        with pytest.raises(PipelineError, match=f"takes no more requests .*stage {stage}"):
            llm.generate(PROMPT, GREEDY)


def test_a_stage_killed_between_calls_is_noticed_by_the_next(target: Path) -> None:
    with start(target, 2) as llm:
        llm.generate(PROMPT, GREEDY)
        stage_processes()[1].kill()
        with pytest.raises(PipelineError, match=r"stage 1 .*SIGKILL"):
            llm.generate(PROMPT, ENDLESS)


def test_a_killed_draft_model_is_named(target: Path, draft: Path) -> None:
    with (
        start(target, 2, speculative_config={"method": "draft_model", "model": str(draft)}) as llm,
        llm.observing(AfterResults(3, stage_processes()[0].kill)),
        pytest.raises(PipelineError, match=r"draft model 0 \(layers 0-4\) was lost: killed by signal 9"),
    ):
        llm.generate(PROMPT, ENDLESS)


@pytest.mark.parametrize(
    ("victim", "kind"),
    [
        pytest.param("drafter", "ipc", marks=pytest.mark.whole),
        ("stage", "ipc"),
        ("drafter", "tls"),
    ],
)
def test_a_learned_drafter_or_its_features_source_killed_ends_the_requests(
    target: Path, security: LinkSecurity, tmp_path: Path, victim: str, kind: str
) -> None:
    folder = speculators.eagle3(open_checkpoint(str(target))).save(tmp_path / "eagle3")
    speculation = {"method": "eagle3", "model": str(folder)}
    with start(target, 2, host=host_of(kind, security), speculative_config=speculation) as llm:
        killed, message = {"drafter": (0, r"drafter 0 \(.*eagle3\)"), "stage": (2, r"stage 1 \(layers .*\)")}[victim]
        with (
            llm.observing(AfterResults(5, stage_processes()[killed].kill)),
            pytest.raises(PipelineError, match=message + " was lost: killed by signal 9"),
        ):
            llm.generate(PROMPT, ENDLESS)


def test_a_killed_fork_server_ends_the_requests_and_the_next_engine_has_its_own(target: Path) -> None:
    with start(target, 2) as llm:
        server = psutil.Process(shared_fork_server()._process.pid)
        stages = stage_processes()
        with llm.observing(AfterResults(3, server.kill)), pytest.raises(PipelineError, match="the fork server died"):
            llm.generate(PROMPT, ENDLESS)
    until(lambda: not any(alive(stage) for stage in stages))
    with start(target, 2) as llm:
        assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 16


def test_a_stream_names_the_lost_stage_too(target: Path) -> None:
    with (
        LLM(str(target), pipeline_parallel_size=2, speculative_config=None, recovery_timeout=0.0) as llm,
        llm.observing(AfterResults(5, stage_processes()[0].kill)),
        pytest.raises(PipelineError, match="stage 0"),
    ):
        list(llm.stream("some text", ENDLESS))


def broken_copy(model: Path, folder: Path) -> Path:
    """Its files are whole, but a weight is of integers: only who loads that layer finds out."""
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    name = next(one for one in tensors if one.endswith("layers.0.mlp.up_proj.weight"))
    save_file({**tensors, name: tensors[name].to(torch.int32)}, weights, {"format": "pt"})
    return folder


def test_what_no_stage_can_load_is_refused_before_any_starts(target: Path, tmp_path: Path) -> None:
    broken = broken_copy(target, tmp_path / "broken")
    with pytest.raises(ConfigError, match=r"model: .*up_proj\.weight is stored as I32"):
        start(broken, 2)
    with pytest.raises(ConfigError, match=r"speculative_config\.model: .*up_proj\.weight is stored as I32"):
        start(target, 2, speculative_config={"method": "draft_model", "model": str(broken)})
    assert stage_processes() == []


def damaged_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a checkpoint's weights be damaged once it was looked at, before any stage loads them."""
    begin = ProcessExecutor.begin

    def damaging(host: ProcessExecutor, *plans: Any) -> ProcessPipeline:
        (folder / "model.safetensors").write_bytes(b"no header")
        return begin(host, *plans)

    monkeypatch.setattr(ProcessExecutor, "begin", damaging)


def test_a_stage_that_cannot_load_says_why(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(shutil.copytree(target, tmp_path / "own"))
    damaged_at_the_start(own, monkeypatch)
    with pytest.raises(PipelineError, match=r"stage \d \(layers .*ConfigError: model: .*safetensors"):
        start(own, 2, layer_split="2,3")


def test_a_draft_model_that_cannot_load_takes_the_stages_with_it(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(shutil.copytree(target, tmp_path / "own"))
    damaged_at_the_start(own, monkeypatch)
    with pytest.raises(PipelineError, match=r"draft model 0 .*safetensors"):
        start(target, 2, speculative_config={"method": "draft_model", "model": str(own)})


def test_two_engines_side_by_side(target: Path) -> None:
    with start(target, 2) as one, start(target, 1) as other:
        expected = one.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        stage_processes()[2].kill()
        assert one.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected
        with pytest.raises(PipelineError, match="stage 0"):
            other.generate(PROMPT, GREEDY)
        assert one.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected


# ---------------------------------------------------------------------------------------------------------- strangers


def strange_frames(session: str) -> list[list[bytes]]:
    """Frames that an admitted connection can send and no session accepts; the last three carry the secret."""
    nobody = "0" * 32
    return [
        [b""],
        [b"garbage"],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b"\xc1" * 1000],
        [b"\x93\x01\xa1x" + b"\x91" * 100_000],
        [b"\x93\x01\xa1x\xdd\xff\xff\xff\xff"],
        [b"\x93\x01\xa2\xff\xfe\xc0"],
        [encode(Stop(), nobody)],
        [encode(Failed(stage=0, cause="nothing"), nobody), b"tail"],
        [b"", b""],
        [msgspec.msgpack.encode((PROTOCOL, session))],
        [msgspec.msgpack.encode((PROTOCOL + 1, session, Stop()))],
        [encode(Failed(stage=0, cause="x" * (MAX_HEADER_BYTES + 1)), session)],
    ]


def refused_by_now(host: Any) -> int:
    host.wait(time.monotonic() + 0.05)
    return host.refused


# What an inbox refuses over each kind of link is tested in tests/unit/transport/; TLS has the most before its frames.
@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.whole] * (one != "tls")) for one in KINDS])
def test_strangers_are_refused_and_change_nothing(target: Path, security: LinkSecurity, kind: str) -> None:
    with start(target, 2, host=host_of(kind, security), speculative_config={"method": "ngram"}) as llm:
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        pipeline, host = pipeline_of(llm), llm.loop.clock
        frames = strange_frames(pipeline._session)
        with Sockets(host.security) as sockets:  # type: ignore[attr-defined]
            for address in (host.inbox.address, *[started.address for started in pipeline.started.values()]):  # type: ignore[attr-defined]
                outbox = sockets.connect(address, pipeline._session)
                for frame in frames:
                    outbox.send(*frame)
            assert llm.generate(PROMPT, replace(GREEDY, max_tokens=100))[0].outputs[0].token_ids[:16] == expected
            until(lambda: refused_by_now(host) == len(frames))


# -------------------------------------------------------------------------------------- malformed inside the session


def rows(*, slot: int = 0, parent: int = NO_SLOT, position: int = 0, request: int = 999) -> Rows:
    return Rows([request], [999_999], [slot], [parent], [position], [5])


def batch(stream: int, **fields: Any) -> Batch:
    content: dict[str, Any] = {
        "stream": stream,
        "opened": [Opened(999, Sampling())],
        "rows": rows(),
        "wanted": [0],
        "alive": [0],
    }
    return Batch(**{**content, **fields})


def foreign_tokens(stream: int) -> Batch:
    return batch(stream, opened=[Opened(999, Sampling(logit_bias=((90_000, 1.0),)))], **STATES)


STATES = {"dtype": "float32", "width": 32}


def batch_of(stream: int) -> Batch:
    return batch(stream, **STATES)


LIES: dict[str, tuple[int, Callable[[int], Message], list[bytes], str]] = {
    "wrong stream": (0, lambda n: batch(n + 5), [], "arrived where"),
    "tensor too small": (1, lambda n: batch(n, **STATES), [bytes(127)], "frame of 127 bytes, header announces 128"),
    "tensor missing": (1, lambda n: batch(n), [], "brings no states of width 0"),
    "tensor of another type": (1, lambda n: batch(n, dtype="float16", width=32), [bytes(64)], "brings float16"),
    "unknown slot": (0, lambda n: batch(n, rows=rows(slot=10**6)), [], "slot 1000000 is outside"),
    "unknown parent": (0, lambda n: batch(n, rows=rows(slot=1, parent=2, position=1)), [], "holds no row"),
    "unknown token": (
        0,
        lambda n: batch(n, rows=Rows([999], [1], [0], [NO_SLOT], [0], [10**9])),
        [],
        "token 1000000000 is outside",
    ),
    "unknown position": (
        0,
        lambda n: batch(n, rows=rows(slot=1, position=9 * 10**8)),
        [],
        "position 900000000 is outside",
    ),
    "token of another model in a sampling": (1, lambda n: foreign_tokens(n), [bytes(128)], "names token 90000"),
    "states that are not finite": (
        1,
        batch_of,
        [struct.pack("<32f", *[0.0] * 31, math.nan)],
        r"states of nodes \[999999\] are not finite",
    ),
    "not for a stage": (0, lambda n: Result(stream=0), [], "unexpected Result"),
}
"""For each lie: the stage that hears it, the message (n: the stream number due), tensor frames, the complaint."""


def lost_by_now(pipeline: ProcessPipeline) -> bool:
    pipeline._executor.wait(time.monotonic() + 0.05)
    return pipeline.lost


FRAMED: Final = "tensor too small"
"""The name of the lie that is told over every kind of link: nothing but the framing depends on the kind."""


@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        pytest.param(lie, kind, marks=[pytest.mark.whole] * (kind != KINDS[0] and lie != FRAMED))
        for lie in LIES
        for kind in KINDS
    ],
)
def test_a_malformed_batch_to_a_stage_ends_the_pipeline_with_the_senders_name(
    target: Path, security: LinkSecurity, lie: str, kind: str
) -> None:
    stage, make, tensors, complaint = LIES[lie]
    with start(target, 2, host=host_of(kind, security)) as llm:
        llm.generate(PROMPT, GREEDY)
        llm.loop.drain()
        pipeline = pipeline_of(llm)
        pipeline._inboxes[stage].send(encode(make(llm.loop.builder.next_stream), pipeline._session), *tensors)
        until(lambda: lost_by_now(pipeline))
        sender = f"stage {max(0, stage - 1)} "  # the engine, before the first one, is not at fault
        with pytest.raises(PipelineError, match=rf"^{sender}\(layers .*\) was lost: .*{complaint}"):
            llm.generate(PROMPT, ENDLESS)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Result(stream=7777), "stage 1 .*result 7777 arrived where"),
        (Result(stream=0), "stage 1 .*result 0 arrived where"),
        (
            Started(stage=99, address="tcp://127.0.0.1:1", kv_bytes=0, weight_bytes=0),
            "pipeline of 2 stages .*unexpected Started",
        ),
        (Loading(stage=0, read=1, total=2), "pipeline of 2 stages .*unexpected Loading"),
        (Stop(), "pipeline of 2 stages .*unexpected Stop"),
        (Failed(stage=99, cause="made up"), "pipeline of 2 stages was lost: made up"),
    ],
)
def test_a_malformed_message_to_the_engine_ends_the_pipeline(target: Path, message: Message, complaint: str) -> None:
    with start(target, 2) as llm:
        llm.generate(PROMPT, GREEDY)
        tell_engine(llm, encode(message, pipeline_of(llm)._session))
        with pytest.raises(PipelineError, match=complaint):
            llm.generate(PROMPT, ENDLESS)


@pytest.mark.parametrize(
    ("bounded", "step"),
    [(False, 4), *(pytest.param(bounded, 1, marks=pytest.mark.whole) for bounded in (False, True))],
)
def test_whatever_a_stage_says_its_engine_goes_on_with_the_same_tokens(target: Path, bounded: bool, step: int) -> None:
    """Messages hold values that nobody would send, within their bounds or not; each costs a loss at most.

    Every fourth kind of message is the sample: all are decoded alike, and each loss has stages started anew.
    """
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    kinds = [kind for kind in kinds_of(Message) if kind.cls is not HeartbeatAck]
    rng = random.Random(7)
    with start(target, 2, recovery_timeout=60.0) as llm:
        (expected,) = llm.generate(PROMPT, params)
        for kind in kinds[::step]:
            values = [example(kind), *odd_structs(kind)]
            value = rng.choice([one for one in values if not bounded or fits(kind, one)])
            tell_engine(llm, opening(pipeline_of(llm)._session) + msgspec.msgpack.encode(value))
            (same,) = llm.generate(PROMPT, params)
            assert same.outputs[0].token_ids == expected.outputs[0].token_ids, value
        llm.loop.audit()


def test_a_result_of_another_node_ends_the_pipeline(target: Path) -> None:
    with start(target, 2) as llm:
        stage_processes()[0].suspend()  # the true result never comes
        stream = llm.loop.builder.next_stream
        tell_engine(llm, encode(Result(stream=stream, picks=[SampledToken(123456, 5)]), pipeline_of(llm)._session))
        with pytest.raises(PipelineError, match=r"nodes that it was not asked about|arrived where None was due"):
            llm.generate(PROMPT, ENDLESS)
        stage_processes()[0].resume()


def test_what_does_not_decode_ends_the_pipeline(target: Path) -> None:
    with start(target, 2) as llm:
        tell_engine(llm, msgspec.msgpack.encode((PROTOCOL, pipeline_of(llm)._session, {"type": "nonsense"})))
        with pytest.raises(PipelineError, match=r"pipeline of 2 stages was lost: .*does not decode"):
            llm.generate(PROMPT, ENDLESS)


def tell_engine(llm: LLM, frame: bytes) -> None:
    with Sockets() as sockets:
        sockets.connect(llm.loop.clock.inbox.address, pipeline_of(llm)._session).send(frame)  # type: ignore[attr-defined]
        sockets.close(linger=5.0)


# ------------------------------------------------------------------------------------------------- the engine's own end

SCRIPT = """
import gc, sys, json, os, signal
import penstock
assert "torch" not in sys.modules
import psutil
from penstock import LLM, SamplingParams

def say(**facts):
    print(json.dumps(facts), flush=True)

def stages():
    return [p.pid for c in psutil.Process().children() for p in c.children()]

def sockets():
    from penstock.pipeline.forkserver import shared_fork_server
    return shared_fork_server().folder

greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
endless = SamplingParams(temperature=0, max_tokens=490, ignore_eos=True)
prompt = {"prompt_token_ids": [40, 50, 60, 70]}
target, draft = sys.argv[1:]
options = dict(speculative_config={"method": "draft_model", "model": draft}, skip_tokenizer_init=True)
try:
    with LLM(target, pipeline_parallel_size=2, **options) as llm:
        tokens = llm.generate(prompt, greedy)[0].outputs[0].token_ids
        gc.collect()  # Python drops an interrupt that comes while some library's __del__ runs: none is left to run
        say(tokens=tokens)
        while True:
            llm.generate([prompt] * 4, endless)
except KeyboardInterrupt:
    say(interrupted=True, left=stages())
llm = LLM(target, pipeline_parallel_size=2, **options)
children = [p.pid for p in psutil.Process().children(recursive=True)]
if (own := os.fork()) == 0:  # a child that outlives the engine keeps nothing alive
    signal.pause()
say(children=children, own=own, sockets=sockets())
while True:
    llm.generate([prompt] * 4, endless)
"""


class Script:
    """The script above, without a ``__main__`` guard, in a folder whose files have treacherous names.

    The folder for temporary files has a name that is too long for a socket.
    """

    def __init__(self, folder: Path, *arguments: Any) -> None:
        (folder / "select.py").write_text("raise SystemExit('not this one')")
        (folder / "sub").mkdir()
        file = folder / "sub" / "script.py"
        file.write_text(SCRIPT)
        command = [sys.executable, str(file), *map(str, arguments)]
        (folder / ("temporary" * 12)).mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path[1:])),
            "TMPDIR": str(folder / ("temporary" * 12)),
        }
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment)

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the script ended with {self.process.wait()}"
        return msgspec.json.decode(line, type=dict[str, Any])

    def interrupt(self) -> dict[str, Any]:
        self.process.send_signal(signal.SIGINT)
        return self.hear()

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def gone(pids: list[int]) -> bool:
    return not any(alive(process) for process in psutil.process_iter() if process.pid in pids)


def test_ctrl_c_reaches_the_user_and_a_killed_engine_leaves_nothing(target: Path, draft: Path, tmp_path: Path) -> None:
    with start(target, 1) as llm:
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    with Script(tmp_path, target, draft) as script:
        assert script.hear() == {"tokens": expected}
        assert script.interrupt() == {"interrupted": True, "left": []}
        facts = script.hear()
        assert len(facts["children"]) == 4
        assert os.listdir(facts["sockets"])
        script.process.kill()
        until(lambda: gone(facts["children"]))
        assert not Path(facts["sockets"]).exists()
        os.kill(facts["own"], signal.SIGKILL)
