"""README.md, the start pages and the how-to pages, followed literally: their commands, programs, files and outputs.

A page's reader has hosts, homes and a network of its own, small random models where the page names models, and types
what stands there. What no test can type is in ``NOT_RUN`` and ``INSTEAD``; its options are checked all the same.
``penstock`` is a fork of a process that has imported what commands need (``tests/warm.py``), since a page has dozens of
them, and so is a program; how it starts when it is installed is seen by test_cli.py, test_run.py and test_wheel.py, and
a program by test_processes.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import trustme
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from penstock.files import cache_folder
from penstock.library.names import DEFAULT, short_names
from penstock.library.shelf import package_file
from tests.checkpoints import EOS, make_checkpoint
from tests.conftest import noisy_copy
from tests.gguf_files import TEMPLATE, make_gguf
from tests.gguf_files import write as write_gguf
from tests.page_hosts import ADDRESSES, CERTIFICATE, NAMES, can_be_made, entering, network
from tests.pages import INLINE, PAGES, ROOT, Source, Typed, parse, steps_of, unknown_in, words_for_penstock
from tests.warm import Place, Warm, warmed, write_command

INSTALLED: Final = "fetches packages: tests/integration/commands/test_wheel.py"
LONG: Final = "minutes of a quiet machine: tests/integration/commands/test_machine_benchmarks.py"
RAY: Final = "a Ray cluster: tests/integration/hosts/test_ray.py"
SERVED: Final = "Ray Serve: tests/integration/server/test_ray_serve.py"
GPU: Final = "GPUs"
DOCKER: Final = "Docker: tests/integration/test_image.py"
ROOTS: Final = "systemd"
MANY: Final = "fourteen processes: the page's next command is its like"
NOT_RUN: Final = {
    "git clone <this repository> penstock && cd penstock": "an address that a page does not know",
    "python3 -m venv .venv && . .venv/bin/activate": INSTALLED,
    "pip install --constraint constraints.txt --editable .": INSTALLED,
    "uv tool install --constraints constraints.txt ./dist/penstock-*.whl": INSTALLED,
    'pipx install --pip-args="--constraint constraints.txt" ./dist/penstock-*.whl': INSTALLED,
    "pip install --constraint constraints.txt ./dist/penstock-*.whl": INSTALLED,
    "penstock demo": "a minute of emulated boards: tests/integration/commands/test_cli.py",
    "python -m benchmarks.real_pipeline --out figures --model SmolLM2-135M-Instruct.Q4_1.gguf": LONG,
    "python -m benchmarks.gpu --out figures --device cuda": LONG,
    "docker build -t penstock .": DOCKER,
    "docker run --init -p 127.0.0.1:8000:8000 penstock": DOCKER,
    "docker run --init -p 8000:8000 -e PENSTOCK_API_KEY -v models:/home/penstock/.cache/huggingface penstock "
    "Qwen/Qwen2.5-0.5B-Instruct -pp 2": DOCKER,
    "MODEL=smollm2 docker compose up": DOCKER,
    "penstock worker --listen 10.0.0.2:7700 --unit | sudo tee /etc/systemd/system/penstock-worker.service": ROOTS,
    "sudo systemctl daemon-reload && sudo systemctl enable --now penstock-worker": ROOTS,
    "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...": RAY,
    "ray start --head --node-ip-address 10.0.0.1": RAY,
    "pip install --constraint constraints.txt --editable '.[serve]'": INSTALLED,
    "serve run --non-blocking penstock.ray_serve:app model=demo min_replicas=3": SERVED,
    "curl -s 127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' "
    """-d '{"prompt": "def fibonacci(n):", "max_tokens": 24}'""": SERVED,
    "ray start --address 10.0.0.1:6379": RAY,
    'penstock generate "What turns a water wheel?" --model path/to/model --hosts ray -pp 2': RAY,
    "penstock bench --model demo --cluster pipedec-14x3090 --strategies "
    "autoregressive,static_tree,pipedec,flowspec,auto": MANY,
    "penstock plan --hosts b,b,c --model MODEL --device cuda": GPU,
    "penstock plan --hosts b:7700,b:7701,c --model MODEL --device cuda": GPU,
}
"""Commands that no test types, with what they need or the test that does it."""
INSTEAD: Final = {
    # Installing is what tests/integration/hosts/test_setup.py does; the second host gets keys as one of its steps.
    "penstock hosts setup user@10.0.0.2": "cp -r .config ../second",
    # The other bench is one of the reader's own.
    "penstock compare report/bench.json other/bench.json": (
        "cp -r report other && penstock compare report/bench.json other/bench.json"
    ),
    # Hours of writing.
    "penstock train eagle3 --model path/to/target --self-generate 10000 --output my-eagle3": (
        "penstock train eagle3 --model path/to/target --self-generate 4 --max-length 64 --output my-eagle3"
    ),
}
"""Commands in whose place others are typed."""
BRIEF: Final = "--num-prompts 1 --max-tokens 8"
FAST: Final = "--prompts question.jsonl --time-scale 0.02 --num-prompts 1 --max-tokens 4"
SHORT: Final = "--tokens 40 --tokens-per-request 20"
LOAD: Final = "--num-prompts 4 --output-len 8"
MORE: Final = {
    # Several requests of hundreds of tokens with the demo pair, on emulated devices that take their time, or for a map.
    'penstock bench --cluster my-boards.toml --strategies "pipedec[width=16],pipedec[width=64],static_tree"': FAST,
    "penstock bench --cluster plan.toml": FAST,
    "penstock bench --model demo --record demo.safetensors": BRIEF,
    "penstock simulate --cluster pipedec-14x3090 --cluster random-7 --strategies static_tree,pipedec,auto": SHORT,
    "penstock simulate --cluster demo --strategies pipedec,auto --sweep stages=2..64,width=8..128 "
    "--report report": f"{SHORT} --sweep stages=2..4,width=8..16",
    "penstock simulate --cluster plan.toml": SHORT,
    'penstock bench --prompts docs/start/repeats.jsonl --strategies "static_tree[tree_size=8],auto" '
    "--quantization none --temperature 0 --max-tokens 128": BRIEF,
    "penstock bench serve --url http://127.0.0.1:8000 --concurrency 1,4,16 --num-prompts 64 --plot load.png": LOAD,
    "penstock bench serve --request-rate 4 --burstiness 0.5 --goodput ttft:500,tpot:50": LOAD,
    "penstock bench serve --concurrency 1,2,4,8 --num-prompts 64 --plot load.png --json load.json": LOAD,
    "penstock bench serve --url https://host/v1 --request-rate 2 --dataset question.jsonl --endpoint chat": LOAD,
}
"""Commands that would take minutes, and the options with which they take seconds."""
TOKEN: Final = ("10.0.0.1:40123/AbC...", re.compile(r"10\.0\.0\.1:\d+/\S+"))
"""A token as a page shortens it, and as it is printed."""
BEFORE: Final = {
    "Real hosts": (
        "penstock keys new",
        "cp -r .config ../second && cp -r .config ../third",
        "penstock worker --listen b:7700",
        "penstock worker --listen c:7700",
    ),
}
"""Commands that the page has its reader know from elsewhere, by the heading before which they are typed."""
ANEW: Final = {"Without ssh"}
"""Headings that begin with hosts on which nothing has been done."""
SAYS: Final = {
    "penstock bench --model path/to/target": "times as fast as plain, all texts identical",
    "penstock bench --prompts docs/start/repeats.jsonl": "times as fast as plain, all texts identical",
    "penstock plan --hosts localhost,b,c": "--layer-split",
    'penstock generate "What is the capital': "SmolLM2-135M-Instruct",
}
"""The beginning of a command, and words of the page that it prints."""
READY: Final = {
    "serve": re.compile(r"https?://\S+"),
    "worker": re.compile("listening at"),
    "keys": TOKEN[1],
}
"""Commands that go on until they are stopped or somebody comes, and what they print once they are ready."""
SECONDS_ALONE: Final = ("ray-serve.md", "traces.md", "troubleshooting.md")
"""The how-to pages that take seconds to follow, of commands that no start page has."""
LONG_TEXTS: Final = {"max_position_embeddings": 4000}
PATIENCE: Final = 600.0
"""Seconds after which waiting ends in failure, on a host that does much else."""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


# ------------------------------------------------------------------------------------------------------- the options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_a_page_names_is_known(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for step in steps_of(text):
        words = words_for_penstock(step.command) if isinstance(step, Typed) else None
        if words is not None and words != ["--version"]:  # which ends the reading
            parse(words)
    inline = [(code, unknown_in(shlex.split(code)[1:])) for code in INLINE.findall(text)]
    assert [(code, unknown) for code, unknown in inline if unknown] == []


def test_what_is_not_typed_is_still_on_a_page() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    commands = [step.command for text in texts.values() for step in steps_of(text) if isinstance(step, Typed)]
    assert {*NOT_RUN, *INSTEAD, *MORE} - {*commands} == set()
    assert [start for start in SAYS if not any(one.startswith(start) for one in commands)] == []
    flowing = " ".join(" ".join(texts.values()).split())
    assert [words for words in SAYS.values() if words not in flowing] == []
    assert [heading for heading in (*BEFORE, *ANEW) if f"## {heading}\n" not in "".join(texts.values())] == []


# ----------------------------------------------------------------------------------------------------------- the reader


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the pages name and that a reader would have: models, prompts, cluster files, keys."""
    folder = tmp_path_factory.mktemp("had")
    chat = ends_soon(make_checkpoint(folder / "MODEL", seed=2, tokenizer=True, **LONG_TEXTS))
    (chat / "chat_template.jinja").write_text(TEMPLATE)
    made = make_gguf(folder / "made", **LONG_TEXTS)
    write_gguf(folder / "model.gguf", ends_soon(made.parent / "checkpoint"), "llama", GGMLQuantizationType.F32, {}, {})
    noisy_copy(chat, folder / "draft", noise=0.1)
    for place in ("path/to/model", "path/to/target", "path/to/chat-model", "path/of/a/chat/model"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).symlink_to(chat)
    (folder / "path/to/draft").symlink_to(folder / "draft")
    (folder / "path/to/model.gguf").symlink_to(folder / "model.gguf")
    questions = [{"turns": [f"What is {word}?"], "category": "writing"} for word in ("rain", "ice")]
    (folder / "question.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there, how are you?"}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 30)
    for name, preset in (("boards.toml", "jupiter-heterogeneous"), ("my-boards.toml", "demo")):
        shutil.copy(ROOT / "penstock" / "cluster" / "presets" / f"{preset}.toml", folder / name)
    (folder / "key").write_text("secret")
    (folder / "docs").symlink_to(ROOT / "docs")
    return folder


