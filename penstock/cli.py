"""The command line: ``penstock generate``, ``demo``, ``serve``, ``bench``, ``simulate`` and the rest.

Whatever needs torch is imported inside the commands, so that help, version and errors in the flags come at once.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock
from penstock.config import STRATEGY_OPTIONS, FieldError, parse_speculative
from penstock.core import ConfigError, PenstockError, RequestError, SamplingParams

if TYPE_CHECKING:
    from penstock.clients.api import Server

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""

app = typer.Typer(
    help="Penstock: one language model over several devices, kept full with speculated tokens. Same text, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(bench_app, name="bench")

# ------------------------------------------------------------------------------------------------------------ options

MODEL = "Model"
PIPELINE = "Pipeline"
SPECULATION = "Speculation"
SAMPLING = "Sampling"
DATA = "Data"
TRAINING = "Training"
SERVER = "Server"
LIMITS = "Limits"
SHARING = "How requests share the engine"
LOAD = "Load"
OUTPUT = "Output"

Model = Annotated[
    str, typer.Option(help="Checkpoint folder or hub id; 'demo' is the pair that is shipped.", rich_help_panel=MODEL)
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="Small model that drafts; it needs the target's tokenizer. Without one, --model demo has its own and "
        "other models draft by prompt lookup.",
        rich_help_panel=SPECULATION,
        show_default=False,
    ),
]
SpeculativeJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help='Everything about speculation, for example \'{"method": "ngram", "width": 8}\'.',
        rich_help_panel=SPECULATION,
        show_default=False,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        help="Preset, random-SEED, local-N, or a file ending in .toml: which devices there are, real or emulated.",
        rich_help_panel=PIPELINE,
        show_default=False,
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(
        "--pipeline-parallel-size",
        "-pp",
        help="Number of stages.",
        rich_help_panel=PIPELINE,
        show_default="as the cluster or the split says, else 1",
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        help="Rate of every link between the emulated cluster's hosts, in 1e9 bits/s of payload.",
        rich_help_panel=PIPELINE,
        show_default="the cluster's",
    ),
]
DrafterOn = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE,...",
        help="Where the emulated drafter runs: engine, last-stage, or a device's name; several are compared.",
        rich_help_panel=PIPELINE,
        show_default="the cluster's",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
FiguresFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write settings and figures.", rich_help_panel=OUTPUT, show_default=False
    ),
]
ReportFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write report.md with tables and plots, and all figures as JSON.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
RecordedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Refuse recordings of another target model or tokenizer than this checkpoint's.",
        rich_help_panel=MODEL,
        show_default="any",
    ),
]
RecordedDraft = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="Refuse recordings of another draft model or tokenizer than this checkpoint's.",
        rich_help_panel=MODEL,
        show_default="any",
    ),
]
ServerUrl = Annotated[
    str | None,
    typer.Option(help="Any OpenAI-compatible server.", rich_help_panel=SERVER, show_default="http://127.0.0.1:8000/v1"),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="PENSTOCK_API_KEY", help="The key it wants, if any.", rich_help_panel=SERVER, show_default=False
    ),
]
ServedModel = Annotated[
    str | None,
    typer.Option(
        "--model", help="One of the models it serves.", rich_help_panel=SERVER, show_default="the first it names"
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.", rich_help_panel=MODEL)]
Device = Annotated[
    str, typer.Option(help="cpu, cuda:N, or cuda: stages and drafter spread over all GPUs.", rich_help_panel=MODEL)
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of prompt and output together.",
        rich_help_panel=MODEL,
        show_default="the checkpoint's, at most 4096",
    ),
]
LayerSplit = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...", help="Layers of each stage.", rich_help_panel=PIPELINE, show_default="an even split"
    ),
]
StrategyName = Annotated[
    str | None,
    typer.Option(
        help=f"Which drafted tokens enter the pipeline: {', '.join(STRATEGY_OPTIONS)} (none).",
        rich_help_panel=SPECULATION,
        show_default="auto",
    ),
]


def sampling_option(text: str, default: str) -> Any:
    return typer.Option(help=text, rich_help_panel=SAMPLING, show_default=default)


# ----------------------------------------------------------------------------------------------------------- commands


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


CHECKPOINTS = "the checkpoint's"


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; '-' reads it from standard input.", show_default=False)
    ] = None,
    model: Model = "demo",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    max_model_len: MaxModelLen = None,
    pipeline_parallel_size: Stages = None,
    layer_split: LayerSplit = None,
    cluster: ClusterName = None,
    strategy: StrategyName = None,
    draft_model: DraftModel = None,
    speculative_config: SpeculativeJson = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=SAMPLING)] = 128,
    temperature: Annotated[float | None, sampling_option("0 is greedy.", CHECKPOINTS)] = None,
    top_p: Annotated[
        float | None, sampling_option("Keep the most probable tokens up to this mass.", CHECKPOINTS)
    ] = None,
    top_k: Annotated[int | None, sampling_option("Keep this many most probable tokens.", CHECKPOINTS)] = None,
    min_p: Annotated[
        float | None, sampling_option("Keep tokens of at least this share of the best one's chance.", CHECKPOINTS)
    ] = None,
    seed: Annotated[
        int | None, sampling_option("Same seed, same text, whatever the strategy and the stages.", "a fresh one")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this text. May be repeated.", rich_help_panel=SAMPLING, show_default=False),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.", rich_help_panel=SAMPLING)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead.", rich_help_panel=OUTPUT)
    ] = False,
    trace: Annotated[
        typer.FileTextWrite | None,
        typer.Option(
            metavar="FILE",
            help="Write a trace for penstock trace and ui.perfetto.dev: every batch on every stage.",
            rich_help_panel=OUTPUT,
            show_default=False,
            lazy=False,
        ),
    ] = None,
) -> None:
    """Continue PROMPT, printing the text as it is committed."""
    with reported():
        text = read_prompt(prompt)
        given = only_given(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop)
        given |= {"max_tokens": max_tokens, "ignore_eos": ignore_eos}
        SamplingParams(**given)  # refuses a bad value now rather than after the stages have started
        table = speculation(model, draft_model, speculative_config, strategy)
        options = only_given(
            model=model,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            pipeline_parallel_size=pipeline_parallel_size,
            layer_split=layer_split,
            cluster=cluster,
            speculative_config=parse_speculative(table),
        )
        from penstock.generate import complete

        complete(text, options, given, as_json, trace)


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder or hub id; 'demo' is the pair that is shipped.")
    ] = "demo",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is all of this machine's.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", rich_help_panel=SERVER)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PENSTOCK_API_KEY",
            help="Clients have to send it as 'Authorization: Bearer KEY'. May be repeated: any of them will do.",
            rich_help_panel=SERVER,
            show_default=False,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What clients call the model. May be repeated.", rich_help_panel=SERVER, show_default="as MODEL is"
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Jinja template in place of the checkpoint's own.",
            rich_help_panel=SERVER,
            show_default=False,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Other sites whose web pages may call this server (CORS); '*' is any. May be repeated.",
            rich_help_panel=SERVER,
            show_default="none",
        ),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(
            metavar="/PATH",
            help="What a proxy in front takes off every path.",
            rich_help_panel=SERVER,
            show_default="none",
        ),
    ] = "",
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Certificate in PEM: serve HTTPS.", rich_help_panel=SERVER, show_default=False
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The certificate's key.", rich_help_panel=SERVER, show_default="in the same file"
        ),
    ] = None,
    no_web: Annotated[bool, typer.Option("--no-web", help="No web page at /.", rich_help_panel=SERVER)] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", rich_help_panel=SERVER)] = "info",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Have prompts and answers in the log too.", rich_help_panel=SERVER)
    ] = False,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most requests that run at a time; others wait.", rich_help_panel=LIMITS)
    ] = 16,
    max_queue: Annotated[
        int, typer.Option(help="Most requests that wait; further ones are refused.", rich_help_panel=LIMITS)
    ] = 256,
    queue_timeout: Annotated[float, typer.Option(help="Most seconds to wait.", rich_help_panel=LIMITS)] = 60.0,
    request_timeout: Annotated[
        float, typer.Option(help="Most seconds until a request's last token.", rich_help_panel=LIMITS)
    ] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that requests may still take after SIGTERM.", rich_help_panel=LIMITS)
    ] = 30.0,
    max_body_size: Annotated[int, typer.Option(help="Most bytes of a request's body.", rich_help_panel=LIMITS)] = 2**20,
    body_timeout: Annotated[
        float, typer.Option(help="Most seconds for a body to arrive.", rich_help_panel=LIMITS)
    ] = 30.0,
    header_timeout: Annotated[
        float, typer.Option(help="Most seconds for a request's head to arrive.", rich_help_panel=LIMITS)
    ] = 10.0,
    max_connections: Annotated[int, typer.Option(help="Most connections at a time.", rich_help_panel=LIMITS)] = 512,
    kv_slots: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of all running requests and the prefix cache together; each takes memory on every stage.",
            rich_help_panel=SHARING,
            show_default="two requests of the most tokens, at least 4096",
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            help="Keep what requests with the same beginning can share.", rich_help_panel=SHARING, show_default="on"
        ),
    ] = True,
    prefill_chunk: Annotated[
        int, typer.Option(help="Most tokens of prompts in one batch.", rich_help_panel=SHARING)
    ] = 128,
    prefill_stretch: Annotated[
        float,
        typer.Option(
            help="Most times as long as without prompts that a step may take while other requests decode.",
            rich_help_panel=SHARING,
        ),
    ] = 2.0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    max_model_len: MaxModelLen = None,
    pipeline_parallel_size: Stages = None,
    layer_split: LayerSplit = None,
    cluster: ClusterName = None,
    strategy: StrategyName = None,
    draft_model: DraftModel = None,
    speculative_config: SpeculativeJson = None,
    seed: Annotated[
        int | None, sampling_option("Of requests that give none: the same request, the same text.", "a fresh one each")
    ] = None,
) -> None:
    """Serve MODEL over HTTP as the OpenAI API has it, with a web page."""
    with reported():
        options = only_given(
            model=model,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_slots=kv_slots,
            enable_prefix_caching=enable_prefix_caching,
            prefill_chunk=prefill_chunk,
            prefill_stretch=prefill_stretch,
            pipeline_parallel_size=pipeline_parallel_size,
            layer_split=layer_split,
            cluster=cluster,
            speculative_config=parse_speculative(speculation(model, draft_model, speculative_config, strategy)),
        )
        from penstock.server.command import run_serve
        from penstock.server.http.listen import Listening
        from penstock.server.settings import ServerSettings

        settings = ServerSettings(
            served_model_name=tuple(served_model_name or [model]),
            api_keys=tuple(api_key or ()),
            request_timeout=request_timeout,
            queue_timeout=queue_timeout,
            drain_timeout=drain_timeout,
            body_timeout=body_timeout,
            max_body_size=max_body_size,
            allowed_origins=tuple(allowed_origins or ()),
            web=not no_web,
            log_prompts=log_prompts,
            seed=seed,
        )
        listening = Listening(
            host=host,
            port=port,
            max_connections=max_connections,
            header_timeout=header_timeout,
            root_path=root_path,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
        )
        run_serve(options, max_queue, settings, listening, chat_template, log_level)


@app.command()
def demo(
    as_json: AsJson = False,
) -> None:
    """Watch the plain pipeline and Penstock write the same text on four emulated edge boards."""
    with reported():
        from penstock.demo.show import run_demo

        run_demo(as_json)


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    strategies: Annotated[
        str,
        typer.Option(
            metavar="A,B[option=value,...],...",
            help=f"{', '.join(STRATEGY_OPTIONS)}; each with options of its own in brackets, "
            "for example pipedec[width=16],pipedec[width=64].",
            rich_help_panel=SPECULATION,
        ),
    ] = "autoregressive,pipedec",
    model: Model = "demo",
    dtype: Dtype = "float32",
    cluster: ClusterName = None,
    pipeline_parallel_size: Stages = None,
    time_scale: Annotated[
        float | None,
        typer.Option(
            help="Stretch all modelled times, where this host is too slow for them.",
            rich_help_panel=PIPELINE,
            show_default="the cluster's",
        ),
    ] = None,
    bandwidth_gbit_s: Bandwidth = None,
    drafter_on: DrafterOn = None,
    draft_model: DraftModel = None,
    speculative_config: SpeculativeJson = None,
    speculative_slots: Annotated[
        int | None,
        typer.Option(
            help="Most drafted tokens at a time; each costs KV memory on every stage and in the drafter.",
            rich_help_panel=SPECULATION,
            show_default="what the widest strategy can use",
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="One JSON object a line, with 'prompt' or 'turns'. May be repeated: a prompt set each.",
            rich_help_panel=SAMPLING,
            show_default="the package's own",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="How many of each file to use.", rich_help_panel=SAMPLING)] = 4,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", rich_help_panel=SAMPLING)] = 64,
    temperature: Annotated[str, typer.Option(metavar="T,T,...", help="0 is greedy.", rich_help_panel=SAMPLING)] = "0",
    top_p: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=SAMPLING)] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0,
    seed: Annotated[
        int, typer.Option(help="The first prompt's; the next one has the next.", rich_help_panel=SAMPLING)
    ] = 0,
    seeds: Annotated[
        int, typer.Option(help="How often to run each prompt, each time with another seed.", rich_help_panel=SAMPLING)
    ] = 1,
    json_file: FiguresFile = None,
    report: ReportFolder = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.safetensors",
            help="Record target's and draft model's distributions on the texts; see penstock acceptance.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare strategies: the same prompts through the same stages, interleaved. 'bench serve' measures a server."""
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    with reported():
        from penstock.bench.entries import split_entries
        from penstock.bench.grid import parse_temperatures
        from penstock.bench.measure.command import BenchOptions, run_bench

        names = split_entries(strategies)
        table = {} if set(names) == {"autoregressive"} else drafting(model, draft_model, speculative_config)
        options = only_given(
            strategies=names,
            model=model,
            dtype=dtype,
            cluster=cluster,
            pipeline_parallel_size=pipeline_parallel_size,
            time_scale=time_scale,
            bandwidth_gbit_s=bandwidth_gbit_s,
            drafter_on=split_entries(drafter_on or ""),
            speculative_config=table,
            speculative_slots=speculative_slots,
            prompts=tuple(prompts) if prompts else None,
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            temperature=parse_temperatures(temperature),
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            seeds=seeds,
            json=json_file,
            report=report,
            record=record,
        )
        run_bench(BenchOptions(**options))


