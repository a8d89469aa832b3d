"""Compiled layers compute what the fused ones do, and a row's bits are its own through a whole model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config import FieldError
from penstock.files import EXACT, FAST, REFERENCE
from penstock.messages import CommittedSlots, Rows
from penstock.models import stage_model
from penstock.models.compiled.dot import VNNI_512, instruction
from penstock.models.compiled.layer import CompiledBase, is_silu
from penstock.models.linear import works
from penstock.models.loader import check_loads
from penstock.models.packing import INSTRUCTIONS
from penstock.models.stage_model import load_stage
from penstock.stage.visibility import BatchView
from tests.checkpoints import ARCHITECTURES, LAYERS, RELATIVES, make_checkpoint, settings_of
from tests.staged import Staged, chain_rows
from tests.unit.models.compiled.digests import digests
from tests.unit.models.compiled.formats import FAMILIES, FLOATS, FORMATS, MIXED, WHOLE

pytestmark = pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need")
COMPILED = {"llama", "llama_tied", "llama3_rope", "mistral", "mistral_window", "qwen2", "qwen3"}
DOCS = Path(penstock.__file__).parents[1] / "docs"
COUNT = 197
TOKENS = [17, 3, 99, 42, 8, 64, 120]


def some_formats(names: Sequence[str], every: str, share: int, formats: Sequence[str] = (*FORMATS,)) -> Iterator[Any]:
    """The name ``every`` in all formats, and each other name in one of ``share`` formats, which take turns."""
    for number, (name, form) in enumerate(product(names, formats)):
        row = number // len(formats)
        sampled = name == every or (number + row * (len(formats) % share == 0)) % share == 0
        yield pytest.param(name, form, marks=[] if sampled else [pytest.mark.whole])


@pytest.mark.parametrize(
    ("architecture", "form"), [*some_formats(sorted(COMPILED | {"gemma2", "olmo2", "phi3"}), "qwen3", 9)]
)
def test_which_architectures_are_compiled(tmp_path: Path, architecture: str, form: str) -> None:
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.1)
    stage = load_stage(str(path), 0, LAYERS, capacity=8, max_model_len=64, **FORMATS[form])
    assert isinstance(stage._base, CompiledBase) == (architecture in COMPILED)
    fast = load_stage(str(path), 0, LAYERS, capacity=8, max_model_len=64, numerics=FAST, **FORMATS[form])
    assert isinstance(fast._base, CompiledBase) == (architecture in COMPILED and form in WHOLE | MIXED)


@pytest.mark.parametrize("architecture", ["gemma2", "phi3", "apertus", "mixtral", "qwen3_5"])
def test_what_cannot_be_exact_is_refused_by_the_field(tmp_path: Path, architecture: str) -> None:
    """Layers are refused by their form before they are loaded, and by a stage that has loaded them."""
    path, refused = make_checkpoint(tmp_path, architecture), r"numerics is 'exact', .*: leave it out, or give 'fast'"
    with pytest.raises(FieldError, match=refused):
        check_loads(open_checkpoint(str(path)), EXACT)
    with pytest.raises(FieldError, match=refused):
        load_stage(str(path), 0, LAYERS, capacity=8, max_model_len=64, numerics=EXACT)
    assert load_stage(str(path), LAYERS, LAYERS, capacity=8, max_model_len=64, numerics=EXACT).exact


@pytest.mark.parametrize("factor", ["residual_multiplier", "embedding_multiplier"])
def test_factors_show_when_layers_are_loaded(tmp_path: Path, factor: str) -> None:
    path = str(make_checkpoint(tmp_path, "granite_swa", **{factor: 0.7}))
    check_loads(open_checkpoint(path), EXACT)
    with pytest.raises(FieldError, match="numerics is 'exact'"):
        load_stage(path, 0, LAYERS, capacity=8, max_model_len=64, numerics=EXACT)


def test_families_that_are_exact_are_listed(tmp_path: Path) -> None:
    """The list in docs/reference/models.md, beside what a stage of each family finds."""
    section = (DOCS / "reference" / "models.md").read_text().split("## Exact numerics")[1].split("\n## ")[0]
    families = re.search(r"^`.*`$", section, re.MULTILINE)
    assert families is not None
    listed = {name.strip("`") for name in families[0].split(", ")}
    known = ARCHITECTURES | RELATIVES
    assert listed == {settings_of(name)["model_type"] for name in known if is_exact(tmp_path / name, name)}


def is_exact(folder: Path, architecture: str) -> bool:
    checkpoint = open_checkpoint(str(make_checkpoint(folder, architecture)))
    try:
        check_loads(checkpoint, EXACT)
    except FieldError:
        return False
    return load_stage(str(folder), 0, checkpoint.num_layers, capacity=8, max_model_len=64).exact


@pytest.mark.parametrize(("architecture", "quantization"), [*some_formats(sorted(COMPILED), "qwen3", 2, (*WHOLE,))])
def test_a_tree_beside_the_fused_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, quantization: str
) -> None:
    """On two stages, also where rows attend to a window and to two branches."""
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.1)
    found = []
    for compile_ in (stage_model.compiled, lambda base, dtype: base):
        monkeypatch.setattr(stage_model, "compiled", compile_)
        found.append(branching(Staged(path, 2, quantization=quantization)))
    compiled, fused = found
    off = (compiled - fused).abs().amax(-1) / fused.abs().max()
    # A float's last bit may move a number to the next whole one, 1/127 of its group's largest. Few rows meet that.
    assert off.max() < 2**-5
    assert off.median() < 2**-20


@pytest.mark.parametrize(("architecture", "dtype"), [*some_formats(sorted(COMPILED), "qwen3", 2, (*FLOATS,))])
def test_a_tree_beside_float32(tmp_path: Path, architecture: str, dtype: str) -> None:
    """In float32 sums are reordered, no more; in 16 bits logits are as near to float32's as those of plain modules."""
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.1, dtype=dtype)
    exact = branching(Staged(path, 2, numerics=REFERENCE))
    ours = (branching(Staged(path, 2, dtype=dtype)) - exact).abs()
    if dtype == "float32":
        assert ours.max() < 2**-18 * exact.abs().max()
    else:
        theirs = (branching(Staged(path, 2, dtype=dtype, numerics=REFERENCE)) - exact).abs()
        assert ours.mean() <= theirs.mean()


