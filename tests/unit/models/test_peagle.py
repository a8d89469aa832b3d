"""P-EAGLE computes what a plain reference does, from every layout, and is refused by name where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.checkpoint.look import method_of
from penstock.config import FieldError
from penstock.messages import CONTEXT, PATH, Batch, Features, Rows
from penstock.models.packing import pack
from penstock.models.speculators.open import load_speculator_stage, open_speculator
from penstock.models.speculators.peagle import USUAL_DEPTHS, PeagleCheckpoint, PeagleStage
from penstock.stage.driver import StageCore
from tests import speculators
from tests.checkpoints import VOCAB, make_checkpoint
from tests.speculators import BLOCK, DRAFTED, FIRST_DRAFTED, MASK, Draft
from tests.unit.models import blocks_reference as reference
from tests.unit.models.test_blocks import (
    CAPACITY,
    EPS,
    THETA,
    Text,
    asked,
    asked_again,
    branch,
    check_field_refused,
    compare,
    set_at,
)

LAYOUTS: dict[str, tuple[Callable[[Checkpoint], Draft], int, tuple[int, ...]]] = {
    "vllm": (speculators.peagle, USUAL_DEPTHS, (2, 5, 7)),
    "speculators": (speculators.speculators_peagle, BLOCK, (2, 5, 7)),
    "nemo": (speculators.nemo_peagle, BLOCK, (2, 5, 7)),
}
"""Layout: its maker, the rows of a pass, and the target's states that it reads."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Ten layers, so that EAGLE-3's usual states are those that the others' files name."""
    return open_checkpoint(str(make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=10)))


def stage_of(draft: Draft, folder: Path, target: Checkpoint) -> PeagleStage:
    made = load_speculator_stage(
        str(draft.save(folder)), str(target.path), capacity=CAPACITY, dtype="float32", device="cpu"
    )
    assert isinstance(made, PeagleStage)
    return made


def arrays(draft: Draft) -> dict[str, np.ndarray]:
    """The file's tensors by the names that they have without NeMo's prefix."""
    return {name.removeprefix("model."): tensor.double().numpy() for name, tensor in draft.tensors.items()}


def expected(
    draft: Draft,
    text: Text,
    known: int,
    rows: int,
    *,
    begins: int = 1,
    mask: int = MASK,
    theta: float = THETA,
    eps: float = EPS,
    normed_residual: bool | None = None,
) -> list[np.ndarray]:
    """The reference's log chances [V] after the text's last token, where the states of the first ``known`` are known.

    ``begins`` is the first token that has a row.
    """
    t = arrays(draft)
    residual = draft.config.get("norm_before_residual", False) if normed_residual is None else normed_residual
    states = text.states.double().numpy()
    masks = max(0, rows - (len(text.tokens) - known))
    tokens = [*text.tokens[begins:], *[mask] * masks]
    before = [states[i - 1] if 0 < i <= known else None for i in range(begins, begins + len(tokens))]
    hidden = reference.peagle(
        t, t["embed_tokens.weight"], tokens, before, begins, theta=theta, eps=eps, normed_residual=residual
    )
    found = []
    for row in hidden[len(text.tokens) - 1 - begins :]:
        logits = np.full(VOCAB, -np.inf)
        logits[[FIRST_DRAFTED + 2 * i for i in range(DRAFTED)]] = row @ t["lm_head.weight"].T
        found.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shown", [1, 3, 9], ids=["root", "in flight", "longer than a pass"])
@pytest.mark.parametrize("length", [10, 18])
def test_a_pass_is_its_reference(tmp_path: Path, target: Checkpoint, layout: str, shown: int, length: int) -> None:
    make, rows, _ = LAYOUTS[layout]
    draft, text, known = make(target), Text(length), length - shown
    answers = asked(stage_of(draft, tmp_path, target), text, known, VOCAB, 9)
    assert len(answers) == max(rows, shown) - shown + 1
    compare(answers, expected(draft, text, known, rows))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_in_parts_is_the_same(tmp_path: Path, target: Checkpoint, layout: str) -> None:
    """Its rows enter with their states as these come, and a row that was in flight becomes context."""
    make, rows, _ = LAYOUTS[layout]
    draft, text, shorter = make(target), Text(16), Text(16)
    stage = stage_of(draft, tmp_path, target)
    core = StageCore(stage, CAPACITY, is_last=True)
    answers = asked(stage, text, 4, VOCAB, 9, core=core, until=7)
    before = 4
    for stream, (known, until) in enumerate(((4, 7), (9, 12), (15, 16))):
        if stream:
            answers = asked_later(core, stage, text, before, known, until, stream)
        shorter.tokens, before = text.tokens[:until], known
        compare(answers, expected(draft, shorter, known, rows))


