"""The pages of docs/background/results, with the sections of each in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page. ``name`` is its file's stem, ``about`` its description on the first page, ``sections`` are section
    names."""

    name: str
    title: str
    about: str
    sections: tuple[str, ...]


PAGES = (
    Page(
        name="engine",
        title="the engine itself",
        about="exactness, overhead, decisions, links, the simulator beside the emulator",
        sections=(
            *(
                "exactness",
                "overhead",
                "decisions",
                "lookup",
                "links",
                "simulator",
                "demo",
                "two_processes",
                "centralised",
            ),
        ),
    ),
    Page(
        name="real-models",
        title="real models",
        about="nothing emulated: formats of weights, where a step goes, other engines, trained drafters, shared hosts",
        sections=(
            "quantized",
            "step",
            "real_ids",
            "beside_peers",
            "two_stages",
            "learning",
            "drafter_acceptance",
            "trained",
            "shared_host",
        ),
    ),
    Page(
        name="models",
        title="models of many kinds",
        about="families beside transformers, layers that carry a state, latents, windows, an MTP head",
        sections=("families", "recurrent", "latent", "out_of_reach", "mtp"),
    ),
    Page(
        name="strategies",
        title="strategies and drafters",
        about="`auto` beside all others, what its parts are worth, what a wrong drafter costs, what drafters take",
        sections=(
            "auto_against",
            "parts",
            "always_wrong",
            "several_sources",
            "restart",
            "same_texts",
            "acceptance",
            "drafter_time",
        ),
    ),
    Page(
        name="pipedec",
        title="beside PipeDec's paper",
        about="trees, stages, sampling, throughput; simulated and in processes",
        sections=(
            *("long_text", "pipedec_tree", "pipedec_stages", "pipedec_demo_pair", "pipedec_throughput"),
            *("pipedec_departures", "pipedec_transfers", "tensor_groups", "pipedec_emulated", "pipedec_processes"),
        ),
    ),
    Page(
        name="flowspec",
        title="beside FlowSpec's paper",
        about="its tables, with the demo pair and with EAGLE",
        sections=("flowspec", "flowspec_eagle"),
    ),
    Page(
        name="spd",
        title="beside SPD's paper",
        about="its tables, its steps in processes, corrections in flight",
        sections=(
            "spd_tables",
            "spd_chats",
            "spd_recipes",
            "spd_hybrid",
            "spd_rejection",
            "spd_overhead",
            "hop_floor",
            "spd_correction",
            "correction",
            "halfway",
        ),
    ),
    Page(
        name="jupiter",
        title="beside Jupiter's paper",
        about="its tables and baselines, its plans and ours, prompts and answers in pieces, what they are worth",
        sections=("jupiter", "plans", "planned_hosts", "outlines", "quality"),
    ),
    Page(
        name="vllm",
        title="beside pipelines and EAGLE in vLLM",
        about="the report's tables; tensor parallel stages, predicted",
        sections=(
            "pp_eagle_table",
            "pp_many",
            "pp_parallel",
        ),
    ),
    Page(
        name="serving",
        title="many requests at once",
        about="throughput and latency by concurrency, simulated and over HTTP; long prompts amid others",
        sections=("serving", "serve_http", "interference"),
    ),
    Page(
        name="faults",
        title="faults and attacks",
        about="ten thousand requests of all kinds, processes killed, hosts lost or without weights, hostile input",
        sections=("soak", "chaos", "networks", "returns", "members", "sent_weights", "emulated_hosts", "attack"),
    ),
)
