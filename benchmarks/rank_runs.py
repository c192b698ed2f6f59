"""Benchmarks over a group of ranks: how ranks start, and what they spend in the exchange.

A benchmark is one program that every rank runs, under torchrun or started by `start_ranks`; rank 0
alone prints. Read next: docs/parallel.md, `mdi_exec/ranks/exchange.py`.
"""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gpu_timing import elapsed_ms, stamp

from mdi_exec.engine.device_timing import synchronize
from mdi_exec.ranks.collectives import Collectives
from mdi_exec.ranks.exchange import KINDS, ExpertExchange, make_exchange
from mdi_exec.ranks.meeting import RankAddress, join_group, lead_store
from mdi_exec.ranks.parallel import RankGroup

HOST = "127.0.0.1"
WIRE = ("all_gather", "reduce_scatter", "all_to_all", "swap_counts")  # of `Collectives`


def start_ranks(size: int) -> int:
    """Run this very command line once per rank; returns an exit status, 0 when all have succeeded.

    A rank that fails ends the others: they lose their connection to it.
    """
    store = lead_store(HOST, 0)
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={
                **os.environ,
                "WORLD_SIZE": str(size),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": HOST,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
        )
        for rank in range(size)
    ]
    return next((1 for rank in ranks if rank.wait()), 0)


@contextlib.contextmanager
def own_group() -> Iterator[RankGroup]:
    """Join the group that the environment names (alone: a group of one); only rank 0 prints."""
    address = RankAddress.from_environment()
    group = RankGroup() if address is None else join_group(address)
    with contextlib.ExitStack() as stack:
        if group.rank:
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.callback(group.close)
        stack.enter_context(group.ends_with())
        yield group


class Stopwatch:
    """Adds up, per name, the device time of calls that it has wrapped; off until `is_on`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on = False
        self._spans: list[tuple[str, Any, Any]] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, its calls counted under `name`."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            if not self.is_on:
                return function(*arguments, **options)
            begin = stamp(self.device)
            out = function(*arguments, **options)
            self._spans.append((name, begin, stamp(self.device)))
            return out

        return run

    def take_ms(self) -> dict[str, float]:
        """Return the milliseconds by name since the last call; waits for the device."""
        synchronize(self.device)
        spent: dict[str, float] = {}
        for name, begin, end in self._spans:
            spent[name] = spent.get(name, 0.0) + elapsed_ms(begin, end)
        self._spans.clear()
        return spent


def timed_exchanges(group: RankGroup, watch: Stopwatch) -> Mapping[str, ExpertExchange]:
    """Return an exchange of each kind over the group's devices, whose time `watch` counts.

    "collectives" is time from a collective's turn on the device to its end, waiting for other ranks
    included; "exchange" also has packing, sorting and unpacking rows, and holds "experts", the time
    of this rank's own experts. A collective call: all ranks make it.
    """
    tensors = group.tensor_group(watch.device)
    found = {}
    for kind in KINDS:
        assert tensors is not None, "a group of one exchanges nothing"
        wire = tensors if isinstance(tensors, Collectives) else Collectives(tensors)
        for name in WIRE:
            setattr(wire, name, watch.timed("collectives", getattr(wire, name)))
        found[kind] = _timed(make_exchange(kind, wire), watch)
    return found


def _timed(exchange: ExpertExchange, watch: Stopwatch) -> ExpertExchange:
    routed = exchange.routed

    def with_timed_experts(*arguments: Any) -> Any:  # noqa: ANN401
        *rows, run = arguments
        return routed(*rows, watch.timed("experts", run))

    for name, function in (("routed", with_timed_experts), ("look_up", exchange.look_up)):
        setattr(exchange, name, watch.timed("exchange", function))
    return exchange