def asked_later(
    core: StageCore, stage: PeagleStage, text: Text, before: int, known: int, until: int, stream: int
) -> list[tuple[list[int], list[float]]]:
    """The candidates after ``until`` tokens, where the states of those from ``before`` to ``known`` have come."""
    own, every = slice(before, known), range(before, until)
    nodes = [text.node(i) for i in range(before, known)]
    stage.add_features(Features(layers=[2, 5, 7], nodes=nodes, slots=text.slots[own], width=96), text.states[own])
    rows = Rows()
    for i in every:
        rows.append(7, text.node(i), text.slots[i], text.slots[i - 1], i, text.tokens[i])
    batch = Batch(stream=stream, rows=rows, wanted=[len(every) - 1], candidates=VOCAB, ahead=9)
    batch.alive = list(range(len(every)))
    batch.feature_levels = [CONTEXT if i < known else PATH for i in every]
    return [(answer.tokens, answer.scores) for answer in core.process(batch, None)[3]]


def test_a_text_of_one_token_has_no_states(tmp_path: Path, target: Checkpoint) -> None:
    draft, text = speculators.peagle(target), Text(1)
    answers = asked(stage_of(draft, tmp_path, target), text, 0, VOCAB, 9)
    compare(answers, expected(draft, text, 0, USUAL_DEPTHS, begins=0))


def test_a_second_token_does_not_see_the_first(tmp_path: Path, target: Checkpoint) -> None:
    draft, text = speculators.peagle(target), Text(2)
    answers = asked(stage_of(draft, tmp_path, target), text, 1, VOCAB, 9)
    compare(answers, expected(draft, text, 1, USUAL_DEPTHS))
    text.tokens[0] = (text.tokens[0] + 1) % VOCAB
    other = asked(stage_of(draft, tmp_path / "other", target), text, 1, VOCAB, 9)
    assert answers == other


def test_a_lost_context_is_hidden(tmp_path: Path, target: Checkpoint) -> None:
    """A slot that has got another node since is no part of the context, and the others stay."""
    draft, text = speculators.peagle(target), Text(9)
    stage = stage_of(draft, tmp_path, target)
    first = asked(stage, text, 8, VOCAB, 0)
    stage._context_of[text.slots[7]] = 0
    again = asked_again(stage, text)
    compare(again, expected(draft, text, 7, USUAL_DEPTHS)[:1])
    assert again != first


def test_passes_of_a_tree_are_those_of_each_path(tmp_path: Path, target: Checkpoint) -> None:
    draft, whole = speculators.peagle(target), Text(12)
    made = [stage_of(draft, tmp_path / str(i), target) for i in range(3)]
    found = branch(made[0], whole, (10, 11))
    for leaf, other in ((0, 10), (1, 11)):
        alone = branch(made[leaf + 1], whole, (other,))[0]
        assert found[leaf][0] == alone[0]
        np.testing.assert_allclose(found[leaf][1], alone[1], atol=1e-6)


