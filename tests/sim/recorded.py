"""Step tables for calibration tests: simulated with a known model and noise, or made by hand."""

import numpy as np
import pyarrow as pa

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.linear import DecodeTerms, LinearCost, PrefillTerms
from mdi_shared.cost.shape import V41_FLASH
from mdi_shared.cost.step_cost import HostCost
from mdi_sim.simulate import simulate
from mdi_traces.requests import build_requests
from mdi_traces.schema import STEP_SCHEMA, Metadata

HOST = HostCost(schedule_ns=200_000, schedule_ns_per_seq=3_000, launch_ns=400_000,
                process_ns=80_000, process_ns_per_seq=1_500)  # fmt: skip
TRUTH = LinearCost(
    prefill=PrefillTerms(const=2e6, rows=4_000.0, consumer_rows=0.0, idx_pairs_r2=0.05,
                         idx_pairs_r1=0.0, core_pairs=0.0, swa_pairs=0.0, cached_rows=50.0,
                         n_seqs=3e5),
    decode=DecodeTerms(const=4e6, rows=3e4, sum_k=2.0, n_seqs=0.0),
    host=HOST,
)  # fmt: skip
CONFIG = SchedulerConfig(max_num_batched_tokens=4_096, max_num_seqs=32, max_model_len=80_000,
                         num_blocks=8_192)  # fmt: skip


class Noisy:
    """`cost` whose device times are off by a random factor, sometimes by a large one."""

    def __init__(self, cost, *, sigma=0.02, outliers=0.0, seed=0, hardware="testgpu"):
        self.cost, self.host = cost, cost.host
        self.sigma, self.outliers = sigma, outliers
        self.dice = np.random.default_rng(seed)
        self.hardware = hardware

    def device_ns(self, work):
        factor = np.exp(self.sigma * self.dice.standard_normal())
        if self.dice.random() < self.outliers:
            factor *= 10
        return int(self.cost.device_ns(work) * factor)

    def describe(self):
        return {"kind": "noisy", "hardware": self.hardware}


def requests(count=120, *, shortest=20, longest=40_000, seed=0, outputs=40, burst=8):
    """Requests that come in bursts of one to `burst`, of very different lengths."""
    dice = np.random.default_rng(seed)
    bursts = np.repeat(np.arange(count), dice.integers(1, burst + 1, count))[:count]
    prompts = np.exp(dice.uniform(np.log(shortest), np.log(longest), count))
    int32 = pa.int32()
    return build_requests(
        {
            "arrival_ns": pa.array(bursts * 200_000_000, type=pa.int64()),
            "prompt_len": pa.array(prompts.astype(int), type=int32),
            "output_len": pa.array(dice.integers(1, outputs, count), type=int32),
        },
        Metadata(table="requests", source="generator"),
    )


def noisy_run(cost=TRUTH, *, trace=None, config=CONFIG, shape=V41_FLASH, **noise):
    """Simulate a workload of all kinds of steps with a noisy cost."""
    trace = requests() if trace is None else trace
    return simulate(trace, scheduler=config, cost=Noisy(cost, **noise), shape=shape)


def with_columns(table, **columns):
    """Return a step table with some columns replaced by arrays, NaN standing for null."""
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        field = table.schema.field(name)
        column = pa.array(np.asarray(values), type=field.type, from_pandas=field.nullable)
        table = table.set_column(place, field, column)
    return table


def step_table(kinds, **columns):
    """Return a step table of these kinds; columns not given are zero, or null where they can be."""
    rows = len(kinds)
    arrays = []
    for field in STEP_SCHEMA:
        if field.name == "kind":
            column = pa.array(kinds).dictionary_encode()
        elif field.name in columns:
            column = pa.array(columns[field.name]).cast(field.type)
        elif field.nullable:
            column = pa.nulls(rows, field.type)
        elif pa.types.is_dictionary(field.type):
            column = pa.array([""] * rows).dictionary_encode()
        elif pa.types.is_boolean(field.type):
            column = pa.array([False] * rows)
        else:
            column = pa.array(np.zeros(rows), type=pa.float64()).cast(field.type)
        arrays.append(column)
    return pa.Table.from_arrays(arrays, schema=STEP_SCHEMA)