@bench_app.command("serve")
def bench_serve(
    url: ServerUrl = None,
    api_key: ApiKey = None,
    model: ServedModel = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.", rich_help_panel=SERVER)] = "completions",
    request_rate: Annotated[
        float, typer.Option(help="Requests that arrive per second; inf: all at once.", rich_help_panel=LOAD)
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(help="1 is a Poisson process; below, requests come in bursts.", rich_help_panel=LOAD),
    ] = 1.0,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="K,K,...",
            help="Most requests at a time; several are measured one after the other.",
            rich_help_panel=LOAD,
            show_default="no limit",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests for each concurrency.", rich_help_panel=LOAD)] = 100,
    num_warmups: Annotated[int, typer.Option(help="Requests before them that do not count.", rich_help_panel=LOAD)] = 1,
    dataset: Annotated[
        str,
        typer.Option(
            metavar="random|FILE.jsonl",
            help="Random words, or one JSON object a line with 'prompt' or 'turns'.",
            rich_help_panel=SAMPLING,
        ),
    ] = "random",
    input_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a random prompt, on average and as the server counts.",
            rich_help_panel=SAMPLING,
            show_default="128",
        ),
    ] = None,
    output_len: Annotated[int, typer.Option(help="Most tokens per request.", rich_help_panel=SAMPLING)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = 0.0,
    seed: Annotated[
        int,
        typer.Option(help="The first request's, the next one has the next; arrivals too.", rich_help_panel=SAMPLING),
    ] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Have output-len tokens of every request.", rich_help_panel=SAMPLING),
    ] = False,
    goodput: Annotated[
        str | None,
        typer.Option(
            metavar="ttft:MS,tpot:MS,e2el:MS",
            help="Count the requests per second that keep these limits.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    json_file: FiguresFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Draw throughput and latencies over concurrency.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Put load on an OpenAI-compatible server, and measure what its users would feel."""
    with reported():
        from penstock.bench.serving.command import run_bench_serve
        from penstock.bench.serving.options import RANDOM, ServingOptions, parse_concurrency, parse_goodput

        options = ServingOptions(
            server=server_at(url, api_key),
            model=model,
            endpoint=endpoint,
            request_rate=request_rate,
            burstiness=burstiness,
            concurrency=parse_concurrency(concurrency),
            num_prompts=num_prompts,
            num_warmups=num_warmups,
            dataset=None if dataset == RANDOM else Path(dataset),
            input_len=input_len,
            output_len=output_len,
            seed=seed,
            temperature=temperature,
            ignore_eos=ignore_eos,
            goodput=parse_goodput(goodput),
            json=json_file,
            plot=plot,
        )
        run_bench_serve(options)


@app.command()
def chat(
    url: ServerUrl = None,
    api_key: ApiKey = None,
    model: ServedModel = None,
    system_prompt: Annotated[str, typer.Option(help="What the model is told first.", show_default="none")] = "",
) -> None:
    """Talk to a model behind an OpenAI-compatible server; a pipe's lines are answered one after the other."""
    with reported():
        from penstock.clients.chat import ChatOptions, run_chat

        run_chat(ChatOptions(server=server_at(url, api_key), model=model, system=system_prompt))


@app.command()
def simulate(
    cluster: Annotated[
        list[str],
        typer.Option(
            help="Preset, random-SEED[:STAGES], or a file ending in .toml. May be repeated.",
            rich_help_panel=PIPELINE,
            show_default=False,
        ),
    ],
    strategies: Annotated[
        str,
        typer.Option(
            metavar="A,B[option=value,...],...",
            help=f"{', '.join(STRATEGY_OPTIONS)}; each with options of its own in brackets.",
            rich_help_panel=SPECULATION,
        ),
    ] = "static_tree,pipedec,auto",
    accuracy: Annotated[
        str | None,
        typer.Option(
            metavar="P,P,...",
            help="Chance that the target's token is among the drafter's first 1, 2, ... candidates.",
            rich_help_panel=SPECULATION,
            show_default="the demo pair's at T = 1",
        ),
    ] = None,
    recording: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.safetensors",
            help="Take tokens and drafts from what penstock bench --record wrote. May be repeated.",
            rich_help_panel=SPECULATION,
            show_default=False,
        ),
    ] = None,
    model: RecordedModel = None,
    draft_model: RecordedDraft = None,
    tokens: Annotated[int, typer.Option(help="Tokens per strategy, of all requests.", rich_help_panel=SAMPLING)] = 2000,
    tokens_per_request: Annotated[
        int, typer.Option(help="Most tokens of one request.", rich_help_panel=SAMPLING)
    ] = 100,
    seed: Annotated[int, typer.Option(help="Decides which drafts are right.", rich_help_panel=SAMPLING)] = 0,
    bandwidth_gbit_s: Bandwidth = None,
    overhead_per_hop_ms: Annotated[
        float,
        typer.Option(
            help="What every message takes beyond its link's time: 'penstock bench' measures it.",
            rich_help_panel=PIPELINE,
        ),
    ] = 0.0,
    drafter_on: DrafterOn = None,
    sweep: Annotated[
        str,
        typer.Option(
            metavar="AXIS=FIRST..LAST,...",
            help="Go through values that double, for example stages=2..64,width=8..128.",
            rich_help_panel=PIPELINE,
            show_default=False,
        ),
    ] = "",
    json_file: FiguresFile = None,
    report: ReportFolder = None,
) -> None:
    """Compare strategies on modelled devices in virtual time: no model needed, thousands of tokens in seconds."""
    with reported():
        from penstock.bench.entries import split_entries
        from penstock.bench.simulate.command import SimulateOptions, parse_accuracy, run_simulate
        from penstock.bench.simulate.sweep import parse_sweep

        options = SimulateOptions(
            clusters=tuple(cluster),
            strategies=split_entries(strategies),
            accuracy=None if accuracy is None else parse_accuracy(accuracy),
            recordings=tuple(recording or ()),
            model=model,
            draft_model=draft_model,
            tokens=tokens,
            tokens_per_request=tokens_per_request,
            seed=seed,
            bandwidth_gbit_s=bandwidth_gbit_s,
            overhead_per_hop_ms=overhead_per_hop_ms,
            drafter_on=split_entries(drafter_on or ""),
            sweep=parse_sweep(sweep),
            json=json_file,
            report=report,
        )
        gc.freeze()  # what is imported stays: the collector need not walk it while thousands of nodes come and go
        run_simulate(options)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="What 'penstock bench --json' or --report wrote.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="The same of another bench.")],
) -> None:
    """Two benches: which settings differ, and how much faster the second one is on the same requests."""
    with reported():
        from penstock.bench.compare import compare as show

        show(first, second)