def branching(stages: Staged) -> torch.Tensor:
    """The logits of a chain of rows, then of two branches behind it."""
    chain = stages.run(chain_rows(0, TOKENS, range(7)), range(7), opened=[0])
    return torch.cat([chain, stages.run(tree(), [0, 1])])


@pytest.mark.parametrize("form", FORMATS)
def test_states_that_a_drafter_reads_are_those_between_the_layers(tmp_path: Path, form: str) -> None:
    """Each layer's output is what stages of one layer send on, and reading it changes nothing."""
    path = make_checkpoint(tmp_path, "qwen3")
    whole, stages = (Staged(path, count, **FORMATS[form]) for count in (1, LAYERS))
    rows, sent = chain_rows(0, TOKENS, range(7)), []
    for model in stages.models:
        model.forward = passing(model.forward, sent)  # type: ignore[method-assign]
    found = [staged.run(rows, range(7), opened=[0]) for staged in (whole, stages)]
    whole.begin().models[0].tap(range(LAYERS))
    found.append(whole.run(rows, range(7), opened=[0]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    states = torch.stack([whole.models[0]._tapped[index][0] for index in range(LAYERS)])
    assert torch.equal(states[1:], torch.stack(sent[:-1]))


def passing(forward: Callable[..., torch.Tensor], sent: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(view: BatchView, hidden: torch.Tensor | None) -> torch.Tensor:
        sent.append(forward(view, hidden))
        return sent[-1]

    return run


@pytest.mark.parametrize(("architecture", "form"), [*some_formats(FAMILIES, "qwen3", 8)])
def test_a_rows_logits_are_its_own(tmp_path: Path, architecture: str, form: str) -> None:
    """Token by token; beside others, in slots of no order, over two stages; in pieces; and among other branches."""
    path, options = make_checkpoint(tmp_path, architecture), FORMATS[form]
    one, two = (Staged(path, count, **options) for count in (1, 2))
    expected = in_pieces(one, [1] * len(TOKENS))
    for sizes in ([3, 4], [6, 1], [7]):
        assert torch.equal(in_pieces(one.begin(), sizes), expected)

    beside = chain_rows(1, TOKENS[::-1], range(40, 47))
    own = chain_rows(0, TOKENS, [30, 4, 17, 2, 9, 60, 3])
    for i in range(len(TOKENS)):
        beside.append(0, own.nodes[i], own.slots[i], own.parents[i], own.positions[i], own.tokens[i])
    together = two.run(beside, range(7, 14), opened=[0, 1])
    assert torch.equal(together, expected)

    branches, wanted = branching_rows(own)
    among = two.begin().run(branches, wanted, opened=[0])
    assert torch.equal(among, expected)


def in_pieces(stages: Staged, sizes: Sequence[int]) -> torch.Tensor:
    """The logits of ``TOKENS`` in batches of these sizes, each committed before the next."""
    found, done = [], 0
    for size in sizes:
        before = list(range(done))
        rows = chain_rows(0, TOKENS[done : done + size], range(done, done + size), done, done - 1)
        committed = [CommittedSlots(0, before[-previous:])] if (previous := len(before) - sum(map(len, found))) else []
        found.append(stages.run(rows, range(size), opened=[] if done else [0], committed=committed))
        done += size
    return torch.cat(found)


def branching_rows(own: Rows) -> tuple[Rows, list[int]]:
    """The chain ``own``, each row followed by two that are its siblings; and where its rows are."""
    rows = Rows()
    for i, (node, slot, parent) in enumerate(zip(own.nodes, own.slots, own.parents, strict=True)):
        rows.append(0, node, slot, parent, own.positions[i], own.tokens[i])
        for more in (1, 2):
            rows.append(0, 1000 * more + node, 65 + 2 * i + more, parent, own.positions[i], own.tokens[i] + more)
    return rows, list(range(0, len(rows), 3))


AVX2 = (
    "+64bit,+cmov,+cx16,+cx8,+fxsr,+mmx,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,"
    "+lzcnt,+movbe,+xsave"
)
OTHERS = {"haswell": AVX2, "skylake-avx512": f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"}
"""Older processors than those with instructions for bytes and bfloat16, and what LLVM calls their features."""


@pytest.mark.skipif(instruction() != VNNI_512, reason="this processor has no AVX-512")
@pytest.mark.parametrize(
    ("older", "formats"),
    [
        ("haswell", ("int4-float16", "bfloat16")),
        *(pytest.param(older, tuple(FORMATS), id=older, marks=pytest.mark.whole) for older in OTHERS),
    ],
)
def test_processors_of_other_kinds_give_the_same_bits(tmp_path: Path, older: str, formats: tuple[str, ...]) -> None:
    """Logits of each format, in a process whose code is made for another processor; torch's own is, too."""
    path = make_checkpoint(tmp_path, "qwen3", initializer_range=0.1)
    forced = {"NUMBA_CPU_NAME": older, "NUMBA_CPU_FEATURES": OTHERS[older], "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-m", "tests.unit.models.compiled.digests", str(path), *formats]
    ended = subprocess.run(command, env={**os.environ, **forced}, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["avx2", "False", *digests(path, formats)]


NEHALEM = "+64bit,+cmov,+cx8,+fxsr,+mmx,+sse,+sse2"
LOADING = """
import sys
from penstock.models.stage_model import load_stage
for options in ({}, {"numerics": "exact"}, {"quantization": "int4"}):
    try:
        print(load_stage(sys.argv[1], 0, 2, capacity=8, max_model_len=64, **options).exact)
    except Exception as error:
        print(error)
"""


def test_a_processor_without_the_instructions_computes_as_torch_does(tmp_path: Path) -> None:
    """It has no code for half precision, and LLVM ends a process that asks for some."""
    path, script = make_checkpoint(tmp_path, "qwen3", initializer_range=0.1), tmp_path / "load.py"
    script.write_text(LOADING)
    forced = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": NEHALEM, "PYTHONPATH": "."}
    ended = subprocess.run(
        [sys.executable, str(script), str(path)],
        env={**os.environ, **forced},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.splitlines() == [
        "False",
        f"numerics is 'exact', for which this processor lacks {INSTRUCTIONS}; use fast",
        f"quantization is 'int4', for which this processor lacks {INSTRUCTIONS}; use none",
    ]


def tree() -> Rows:
    branches = Rows()
    for node, (token, slot) in enumerate([(5, 9), (9, 12)]):
        branches.append(0, 100 + node, slot, 6, 7, token)
    return branches


def test_activations() -> None:
    assert is_silu(torch.nn.SiLU())
    assert not is_silu(torch.nn.GELU())
    assert not is_silu(torch.nn.GELU(approximate="tanh"))


@pytest.mark.parametrize("form", FORMATS)
def test_threads_share_a_prompt(tmp_path: Path, form: str) -> None:
    """A prompt is long enough for its products and its attention to be divided among threads."""
    path = make_checkpoint(tmp_path, "qwen3")
    rows = chain_rows(0, [(7 * i + 3) % 150 for i in range(COUNT)], range(COUNT))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            staged = Staged(path, 1, capacity=COUNT, **FORMATS[form])
            found.append(staged.run(rows, range(COUNT), opened=[0]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