def ends_soon(folder: Path) -> Path:
    """Have most tokens of a random checkpoint be followed by its end token, so that chats need no limit."""
    weights = load_file(folder / "model.safetensors")
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    colon = 3 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(":")  # behind the prompt an answer begins
    for token in range(3, len(embedding)):
        if token % 4 and token != colon:
            embedding[token, 0] += 1000.0
    head[EOS] = 0.0
    head[EOS, 0] = 2.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class Background:
    """A command that goes on beside the page's next ones."""

    command: str
    host: str
    kind: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def ready(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not (ready := READY[self.kind].search(self.said())) and self.process.poll() is None:
            assert time.monotonic() < deadline, f"$ {self.command}\n{self.said()}"
            time.sleep(0.05)
        assert ready, f"$ {self.command}\n{self.said()}"

    def stop(self) -> None:
        """Press Ctrl-C, unless it ends by itself."""
        self.ready()
        if self.kind != "keys":
            os.killpg(self.process.pid, signal.SIGINT)
        code = self.process.wait(PATIENCE)
        assert code in (0, 130), f"$ {self.command}\n{code}\n{self.said()}"


@dataclass
class Reader:
    """A person who follows a page, on hosts that share a network and nothing else."""

    folder: Path
    models: Path
    held: Mapping[str, int]
    environment: dict[str, str]
    warm: ExitStack
    """The processes from which commands are forked, one a host, begun when a host is first used."""
    warm_hosts: set[str] = field(default_factory=set)
    going: list[Background] = field(default_factory=list)

    def begin(self) -> None:
        """Take hosts on which nothing has been done yet."""
        self.stop()
        for host in ADDRESSES:
            home = self.folder / host
            shutil.rmtree(home, ignore_errors=True)
            (home / ".cache" / "penstock").mkdir(parents=True)
            (home / ".cache" / "penstock" / "compiled").symlink_to(cache_folder() / "compiled")
            (home / ".local" / "share" / "penstock").mkdir(parents=True)
            (home / ".local" / "share" / "penstock" / "venv").symlink_to(sys.prefix)
            default = short_names()[DEFAULT].package
            assert default is not None
            (home / ".cache" / "penstock" / package_file(default).name).symlink_to(self.models / "model.gguf")
            for one in self.models.iterdir():
                (home / one.name).symlink_to(one)

    def start(self, command: str, host: str, stdin: int) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a shell's command in a host's home, in a session of its own; its output goes to the file."""
        home = self.folder / host
        if host not in self.warm_hosts:
            self.warm.enter_context(warmed(home, entering(self.held[host]), self.environment))
            self.warm_hosts.add(host)
        log = self.folder / f"{len(list(self.folder.glob('*.log')))}.log"
        # A folder that nsenter has opened would belong to another file system than the same one by its path.
        shell = ["bash", "-c", f"cd '{home}' && set -eo pipefail && {command}"]
        environment = {**self.environment, "HOME": str(home)}
        with log.open("wb") as said:
            process = subprocess.Popen(
                [*entering(self.held[host]), *shell],
                stdin=stdin,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return process, log

    def type(self, step: Typed) -> None:
        command = INSTEAD.get(step.command, f"{step.command} {MORE.get(step.command, '')}".strip())
        if command in NOT_RUN:
            return
        if TOKEN[0] in command:
            self.going[-1].ready()
            command = command.replace(TOKEN[0], TOKEN[1].search(self.going[-1].said())[0])
        if step.host == "others":  # the third host has become a member as the second one has
            shutil.copytree(self.folder / "second" / ".config", self.folder / "third" / ".config", dirs_exist_ok=True)
        hosts = {"": (listens_on(command),), "others": ("second", "third")}.get(step.host, (step.host,))
        for host in hosts:
            if (kind := goes_on(command)) is not None:
                self.go_on(command, host, kind)
            else:
                self.finish(command, host, step)

    def go_on(self, command: str, host: str, kind: str) -> None:
        for one in self.going:
            if "join://" not in one.command:  # which waits for the page's next command
                one.ready()
        for other in [one for one in self.going if place_of(one.command, one.host) == place_of(command, host)]:
            other.stop()
            self.going.remove(other)
        self.going.append(Background(command, host, kind, *self.start(command, host, subprocess.DEVNULL)))

    def finish(self, command: str, host: str, step: Typed) -> None:
        """Run a command to its end; a chat is given a line to answer."""
        for one in self.going:
            one.ready()
        process, log = self.start(command, host, subprocess.PIPE)
        try:
            process.communicate(b"/set max_tokens 16\nWhat is a penstock?\n", timeout=PATIENCE)
        finally:
            kill(process)
        said = log.read_text(encoding="utf-8", errors="replace")
        assert process.returncode == 0, f"$ {command}\n{said}"
        assert [word for word in words_in(step.shown) if word not in said] == [], f"$ {command}\n{said}"
        for start, words in SAYS.items():
            assert words in " ".join(said.split()) or not command.startswith(start), f"$ {command}\n{said}"
        if command.startswith("curl"):
            assert "choices" in json.loads(said[said.index("{") :]), f"$ {command}\n{said}"
        if ">" in command:
            assert (self.folder / host / shlex.split(command)[-1]).read_text().strip(), command

    def stop(self) -> None:
        for one in self.going:
            one.ready()
        while self.going:
            self.going.pop().stop()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command that goes on, and whatever it has started in its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def goes_on(command: str) -> str | None:
    """The kind of a command that does not end by itself."""
    words = words_for_penstock(command) or [""]
    return words[0] if words[0] in ("serve", "worker") or words[:2] == ["keys", "add"] else None


def place_of(command: str, host: str) -> str:
    """The program of a command and the address that it takes, of which there is one at a time."""
    words = words_for_penstock(command) or [""]
    ports = {"serve": "8000", "worker": "7700"}
    given = next((words[at + 1] for at, word in enumerate(words) if word in ("--listen", "--port")), "")
    return f"{words[0]} {host} {given.rpartition(':')[2] or ports.get(words[0])}"


def listens_on(command: str) -> str:
    """The host whose address a worker has; others than workers are on the first one."""
    found = re.search(r"worker --listen ([\w.]+):", command)
    return next((host for host, names in ADDRESSES.items() if found is not None and found[1] in names), "first")


def words_in(shown: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]{2,}", shown))


SSH: Final = """\
#!/bin/sh
shift
export HOME={home}
exec {entering} sh -c 'cd ~ && exec "$@"' sh "$@"
"""
"""Reaches the second host, whoever is asked for."""
HUB: Final = "import sys; from pathlib import Path; from tests.page_hosts import main; main(Path(sys.argv[1]))"


@pytest.fixture(scope="module")
def person(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    if not can_be_made():
        pytest.skip("network namespaces need root, iproute2, util-linux and curl")
    tmp_path = tmp_path_factory.mktemp("hosts")
    (cache_folder() / "compiled").mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    (tmp_path / "served").mkdir()
    authority.issue_cert(*NAMES).private_key_and_cert_chain_pem.write_to_path(tmp_path / "served" / CERTIFICATE)
    (tmp_path / "served" / "model.gguf").symlink_to(models / "model.gguf")
    (tmp_path / "bin").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HF_H"))}
    environment |= {
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SSL_CERT_FILE": str(tmp_path / "authority.pem"),
        "MPLCONFIGDIR": str(models / "made"),
        "NO_PROXY": "*",
        "COLUMNS": "140",
    }
    with network(tmp_path / "names") as held, ExitStack() as warm:
        ssh = tmp_path / "bin" / "ssh"
        ssh.write_text(SSH.format(entering=shlex.join(entering(held["second"])), home=tmp_path / "second"))
        ssh.chmod(0o755)
        hub = [sys.executable, "-c", HUB, str(tmp_path / "served")]
        place = Place(network=f"/proc/{held['first']}/ns/net")
        with Warm(hub, place, stdout=subprocess.PIPE, text=True) as others:
            assert others.stdout is not None
            environment["HF_ENDPOINT"] = others.stdout.readline().strip()
            write_command(tmp_path / "bin" / "penstock")
            try:
                yield Reader(tmp_path, models, held, environment, warm)
            finally:
                others.terminate()


@pytest.fixture
def reader(person: Reader) -> Iterator[Reader]:
    """The person, on hosts on which nothing has been done yet."""
    person.begin()
    yield person
    while person.going:
        kill(person.going.pop().process)


def is_for_later(page: Path) -> bool:
    """Whether a page is followed by `make test-all` alone, as most how-to pages are; their options are always read.

    A user has README.md and the start pages first. Between them begin a server, a chat, a bench, a simulation and a
    program. What install.md has one type is typed as it stands there by test_first_hour.py.
    """
    return page.name == "install.md" or (page.parent.name == "how-to" and page.name not in SECONDS_ALONE)


@pytest.mark.parametrize(
    "page", [pytest.param(one, id=one.name, marks=[pytest.mark.whole] * is_for_later(one)) for one in PAGES]
)
def test_a_page_can_be_followed(page: Path, reader: Reader) -> None:
    text = page.read_text(encoding="utf-8")
    heading = ""
    for step in steps_of(text):
        if isinstance(step, Source):
            write_or_run(step, text, reader)
            continue
        if step.heading != heading:
            heading = step.heading
            if heading in ANEW:
                reader.begin()
            for command in BEFORE.get(heading, ()):
                reader.type(Typed(command))
        reader.type(step)
    reader.stop()


def write_or_run(source: Source, text: str, reader: Reader) -> None:
    """Write a file under the name that the page's next command has, or run a program."""
    home = reader.folder / "first"
    if source.language == "toml":
        behind = text[text.index(source.text) :]
        named = re.search(r"[\w-]+\.toml", behind)
        assert named is not None, "no command names the file"
        (home / named[0]).write_text(source.text)
    else:
        (home / "program.py").write_text(source.text)
        reader.finish('penstock -c "$(cat program.py)"', "first", Typed(""))


# -------------------------------------------------------------------------------------------------------------- reading

EXAMPLE: Final = """\
# A page

    penstock run               # a remark
    MODEL=x penstock bench \\
      --json "a  # b" '{
      "c": 1}'

    one 1.2 s
    ...

## Below

```
first   penstock keys new
others  ssh a@b bin/penstock worker --join c | tee log
```

Words, and `penstock generat --modell x` or `penstock bench serve ... --url`.

```python
print(1)
```
"""


def test_a_page_is_read_in_order() -> None:
    run, bench, keys, worker, program = steps_of(EXAMPLE)
    assert run == Typed("penstock run")
    assert bench == Typed('MODEL=x penstock bench --json "a  # b" \'{\n  "c": 1}\'', shown="one 1.2 s\n...\n")
    assert keys == Typed("penstock keys new", host="first", heading="Below")
    assert worker == Typed("ssh a@b bin/penstock worker --join c | tee log", host="others", heading="Below")
    assert program == Source("python", "print(1)\n")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("penstock run demo > file", ["run", "demo"]),
        ("printf 'a b' | penstock chat --model 'x y' && echo", ["chat", "--model", "x y"]),
        ("ssh a@b bin/penstock worker --listen c:1", ["worker", "--listen", "c:1"]),
        ("A=1 penstock list", ["list"]),
        ("torchrun --nproc-per-node 2 -m penstock.cli train eagle", ["train", "eagle"]),
        ("docker build -t penstock .", None),
    ],
)
def test_what_penstock_is_given(command: str, words: list[str] | None) -> None:
    assert words_for_penstock(command) == words


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("generat x", "No such command"),
        ("run --modell x", "No such option"),
        ("bench serve --cluster x", "No such option"),
    ],
)
def test_what_penstock_does_not_know_is_refused(words: str, error: str) -> None:
    with pytest.raises(Exception, match=error):
        parse(words.split())


@pytest.mark.parametrize(
    ("code", "unknown"),
    [
        ("generat --model x", ["generat"]),
        ("generate ... --modell x", ["--modell"]),
        ("bench serve ... --url", []),
        ("bench ... --url", ["--url"]),
        ("--version", []),
        ("COMMAND --help", ["COMMAND"]),
    ],
)
def test_what_prose_may_name(code: str, unknown: list[str]) -> None:
    assert unknown_in(code.split()) == unknown
