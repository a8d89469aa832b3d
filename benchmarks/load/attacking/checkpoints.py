"""Checkpoints whose files have been changed: each opens or is refused with a ConfigError, soon, and runs no code."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import shutil
import struct
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benchmarks.load.attacking.mutations import HOSTILE, mutate
from benchmarks.load.attacking.trying import Fault
from benchmarks.shared.root import ROOT

DEMO: Final = ROOT / "penstock" / "demo"
SOON: Final = 60.0
"""Seconds that opening may take. A sound checkpoint takes a fifth of one."""
STAGES: Final = 2
FILES: Final = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
NEW_FILES: Final = (
    "special_tokens_map.json",
    "added_tokens.json",
    "processor_config.json",
    "model.safetensors.index.json",
)
WEIGHTS: Final = "model.safetensors"
FIELDS: Final = (
    *("auto_map", "attn_implementation", "base_model_pp_plan", "dtype", "eos_token_id", "experts_implementation"),
    *("head_dim", "id2label", "layer_types", "num_labels", "quantization_config", "rope_scaling", "sliding_window"),
    *("sub_configs", "text_config", "tokenizer_class", "transformers_weights", "use_cache", "vocab_size", "weight_map"),
    *("added_tokens_decoder", "additional_special_tokens", "chat_template", "extra_special_tokens", "init_inputs"),
    *("model_max_length", "normalizer", "padding", "tokenizer_file", "truncation", "temperature", "top_k"),
)
"""Fields that transformers or tokenizers use, wherever they are."""
FOREIGN: Final = (
    {"AutoTokenizer": ["foreign.Thing", None]},
    {"AutoConfig": "foreign.Thing", "AutoModelForCausalLM": "foreign.Thing"},
    "foreign.Thing",
    "foreign--foreign.Thing",
)
"""Values that name Python code in the folder."""


def open_all(place: Path) -> None:
    """Do everything that precedes a checkpoint's first request, for a folder or GGUF file, and encode a text."""
    from penstock.checkpoint.checkpoint import open_checkpoint
    from penstock.core import RequestError
    from penstock.models.stage_model import load_stage
    from penstock.text.grammar import load_grammar_tokenizer
    from penstock.text.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(str(place))
    checkpoint.even_split(STAGES)
    tokenizer = load_tokenizer(checkpoint.path)
    with contextlib.suppress(RequestError):
        tokenizer.decode(tokenizer.encode("a text"))
    load_grammar_tokenizer.__wrapped__(checkpoint.path, checkpoint.vocab_size, checkpoint.eos_token_ids)
    load_stage(str(place), 0, checkpoint.num_layers, capacity=8, max_model_len=8)


def open_speculator(folder: Path, target: Path = DEMO / "target") -> None:
    """Do everything that precedes a learned drafter's first proposal."""
    from penstock.models.speculators.open import load_speculator_stage

    load_speculator_stage(str(folder), str(target), capacity=8, dtype="float32", device="cpu")


class Checkpoints:
    """Opens checkpoints in a process of its own, which may hang or die."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._opener = context.Process(target=answer, args=(other,), daemon=True)
        self._opener.start()
        other.close()

    def attempt(self, rng: random.Random) -> str:
        sound = rng.choice(sources())
        folder = self._folder / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        ran = self._folder / "ran"
        (folder / "foreign.py").write_text(f"open({str(ran)!r}, 'w')\nThing = None\n")
        names = [name for name in (*FILES, WEIGHTS) if (folder / name).is_file()]
        names += NEW_FILES if rng.random() < 0.3 else ()
        for name in rng.sample(names, min(len(names), rng.randint(1, 2))):
            change(folder / name, rng)
        outcome, text = self._opened(folder)
        if ran.exists():
            ran.unlink()
            raise Fault("the checkpoint's code ran")
        if outcome == "raw":
            raise Fault(text)
        return f"{sound.name} {outcome}"

    def _opened(self, folder: Path) -> tuple[str, str]:
        self._pipe.send(str(folder))
        if not self._pipe.poll(SOON):
            raise Fault(f"not opened after {SOON:.0f} s")
        try:
            outcome, text = self._pipe.recv()
        except EOFError:
            self._opener.join()
            raise Fault(f"the process that opened it has ended: {self._opener.exitcode}") from None
        return outcome, text

    def close(self) -> None:
        self._pipe.close()
        self._opener.kill()
        self._opener.join()
        self._opener.close()


@contextmanager
def attacked() -> Iterator[Checkpoints]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        attack = Checkpoints(Path(folder))
        stack.callback(attack.close)
        yield attack


def answer(pipe: Connection) -> None:
    """Run in the opening process: reports the outcome of each folder."""
    from penstock.core import ConfigError

    with contextlib.suppress(EOFError):
        while True:
            folder = Path(pipe.recv())
            opens: Callable[[Path], None] = open_all if (folder / "tokenizer.json").exists() else open_speculator
            try:
                opens(folder)
                pipe.send(("opened", ""))
            except ConfigError as error:
                pipe.send(("refused", str(error)))
            except BaseException:
                pipe.send(("raw", traceback.format_exc()))


def sources() -> Sequence[Path]:
    return [DEMO / "target", DEMO / "draft", *sorted(path for path in (DEMO / "drafters").iterdir() if path.is_dir())]


def change(file: Path, rng: random.Random) -> None:
    """Make one change or two to a file; a missing file is made."""
    data = file.read_bytes() if file.is_file() else b"{}"
    if rng.random() < 0.1:
        file.write_bytes(broken(data, rng))
    elif file.name == WEIGHTS:
        file.write_bytes(changed_weights(data, rng))
    else:
        content = json.loads(data)
        for _ in range(rng.randint(1, 2)):
            content = changed(content, rng)
        file.write_text(json.dumps(content))


def changed(content: Any, rng: random.Random) -> Any:
    if rng.random() < 0.1 and isinstance(content, dict):
        return {**content, rng.choice(("auto_map", "tokenizer_class", "model_type")): rng.choice(FOREIGN)}
    return mutate(content, FIELDS, lambda options, _: rng.choice(options))


def changed_weights(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header, with a right or a wrong length."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensor = rng.choice([name for name in header if name != "__metadata__"])
    field = rng.choice(("dtype", "shape", "data_offsets"))
    values: tuple[Any, ...] = ("F32", "I64", "BOOL", "F8_E4M3", [], [0, 0], [1, 2], [2**40, 2**40], [-1, 4], *HOSTILE)
    header[tensor][field] = rng.choice(values)
    if rng.random() < 0.3:
        header[rng.choice(values[:3])] = header.pop(tensor)
    text = json.dumps(header).encode()
    return struct.pack("<Q", rng.choice((len(text), len(text), len(text), 0, 2**62))) + text + data[8 + length :]


def broken(data: bytes, rng: random.Random) -> bytes:
    """The data cut off, or with a few bytes changed near the beginning."""
    if rng.random() < 0.5:
        return data[: rng.randrange(len(data) + 1)]
    bytes_ = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        bytes_[rng.randrange(min(len(bytes_), 4096))] = rng.randrange(256)
    return bytes(bytes_)