@app.command()
def acceptance(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="What penstock bench --record wrote.")],
    model: RecordedModel = None,
    draft_model: RecordedDraft = None,
    as_json: AsJson = False,
) -> None:
    """How often Penstock's rule and the papers' accept one of k candidates, from recorded distributions."""
    with reported():
        from penstock.bench.recordings.rules import run_acceptance

        run_acceptance(files, as_json, model=model, draft_model=draft_model)


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What penstock generate --trace FILE wrote.")],
    as_json: AsJson = False,
) -> None:
    """Say why a run was slow: how busy each stage was, and what it waited for."""
    with reported():
        from penstock.trace.show import show_trace

        show_trace(file, as_json)


@app.command()
def train(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="What to train: eagle, eagle3, medusa, spd, early-exit or draft.")
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            metavar="PATH",
            help="File, or folder of files: .jsonl with 'messages', 'conversations' or 'text'; others are plain text. "
            "May be repeated.",
            rich_help_panel=DATA,
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Where the drafter goes. A run that was broken off there goes on.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ],
    model: Model = "demo",
    dtype: Annotated[
        str,
        typer.Option(help="float32, or bfloat16 for target, hidden states and autocast.", rich_help_panel=MODEL),
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=MODEL)] = "cpu",
    max_length: Annotated[int, typer.Option(help="Most tokens of one sequence.", rich_help_panel=DATA)] = 2048,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Let the target write the answers anew.", rich_help_panel=DATA)
    ] = False,
    epochs: Annotated[int, typer.Option(help="Times through the data.", rich_help_panel=TRAINING)] = 1,
    max_steps: Annotated[
        int | None,
        typer.Option(help="End after so many steps.", rich_help_panel=TRAINING, show_default="as the epochs say"),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="The highest; it rises, then falls to zero. Small targets need more than the default.",
            rich_help_panel=TRAINING,
            show_default="the kind's authors'",
        ),
    ] = None,
    batch_tokens: Annotated[int, typer.Option(help="Most tokens of one step.", rich_help_panel=TRAINING)] = 8192,
    accumulate: Annotated[
        int, typer.Option(help="Parts of a step, computed one after the other.", rich_help_panel=TRAINING)
    ] = 1,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            help="eagle3, medusa, spd, early-exit: how many tokens, the most frequent ones, can be drafted.",
            rich_help_panel=TRAINING,
            show_default="32000, or all of fewer; medusa: all",
        ),
    ] = None,
    ttt_steps: Annotated[
        int | None,
        typer.Option(help="eagle3: steps of its training-time test.", rich_help_panel=TRAINING, show_default="7"),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="medusa: how many heads.", rich_help_panel=TRAINING, show_default="5")
    ] = None,
    spec_layers: Annotated[
        int | None, typer.Option(help="spd, early-exit: its layers.", rich_help_panel=TRAINING, show_default="1")
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help="spd: anchors, for any number of stages, or paper, for one.",
            rich_help_panel=TRAINING,
            show_default="anchors",
        ),
    ] = None,
    anchors: Annotated[
        str | None,
        typer.Option(
            metavar="0,STATE,...",
            help="spd: the target's hidden states that it reads.",
            rich_help_panel=TRAINING,
            show_default="0,1,2,4,... up to half, and the last",
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="spd: numbers of pipeline stages to train for; variant paper takes one.",
            rich_help_panel=TRAINING,
            show_default="4,8,16 as far as there are layers",
        ),
    ] = None,
    post_state: Annotated[
        bool,
        typer.Option(
            "--post-state", help="spd of the paper: asked once a token has passed a stage.", rich_help_panel=TRAINING
        ),
    ] = False,
    exit_layer: Annotated[
        int | None,
        typer.Option(
            help="early-exit: the hidden state that it reads.",
            rich_help_panel=TRAINING,
            show_default="a quarter of the layers",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="draft: the model's layers.", rich_help_panel=TRAINING, show_default="2")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same weights.", rich_help_panel=TRAINING)] = 0,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Estimate the speed-up on this emulated cluster: preset, random-SEED or a file.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    save_every: Annotated[
        int, typer.Option(help="Steps between states and held-out figures.", rich_help_panel=OUTPUT)
    ] = 100,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew where there is an earlier run.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Train a drafter on a target's own hidden states, in the format that other engines load."""
    with reported():
        from penstock.trainer.options import TrainOptions, whole_numbers

        options = TrainOptions(
            kind=kind,
            model=model,
            data=tuple(data),
            output=output,
            epochs=epochs,
            max_steps=max_steps,
            learning_rate=learning_rate,
            batch_tokens=batch_tokens,
            accumulate=accumulate,
            max_length=max_length,
            draft_vocab_size=draft_vocab_size,
            ttt_steps=ttt_steps,
            heads=heads,
            spec_layers=spec_layers,
            variant=variant,
            anchors=whole_numbers("anchors", anchors),
            stages=whole_numbers("stages", stages),
            post_state=post_state,
            exit_layer=exit_layer,
            layers=layers,
            cluster=cluster,
            device=device,
            dtype=dtype,
            seed=seed,
            save_every=save_every,
            restart=restart,
            regenerate=regenerate,
        )
        from penstock.trainer.command import run_train

        run_train(options)


