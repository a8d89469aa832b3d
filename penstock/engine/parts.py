"""The parts of an engine's pipeline: where stages are, and how they move when hosts are lost or come back."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from penstock.core import ConfigError, PipelineError, PipelineLost
from penstock.drafters.base import Drafter, Weights
from penstock.drafters.merged import NgramOptions
from penstock.engine.build import (
    PlainAnswers,
    apart,
    drafter_parts,
    make_drafter,
    share_device,
    stage_plans,
    weights_plan,
)
from penstock.engine.opening import (
    LoadedFiles,
    drafter_is_held,
    layers_by_host,
    present,
    providing,
    providing_drafter,
)
from penstock.engine.profile.measure import drafter_bytes, needed_by_rank
from penstock.engine.resolve import Resolved, placement_fields, resolve_options, with_drafter_placed
from penstock.files import EXACT
from penstock.hosts.facts import HostFacts
from penstock.hosts.fleet import Fleet, FleetExecutor
from penstock.hosts.placement import HERE, grouped, has_room, in_plans, moved
from penstock.pipeline.base import Executor, StagePlan, StartedPipeline

# --------------------------------------------------------------------------------------------------------------- moving
# Decides where stages go when their hosts are lost, and when hosts are back.

log = logging.getLogger(__name__)


Living = Mapping[str, HostFacts]
"""Facts of the hosts by name, at one moment. A whole move is decided on one such snapshot."""


def resolving(asked: Resolved, executor: Executor) -> Generator[float, None, Resolved]:
    """Place the stages on the hosts that are there now. Yields times at which to go on, until these hold their layers.

    Each stage stays on its host as long as that is there, since it keeps its weights. The others go to spares, or to
    hosts that have stages already. Where they have no room, all layers are split anew, into no more stages than before.
    A host that is still being sent its layers gets no stage, unless there is no other way. Raises PipelineError while
    there is no way at all.
    """
    if not isinstance(executor, FleetExecutor):
        return asked
    living = executor.fleet.living
    names = names_there(asked, executor.fleet, living)
    if asked.options.hosts is None:  # a cluster file's stages have their places
        if missing := [name for name in asked.all_hosts if name not in names]:
            raise PipelineError(f"host {missing[0]} is not there")
        makers: list[Callable[[], Resolved]] = [partial(replace, asked)]
    else:
        makers = placements(asked, names, executor.fleet.searching, living)
    problem = "none of the hosts is there"
    for make in makers:
        try:
            setup = make()
            yield from providing(setup, executor, living)
        except ConfigError as error:
            log.warning("stages have no place: %s", error)
            problem = str(error)
        else:
            return setup
    raise PipelineError(problem)


def placements(
    asked: Resolved, names: Sequence[str], searching: Collection[str], living: Living
) -> list[Callable[[], Resolved]]:
    """Ways to place the stages, the best one first; each raises ConfigError if it does not work."""
    ready = [name for name in names if name not in searching]
    # On hosts that hold their layers before those that are still sent them, and with today's split before another one:
    # a new split has every stage load.
    return [
        partial(make, asked, some, living)
        for some in (ready, names if ready != names else [])
        if some
        for make in (same_split, split_anew)
    ]


def names_there(asked: Resolved, fleet: Fleet, living: Living) -> list[str]:
    """The hosts that stages may be on now, as plans name them."""
    if asked.options.hosts is None:
        return ["", *living]
    there = dict.fromkeys(map(in_plans, present(asked.options, fleet)))
    return [name for name in there if not name or name in living]


def lost_a_host(running: Resolved, executor: Executor) -> bool:
    """Whether a host that stages are on is not there any more."""
    return isinstance(executor, FleetExecutor) and any(
        name and name not in executor.fleet.living for name in running.all_hosts
    )


def better_place(asked: Resolved, running: Resolved, executor: Executor) -> bool:
    """Whether stages share a host, and another host, which holds the layers, could take some of them.

    A host that lacks the layers is asked to fetch them while the engine runs.
    """
    if not isinstance(executor, FleetExecutor) or running is asked:
        return False
    living = executor.fleet.living
    names = names_there(asked, executor.fleet, living)
    if len(set(running.all_hosts)) >= min(len(set(asked.all_hosts)), len(names)):
        return False
    try:
        layers = layers_by_host(same_split(asked, names, living))
        offer = executor.offer(asked.checkpoint.source, asked.checkpoint.num_layers)
        executor.fleet.ask(offer, layers)
    except (ConfigError, PipelineError, OSError) as error:
        log.info("stages stay where they are: %s", error)
        return False
    return executor.fleet.hold(offer, layers)


def same_split(asked: Resolved, names: Sequence[str], living: Living) -> Resolved:
    """The same stages on the hosts ``names``, rank by rank. Raises ConfigError if a stage fits nowhere."""
    needed, options = needed_by_rank(asked), asked.options

    def takes(name: str, ranks: Sequence[int]) -> bool:
        wanted = [needed[rank] for rank in sorted(ranks)]
        wanted += [drafter_bytes(asked)] * (name == asked.drafter_host)
        return not name or (name in living and has_room(name, living[name], options.device, wanted))

    groups = grouped(moved(asked.all_hosts, names, takes), map(len, asked.groups))
    return replace(asked, **placement_fields(options, groups, living, drafts=asked.drafts))


def split_anew(asked: Resolved, names: Sequence[str], living: Living) -> Resolved:
    """The layers split evenly over ``names``, no more stages on a host than were asked for.

    Raises ConfigError if the engine cannot run on these hosts (``resolve_options``).
    """
    each = -(-len(asked.all_hosts) // len(set(asked.all_hosts)))
    stages = max(1, each * len(names) // asked.options.tensor_parallel_size)
    options = replace(
        asked.options,
        hosts=",".join(name or HERE for name in names),
        pipeline_parallel_size=min(asked.stages, stages),
        layer_split=None,
        max_model_len=asked.max_model_len,
        kv_slots=asked.kv_slots,
        speculative_slots=asked.speculative_slots,
    )
    return resolve_options(options, living)


# ---------------------------------------------------------------------------------------------------------------- parts
# The processes of one engine, stages and a drafter's weights: started with it, and again when one is lost.

START_ATTEMPTS: Final = 3
"""Number of attempts to start an engine while hosts are lost during the start. Each further one follows the loss of
another host, and takes as long as a start."""
MOST_DRAFTER_LOSSES: Final = 3
"""Number of losses within ``WITHIN_S`` after which a drafter is not started again. One or two may be chance, as with
stages (``recovery.MOST_LOSSES``)."""
WITHIN_S: Final = 60.0
"""Seconds within which ``MOST_DRAFTER_LOSSES`` losses count together. A drafter that fails at its first question fails
several times within them; losses further apart may be chance."""
DRAFTER_AGAIN_S: Final = 15.0
"""Seconds until the next attempt to start a drafter whose host is back, where the last attempt failed. Attempts to
replace stages are no further apart (``recovery.LONGEST_DELAY``)."""


class EngineParts:
    """Starts an engine's pipeline and drafter (``engine.recovery.Parts``); both are there once ``start`` has ended."""

    def __init__(self, setup: Resolved, executor: Executor) -> None:
        self.drafter: Drafter | None = None
        self._asked = setup
        """The setup that was asked for."""
        self._setup = setup
        """The setup that runs, perhaps on fewer hosts than were asked for."""
        self._executor = executor
        self._pipeline: StartedPipeline | None = None
        self._weights: StartedPipeline | None = None
        """The stage that holds the drafter's weights; None where there is none."""
        self._lacks_drafter = setup.speculation is not None and setup.speculation.drafts
        """Whether the drafter that was asked for has yet to be started."""
        self._away_until = math.inf
        """Time of the next look for the drafter's host, which was not there; infinite while none is needed."""
        self._drafter_losses: deque[float] = deque(maxlen=MOST_DRAFTER_LOSSES)
        self.exact: bool | None = None
        """Whether the numerics of the first pipeline were exact, and so those of later ones are; None before it."""
        self._answers = PlainAnswers()
        self._files = LoadedFiles(setup)

    @property
    def pipeline(self) -> StartedPipeline:
        assert self._pipeline is not None, "it has not been started"
        return self._pipeline

    @property
    def apart(self) -> frozenset[int]:
        return apart(self._setup.hosts)

    def start_all(self) -> None:
        """Start everything and wait for it. Raises PipelineError if a stage or the drafter cannot start.

        If a host is lost meanwhile, another attempt follows on the hosts that are left.
        """
        for left in reversed(range(START_ATTEMPTS)):
            try:
                self._start_and_wait()
                return
            except PipelineLost as lost:
                if not left or not lost_a_host(self._setup, self._executor):
                    raise
                log.warning("%s; starting once more", lost)
                self._wait_for(self._find_places())

    def _start_and_wait(self) -> None:
        # The drafter first: plans of stages say where to send the states that it reads.
        for start in (self._start_drafter, self._start_stages):
            self._wait_for(start())

    def _wait_for(self, steps: Generator[float | None]) -> None:
        with closing(steps):  # Ctrl-C ends the wait: what was begun has to end while the host is still open
            for due in steps:
                self._executor.wait(due)

    def _find_places(self) -> Generator[float | None]:
        self._setup = yield from resolving(self._asked, self._executor)

    def start(self) -> Generator[float | None]:
        """Start what is missing: see ``engine.recovery.Parts``."""
        if self._pipeline is None:
            self._files.check()  # before anything is loaded: other weights would go on with other tokens
            yield from self._find_places()
        try:
            if self._pipeline is not None:
                self._files.check()  # stages that live have their weights: only the drafter has to be done without
            yield from self._start_drafter()
        except PipelineError as error:
            self._go_on_without_drafter(str(error))
        except Exception as error:
            log.exception("the drafter could not be started")
            self._go_on_without_drafter(f"{type(error).__name__}: {error}")
        # After the drafter, since plans of stages say where to send the states that it reads.
        yield from self._start_stages()
        # Last: what nobody has used again by now holds memory in vain.
        self._executor.end_unused()

    def drop_lost(self) -> bool:
        """End what is lost and what cannot go on without it. Returns whether that includes stages of the target.

        A learned drafter reads the stages' hidden states, so neither it nor they can go on without the other. Processes
        that still live keep their weights, and are used again.
        """
        lost_weights = self._weights is not None and self._weights.lost
        lost_stages = self._pipeline is None or self._pipeline.lost or (lost_weights and self._drafter_reads)
        if lost_stages:
            self.drop_stages()
        if lost_weights:
            self._release_weights()
            self._count_drafter_loss()
        return lost_stages

    def drop_stages(self) -> None:
        """End the stages that are lost, and have the others wait to be used again."""
        if self._drafter_reads:
            self._release_weights()
        if self._pipeline is not None:
            self._pipeline.release()
            self._pipeline = None

    def drop_all(self) -> None:
        """End stages and drafter, so that they hold no memory until they are started again."""
        self._release_weights()
        self.drop_stages()
        self._executor.end_unused()

    @property
    def out_of_place(self) -> bool:
        """Whether stages that had hosts of their own share one, though another one is there by now."""
        if self._pipeline is None:
            return False
        return (self._drafter_is_back and self._needs_taps) or better_place(self._asked, self._setup, self._executor)

    @property
    def drafter_is_back(self) -> bool:
        """Whether a drafter whose host was away could be started there now, and the stages need not be for that."""
        return self._pipeline is not None and self._drafter_is_back and not self._needs_taps

    @property
    def _drafter_is_back(self) -> bool:
        if self._executor.now() < self._away_until or not isinstance(self._executor, FleetExecutor):
            return False
        if not self._executor.fleet.hosts[self._setup.drafter_host].alive:
            return False
        try:
            return drafter_is_held(self._setup, self._executor)
        except (ConfigError, PipelineError, OSError) as error:
            log.info("the drafter's host cannot be used: %s", error)
            return False

    @property
    def _needs_taps(self) -> bool:
        """Whether the drafter is a learned one, so that stages are told where to send it their states."""
        return self._setup.speculator is not None

    @property
    def may_return(self) -> bool:
        """Whether hosts that are lost may come back, so that it is worth waiting for them."""
        return any(self._asked.all_hosts)

    @property
    def _drafter_reads(self) -> bool:
        """Whether the drafter reads the stages' hidden states."""
        return self._setup.speculator is not None and self._weights is not None

    def _release_weights(self) -> None:
        if self._weights is not None:
            self._weights.release()
            self._weights = None
            self.drafter, self._lacks_drafter = self._stand_in(), True

    def close(self) -> None:
        """Stop every process and wait for it. Safe to call twice."""
        for part in (self._pipeline, self._weights):
            if part is not None:
                part.close()

    def _start_drafter(self) -> Generator[float | None]:
        config = self._setup.speculation
        if config is None or not (self._lacks_drafter or self._drafter_is_back):
            return
        if config.drafter_options.weights is not Weights.NONE:
            yield from self._provide_drafter()
            self._weights = yield from self._begun(*weights_plan(self._setup))
        self.drafter = make_drafter(self._setup, config, self._executor, self._weights, self._answers)
        if self._away_until < math.inf:
            log.warning("the drafter's host %s is back: it drafts again", self._setup.drafter_host)
        self._lacks_drafter, self._away_until = False, math.inf
        if self._pipeline is not None:
            share_device(self._setup, self.drafter, self._pipeline)

    def _provide_drafter(self) -> Generator[float]:
        """Have the drafter's host hold its weights. Raises PipelineError if it is another one and cannot."""
        if not self._setup.drafter_host or not isinstance(self._executor, FleetExecutor):
            return
        living = self._executor.fleet.living
        if self._setup.drafter_host not in living:
            raise PipelineError(f"its host {self._setup.drafter_host} is not there")
        try:
            self._setup = with_drafter_placed(self._setup, living)
            yield from providing_drafter(self._setup, self._executor)
        except ConfigError as error:
            raise PipelineError(str(error)) from error

    def _start_stages(self) -> Generator[float | None]:
        if self._pipeline is not None:
            return
        plans = stage_plans(self._setup, self.drafter)
        if self.exact:
            # A host whose processor cannot add up the same sums would go on with other tokens, and unsaid.
            plans = [msgspec.structs.replace(plan, numerics=EXACT) for plan in plans]
        self._pipeline = yield from self._begun(plans, "stage")
        if self.exact is None:
            self.exact = self._pipeline.exact
        share_device(self._setup, self.drafter, self._pipeline)

    def _begun(self, plans: Sequence[StagePlan], name: str) -> Generator[float | None, None, StartedPipeline]:
        """A pipeline of these stages, once all are connected. Yields times at which to go on until then."""
        pipeline = self._executor.begin(plans, name)
        try:
            while not pipeline.joined():
                yield pipeline.due
        except BaseException:
            pipeline.release()
            raise
        return pipeline

    def _count_drafter_loss(self) -> None:
        now, losses = self._executor.now(), self._drafter_losses
        losses.append(now)
        if len(losses) == MOST_DRAFTER_LOSSES and losses[0] >= now - WITHIN_S:
            self._do_without_drafter(f"it was lost {MOST_DRAFTER_LOSSES} times within {WITHIN_S:.0f} s")

    def _go_on_without_drafter(self, problem: str) -> None:
        """Do without a drafter that cannot be started; look for its host again if it has one of its own."""
        self._do_without_drafter(problem)
        if self._setup.drafter_host:
            # The first look for the host is due at once, each further one after a pause.
            self._away_until = self._executor.now() + DRAFTER_AGAIN_S * (self._away_until < math.inf)

    def _do_without_drafter(self, problem: str) -> None:
        log.warning("prompt lookup drafts from now on in the drafter's place: %s", problem)
        self.drafter, self._lacks_drafter = self._stand_in(), False

    def _stand_in(self) -> Drafter:
        assert self._setup.speculation is not None
        return NgramOptions().start(drafter_parts(self._setup, self._setup.speculation, self._answers))