def test_its_matrices_are_stored_in_eight_bits(tmp_path: Path, target: Checkpoint) -> None:
    draft, text = speculators.peagle(target), Text(10)
    stage = stage_of(draft, tmp_path, target)
    before = stage.weight_bytes
    pack(stage.module, "int8")
    assert stage.weight_bytes < before
    asked(stage, text, 8, VOCAB, 9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_say_what_they_are(tmp_path: Path, target: Checkpoint, layout: str) -> None:
    make, rows, reads = LAYOUTS[layout]
    folder = make(target).save(tmp_path)
    opened = open_speculator(str(folder), target)
    assert isinstance(opened, PeagleCheckpoint)
    assert (opened.kind, opened.methods, method_of(str(folder))) == ("peagle", ("peagle",), "peagle")
    assert (opened.reads, opened.shape.size, opened.shape.mask_token) == (reads, rows, MASK)
    assert opened.depth == len(opened.shape.causal) == {"vllm": 3, "speculators": 2, "nemo": 1}[layout]


def test_the_tensor_tells_where_the_configuration_does_not(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.nemo_peagle(target)
    del draft.config["parallel_drafting"]
    draft.tensors["model.mask_hidden"] = draft.tensors.pop("mask_hidden")
    folder = draft.save(tmp_path)
    assert open_speculator(str(folder), target).kind == method_of(str(folder)) == "peagle"


REFUSED = [
    ("vllm", "hidden_size", 64, r"\.weight is \[32, .* ask for \[64, "),
    ("vllm", "intermediate_size", 44, r"mlp\.gate_proj\.weight is \[40, 32\].* ask for \[44, 32\]"),
    ("vllm", "num_hidden_layers", 4, r"lacks the tensor layers\.3\.self_attn\.q_proj\.weight"),
    ("vllm", "num_hidden_layers", 2, r"holds the tensor layers\.2\..*, which no layout"),
    ("vllm", "num_hidden_layers", None, "num_hidden_layers is None; the file holds"),
    ("vllm", "num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; the file holds"),
    ("vllm", "num_attention_heads", 0, "num_attention_heads is 0; it has to be an integer above 0"),
    ("vllm", "num_key_value_heads", 3, "num_key_value_heads is 3; it has to divide the 4"),
    ("vllm", "hidden_act", "sharp", r"hidden_act is \"sharp\"; it has to be one of"),
    ("vllm", "rms_norm_eps", "small", r"rms_norm_eps is \"small\"; it has to be a finite number, 0 or above"),
    ("vllm", "rope_theta", 0, "rope_theta is 0; it has to be a finite number, above 0"),
    ("vllm", "vocab_size", 170, "vocab_size is 170, the target's 160"),
    ("vllm", "attention_bias", True, "attention_bias is True, which the file's tensors contradict"),
    ("nemo", "attention_bias", False, "attention_bias is False, which the file's tensors contradict"),
    (
        "vllm",
        "layer_types",
        ["sliding_attention"] * 3,
        "layer_types is .*; only 'full_attention' in all layers is supported",
    ),
    ("vllm", "layer_types", ["full_attention"] * 2, "layer_types is .*; only 'full_attention' in all layers"),
    ("vllm", "layer_types", 3, "layer_types is 3; only 'full_attention' in all layers is supported"),
    ("vllm", "attention_bias", "no", "attention_bias is 'no'; it has to be true or false"),
    ("vllm", "speculators_config", 3, "speculators_config is 3; its proposal_methods have to be a list of tables"),
    ("speculators", "speculators_config.proposal_methods", [3], "proposal_methods have to be a list of tables"),
    ("speculators", "speculators_model_type", "mlp", "speculators_model_type is 'mlp', but .*: set it to 'peagle'"),
    ("nemo", "para_depths", 6, "para_depths is 6, and num_depths 5; both mean the same"),
    ("nemo", "fc_norm", "yes", "fc_norm is 'yes'; it has to be true or false"),
    ("vllm", "draft_vocab_size", 50, r"lm_head\.weight is \[60, 32\].* ask for \[50, 32\]"),
    ("vllm", "draft_vocab_size", "60", "draft_vocab_size is '60'; it has to be an integer"),
    ("vllm", "draft_vocab_size", 161, "drafts 161 tokens, the target knows 160"),
    ("vllm", "target_hidden_size", 64, "target_hidden_size is 64, the target's width 32"),
    (
        "vllm",
        "parallel_drafting",
        False,
        "parallel_drafting is False, but the drafter is P-EAGLE's: remove the field",
    ),
    ("vllm", "parallel_drafting", 1, "parallel_drafting is 1; it has to be true or false"),
    (
        "vllm",
        "ptd_token_id",
        None,
        "has none of pard_token, ptd_token_id, mask_token_id: one has to name the mask token",
    ),
    ("vllm", "ptd_token_id", "3", "ptd_token_id is '3'; it has to be an integer of 0 or more"),
    ("vllm", "ptd_token_id", -1, "ptd_token_id is -1; it has to be an integer of 0 or more"),
    ("vllm", "ptd_token_id", 160, "ptd_token_id is 160; the target has 160 tokens"),
    ("vllm", "pard_token", 4, "ptd_token_id is 3, and pard_token 4; both mean the same"),
    ("vllm", "num_depths", 0, "num_depths is 0; it has to be an integer of 1 or more"),
    ("vllm", "num_depths", "8", "num_depths is '8'; it has to be an integer of 1 or more"),
    ("vllm", "num_depths", 513, "num_depths is 513; at most 512 rows are computed at once"),
    ("vllm", "para_depths", 2.5, r"para_depths is 2\.5; it has to be an integer of 1 or more"),
    ("nemo", "num_aux_hidden_states", 5, "num_aux_hidden_states is 5, the states that it reads are 3"),
    ("nemo", "fc_norm", False, r"fc_norm is False, but the file holds fc_norm\.0\.weight"),
    ("vllm", "fc_norm", True, r"fc_norm is True, but the file lacks fc_norm\.0\.weight"),
    ("nemo", "norm_output", "yes", "norm_output is 'yes'; it has to be true or false"),
    ("speculators", "norm_before_fc", False, r"norm_before_fc is False, but the file holds input_norm\.weight"),
    ("speculators", "norm_before_residual", "no", "norm_before_residual is 'no'; it has to be true or false"),
    ("speculators", "eagle_aux_hidden_state_layer_ids", [2, 5, 11], "hidden states, 0 to 10"),
    (
        "speculators",
        "eagle_aux_hidden_state_layer_ids",
        0,
        "eagle_aux_hidden_state_layer_ids is 0; it has to be a list",
    ),
    ("speculators", "eagle_aux_hidden_state_layer_ids", [2, 5], r"input_norm\.weight is \[96\].* ask for \[64\]"),
    ("speculators", "transformer_layer_config", 3, "transformer_layer_config is 3; it has to be a table"),
    ("speculators", "transformer_layer_config.num_hidden_layers", 3, r"lacks the tensor layers\.2\."),
    (
        "speculators",
        "speculators_config.proposal_methods",
        [{"speculative_tokens": "5"}],
        "speculative_tokens is '5'; it has to be an integer of 1 or more",
    ),
]
"""Layout, field of the configuration, what is written there, and how it is refused."""


@pytest.mark.parametrize(("layout", "path", "value", "message"), REFUSED)
def test_a_field_that_does_not_fit_is_refused_by_its_name(
    tmp_path: Path, target: Checkpoint, layout: str, path: str, value: object, message: str
) -> None:
    check_field_refused(LAYOUTS[layout][0](target), tmp_path, target, path, value, message)


OPTIONAL = ("t2d", "embed_tokens.weight")
"""Tensors that a file may lack."""
ANNOUNCED = ("fc_norm.0.weight", "input_norm.weight")
"""Tensors that a field of the configuration says are there."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_that_is_missing_misshapen_or_strange_is_refused_by_its_name(
    tmp_path: Path, target: Checkpoint, layout: str
) -> None:
    made = LAYOUTS[layout][0](target)
    for number, name in enumerate(made.tensors):
        draft, plain = LAYOUTS[layout][0](target), name.removeprefix("model.")
        draft.tensors[name] = torch.ones(3, 5)
        with pytest.raises(FieldError, match=name.replace(".", r"\.") + r" is \[3, 5\]"):
            open_speculator(str(draft.save(tmp_path / f"{number}-shape")), target)
        del draft.tensors[name]
        if plain not in OPTIONAL:
            lacks = "lacks " if plain in ANNOUNCED else "lacks the tensor "
            with pytest.raises(FieldError, match=lacks + plain.replace(".", r"\.")):
                open_speculator(str(draft.save(tmp_path / f"{number}-missing")), target)
    made.tensors["prefix_gru.weight_ih_l0"] = torch.ones(3)
    with pytest.raises(FieldError, match=r"holds the tensor prefix_gru\.weight_ih_l0, which no layout"):
        open_speculator(str(made.save(tmp_path / "strange")), target)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path, target: Checkpoint) -> None:
    draft = speculators.peagle(target)
    draft.tensors["model.fc.weight"] = draft.tensors["fc.weight"].clone()
    with pytest.raises(
        FieldError, match=r"holds both (model\.)?fc\.weight and (model\.)?fc\.weight, which name the same"
    ):
        open_speculator(str(draft.save(tmp_path)), target)


FOLLOWED: list[tuple[str, str, object, dict[str, Any]]] = [
    ("vllm", "rms_norm_eps", 0.5, {"eps": 0.5}),
    ("vllm", "rope_theta", 50.0, {"theta": 50.0}),
    ("vllm", "ptd_token_id", 9, {"mask": 9}),
    ("vllm", "norm_before_residual", True, {"normed_residual": True}),
    ("vllm", "num_depths", 6, {"rows": 6}),
    ("vllm", "para_depths", 6, {"rows": 6}),
    ("speculators", "speculators_config.proposal_methods", [{"speculative_tokens": 7}], {"rows": 7}),
]
"""Layout, field of the configuration, what is written there, and what the reference then takes."""


@pytest.mark.parametrize(("layout", "path", "value", "taken"), FOLLOWED)
def test_a_field_that_is_followed_changes_what_the_reference_says_it_changes(
    tmp_path: Path, target: Checkpoint, layout: str, path: str, value: object, taken: dict[str, Any]
) -> None:
    make, rows, _ = LAYOUTS[layout]
    draft, text = make(target), Text(18)
    usual = {"rows": rows, "normed_residual": draft.config.get("norm_before_residual", False)}
    set_at(draft, path, value)
    answers = asked(stage_of(draft, tmp_path, target), text, 16, VOCAB, 9)
    compare(answers, expected(draft, text, 16, **{**usual, **taken}))
    with pytest.raises((AssertionError, ValueError)):  # the latter where a pass has more rows, or fewer
        compare(answers, expected(draft, text, 16, **usual))