def main() -> None:
    """The entry point ``penstock``."""
    app()


# ------------------------------------------------------------------------------------------- from flags to options


@contextmanager
def reported() -> Iterator[None]:
    """Turn Penstock's errors into one line on stderr, and them and Ctrl-C into exit codes."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except PenstockError as error:
        typer.echo(f"penstock: error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError | RequestError) else 1) from None


def refuse_options(context: typer.Context) -> None:
    """Options before a subcommand are not the subcommand's. Raises UsageError naming the first one."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            flag = next(option.opts[0] for option in context.command.params if option.name == name)
            command = context.invoked_subcommand
            raise typer.BadParameter(f"{flag} stands before {command}, which has options of its own; put them after it")


def server_at(url: str | None, api_key: str | None) -> Server:
    """The server that the flags name. Raises FieldError."""
    from penstock.clients.api import Server

    return Server(**only_given(url=url, api_key=api_key))


def only_given(**values: Any) -> dict[str, Any]:
    """Without what was left to its default."""
    return {name: value for name, value in values.items() if value is not None}


def read_prompt(argument: str | None) -> str:
    """The prompt as it stands: from the argument, or all of standard input. Raises UsageError if there is neither."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter("give the text to continue, or '-' to type it (end with Ctrl-D)", param_hint="PROMPT")
    return sys.stdin.read()


def speculation(
    model: str, draft_model: str | None, speculative_config: str | None, strategy: str | None
) -> dict[str, Any]:
    """The table behind ``speculative_config``, from all flags that have a say in it. Raises FieldError."""
    if strategy == "autoregressive" and draft_model is None and speculative_config is None:
        return {"strategy": strategy}
    table = drafting(model, draft_model, speculative_config)
    if strategy is not None:
        if "strategy" in table:
            raise FieldError("strategy", "is set both by --strategy and in --speculative-config; remove one")
        table["strategy"] = strategy
    return table


def drafting(model: str, draft_model: str | None, speculative_config: str | None) -> dict[str, Any]:
    """Who drafts: whom the flags name, else the demo model's own draft model, else prompt lookup."""
    table = read_table(speculative_config)
    if draft_model is not None:
        if "model" in table:
            raise FieldError("model", "is set both by --draft-model and in --speculative-config; remove one")
        table["model"] = draft_model
    if "method" not in table and "model" not in table and model == "demo" and not plain(table):
        table["model"] = "demo"
    if "model" in table:
        table.setdefault("method", "draft_model")
    return table


def plain(table: dict[str, Any]) -> bool:
    return bool(table.get("strategy") == "autoregressive")


def read_table(text: str | None) -> dict[str, Any]:
    try:
        table = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise FieldError("speculative_config", f"is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise FieldError("speculative_config", f"is {text}; it has to be a JSON object")
    return table


if __name__ == "__main__":
    main()
