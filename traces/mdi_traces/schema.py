"""The tables of a trace: column names, types, units and meanings, and the metadata beside them.

One schema serves both worlds: a recorded run and a simulated one differ in `source` and `clock`
only. This module holds no rows and reads no files.

Read next: `io.py` (files), `run.py` (the tables of one run), docs/trace-format.md (for users).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from mdi_shared.errors import TraceError
from mdi_shared.json_input import parse_json

SCHEMA_VERSION = 4
METADATA_KEY = b"mdi"
CONTENT_KEY = b"mdi_content"  # of a run's files: what all of them must agree on

STEPS, ITEMS, REQUESTS = "steps", "items", "requests"
SOURCES = ("runtime", "simulator", "import", "generator")
CLOCKS = ("virtual", "monotonic", "none")

_TEXT, _LABEL = pa.string(), pa.dictionary(pa.int32(), pa.string())
_I8, _I16, _I32, _I64 = pa.int8(), pa.int16(), pa.int32(), pa.int64()
_F32, _F64, _BOOL = pa.float32(), pa.float64(), pa.bool_()

# name, type, nullable, unit, meaning; order is the order in the file (docs/trace-format.md)
_Row = tuple[str, pa.DataType, bool, str, str]


def _same(names: str, dtype: pa.DataType, unit: str, **meanings: str) -> list[_Row]:
    assert names.split() == list(meanings), f"{names} need one meaning each"
    return [(name, dtype, False, unit, meaning) for name, meaning in meanings.items()]


_STEP_ROWS: list[_Row] = [
    ("run_id", _LABEL, False, "", "names the run"),
    ("step", _I64, False, "index", "engine step number of the rank, without gaps"),
    *_same("rank dp ep cp", _I16, "index", rank="global rank", dp="data-parallel rank",
           ep="expert-parallel rank", cp="context-parallel rank"),
    ("kind", _LABEL, False, "", "prefill, decode, mixed, idle_prefill, idle_decode, idle_mixed or "
     "flush"),
    ("source", _LABEL, False, "", "runtime or simulator"),
    *_same("t_sched t_launch t_dev_start t_dev_end t_done", _I64, "ns",
           t_sched="planning began, since run start", t_launch="handed to the device",
           t_dev_start="device began", t_dev_end="device ended",
           t_done="outputs became visible"),
    *_same("gpu_ms fwd_ms sample_ms cpu_sched_ms cpu_proc_ms wait_ms", _F32, "ms",
           gpu_ms="device time of the step", fwd_ms="of it the forward pass",
           sample_ms="of it sampling", cpu_sched_ms="host: planning and input preparation",
           cpu_proc_ms="host: processing the result", wait_ms="waited at barriers"),
    *_same("n_seqs n_tokens n_tokens_padded n_consumer_rows", _I32, "rows",
           n_seqs="sequences in the step", n_tokens="query rows, sum of q",
           n_tokens_padded="rows the device ran",
           n_consumer_rows="rows the layers behind the replay boundary ran"),
    *_same("sum_qk idx_pairs_r2 idx_pairs_r1 core_pairs swa_pairs", _I64, "pairs",
           sum_qk="sum of q*k, the rectangle",
           idx_pairs_r2="index scores over ratio-2 entries, summed over layers",
           idx_pairs_r1="index scores over ratio-1 entries, summed over layers",
           core_pairs="query-entry pairs of core attention, summed over layers",
           swa_pairs="pairs inside the sliding windows, summed over layers"),
    ("sum_k", _I64, False, "tokens", "sum of context lengths"),
    ("max_k", _I32, False, "tokens", "longest context"),
    ("min_k", _I32, False, "tokens", "shortest context"),
    ("n_cached", _I64, False, "tokens", "prompt tokens of this batch cached before it"),
    *_same("n_chunked n_finished n_ignored n_preempted n_dropped", _I32, "sequences",
           n_chunked="prompts this step leaves unfinished",
           n_finished="sequences whose memory came back", n_ignored="rejected while planning",
           n_preempted="victims while planning", n_dropped="rows thrown away late"),
    *_same("n_draft_rows n_accepted", _I32, "rows", n_draft_rows="draft tokens verified",
           n_accepted="draft tokens accepted"),
    ("graph_size", _I32, False, "rows", "captured graph that ran; 0 = none"),
    ("free_blocks", _I32, False, "blocks", "KV blocks free after planning"),
    ("free_slots", _I32, False, "slots", "state slots free after planning"),
    ("n_waiting", _I32, False, "sequences", "queued, after processing"),
    ("n_running", _I32, False, "sequences", "decoding, after processing"),
    ("decode_step", _I32, False, "steps", "decode steps since a prefill, before the decision"),
    ("vote", _LABEL, False, "", "ballot of the ranks: none, all or any"),
    ("want", _BOOL, False, "", "this rank wanted a prefill, before the decision"),
    ("pred_ms", _F32, False, "ms", "predicted device time; NaN = no cost model"),
    ("target_ms", _F32, False, "ms", "step time the chunk policy aimed at; NaN = none"),
    ("flops_attn", _F64, False, "FLOP", "FP8-equivalent, attention and indexing"),
    ("flops_total", _F64, False, "FLOP", "FP8-equivalent, the whole step"),
    ("moe_imbalance", _F32, False, "ratio", "rows of the busiest expert, or rank of experts, "
     "over the mean, averaged over layers; NaN = not measured"),
    # Since version 2; null in simulated runs and older files.
    ("ingress_ms", _F32, True, "ms", "newest arrival to the look for arrivals before this step; "
     "null = none came"),
    ("cpu_prep_ms", _F32, True, "ms", "host: laying out the step's inputs, before t_launch"),
    ("cpu_launch_ms", _F32, True, "ms", "host: giving the work to the device, after t_launch"),
    ("gap_ms", _F32, True, "ms", "the device was idle before this step; null = the first"),
    # Since version 4; null in older files, and what prefix reuse copies without that.
    ("n_prompt_rows", _I32, True, "rows", "of n_tokens those of prompts; the others decode"),
    ("n_restored", _I32, True, "tails", "copied to slots before the step, for prefix hits"),
    ("n_saved", _I32, True, "tails", "copied from slots before the step, to be found later"),
]  # fmt: skip

_ITEM_ROWS: list[_Row] = [
    ("run_id", _LABEL, False, "", "names the run"),
    ("step", _I64, False, "index", "engine step number of the rank"),
    ("rank", _I16, False, "index", "global rank"),
    ("req_id", _LABEL, False, "", "request of this row"),
    ("q", _I32, False, "rows", "query rows in this step"),
    ("k", _I32, False, "tokens", "context length, these q included"),
    ("cached", _I32, False, "tokens", "context before this step, k - q"),
    ("is_last_chunk", _BOOL, False, "", "the step samples a token; True for decode rows"),
    ("emitted", _I16, False, "tokens", "tokens it gave, after processing; 0 when dropped"),
    ("accepted", _I16, False, "tokens", "draft tokens accepted"),
    ("dropped", _BOOL, False, "", "ran, but the sequence had ended or been preempted"),
]

_REQUEST_ROWS: list[_Row] = [
    ("req_id", _TEXT, False, "", "unique in the trace"),
    ("session_id", _TEXT, True, "", "conversation"),
    ("turn", _I32, True, "index", "0-based place inside the session"),
    ("think_ns", _I64, True, "ns",
     "closed loop: arrives this long after the previous turn of its session ended"),
    ("arrival_ns", _I64, False, "ns",
     "sent by the user, from trace start; with think_ns the recorded time only"),
    ("prompt_len", _I32, False, "tokens", "prompt"),
    ("max_tokens", _I32, False, "tokens", "most output tokens allowed"),
    ("output_len", _I32, False, "tokens", "input: how many to give; output: how many came"),
    ("cached_len", _I32, False, "tokens", "leading prompt tokens already cached"),
    ("hash_ids", pa.list_(_I64), True, "", "prefix blocks in order; equal ids, equal block"),
    ("priority", _I8, True, "", "larger is more urgent"),
    # Since version 3, with `priority` for scheduling policies.
    ("client", _TEXT, True, "", "who pays for it: shares are fair between clients"),
    ("deadline_ns", _I64, True, "ns", "first token due, after arrival"),
    ("predicted_len", _I32, True, "tokens", "what a predictor says of output_len; a run under a "
     "policy adds it"),
    ("temperature", _F32, True, "", "null = default"),
    ("top_p", _F32, True, "", "null = default"),
    ("top_k", _I32, True, "", "null = default"),
    ("seed", pa.uint64(), True, "", "of the sampler; null = default"),
    ("accept_profile", _TEXT, True, "", "draft-acceptance model, simulator only"),
    ("rank", _I16, True, "index", "data-parallel rank assigned"),
    ("t_submit", _I64, True, "ns", "the scheduler got it"),
    # Since version 4; null without prefix reuse and in older files.
    ("hit_tokens", _I32, True, "tokens", "of its prompt taken from the prefix cache, when first "
     "planned"),
    ("known_tokens", _I32, True, "tokens", "those whose blocks were there; beyond hit_tokens no "
     "tail was at hand"),
    ("t_first_sched", _I64, True, "ns", "first planned"),
    ("t_first_token", _I64, True, "ns", "first token visible"),
    ("t_last_token", _I64, True, "ns", "last token visible"),
    ("t_finish", _I64, True, "ns", "finished, rejected or aborted"),
    ("n_chunks", _I32, True, "steps", "prefill steps it took"),
    ("n_preempt", _I32, True, "times", "preempted"),
    ("n_recomputed_tokens", _I32, True, "tokens",
     "prefilled beyond prompt_len - cached_len - hit_tokens, after preemptions"),
    ("finish_reason", _LABEL, True, "", "stop, length, abort, prompt_length_exceeded or "
     "insufficient_system_resource; null = unfinished"),
    ("unfinished_reason", _LABEL, True, "", "why the run ended without finishing it; \"had not "
     "arrived\" = the run ended before"),
    ("ttft_ms", _F32, True, "ms", "arrival to first token"),
    ("tpot_ms", _F32, True, "ms", "per output token after the first"),
    ("e2e_ms", _F32, True, "ms", "arrival to finish"),
    ("queue_ms", _F32, True, "ms", "arrival to first planned"),
]  # fmt: skip


def _schema(rows: list[_Row]) -> pa.Schema:
    return pa.schema(
        pa.field(name, dtype, nullable, metadata={"unit": unit, "meaning": meaning})
        for name, dtype, nullable, unit, meaning in rows
    )


STEP_SCHEMA = _schema(_STEP_ROWS)
ITEM_SCHEMA = _schema(_ITEM_ROWS)
REQUEST_SCHEMA = _schema(_REQUEST_ROWS)
SCHEMAS: Mapping[str, pa.Schema] = MappingProxyType(
    {STEPS: STEP_SCHEMA, ITEMS: ITEM_SCHEMA, REQUESTS: REQUEST_SCHEMA}
)

# Columns that older files lack, by the version that brought them: read as null.
ADDED_COLUMNS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        STEPS: {
            **dict.fromkeys(("ingress_ms", "cpu_prep_ms", "cpu_launch_ms", "gap_ms"), 2),
            **dict.fromkeys(("n_prompt_rows", "n_restored", "n_saved"), 4),
        },
        REQUESTS: {
            **dict.fromkeys(("client", "deadline_ns", "predicted_len"), 3),
            **dict.fromkeys(("hit_tokens", "known_tokens"), 4),
        },
    }
)

# What a run adds to a request; null in an input. `rank` is not among them: a replay may fix it.
OUTPUT_COLUMNS = tuple(REQUEST_SCHEMA.names[REQUEST_SCHEMA.names.index("t_submit") :])


def describe_columns(table: str) -> list[tuple[str, str, str, str]]:
    """Return (name, type, unit, meaning) of each column of `table`, in order."""
    return [
        (
            column.name,
            type_name(column.type) + (", null" if column.nullable else ""),
            column.metadata[b"unit"].decode(),
            column.metadata[b"meaning"].decode(),
        )
        for column in SCHEMAS[table]
    ]


def columns_markdown(table: str) -> str:
    """Return the columns of `table` as a Markdown table, as docs/trace-format.md shows them."""
    lines = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {unit} | {meaning} |"
              for name, kind, unit, meaning in describe_columns(table)]  # fmt: skip
    return "\n".join(lines) + "\n"


def type_name(dtype: pa.DataType) -> str:
    """Return a type's name for people: `string (dict)`, `list<int64>`, `int32`."""
    if pa.types.is_dictionary(dtype):
        return "string (dict)"
    return f"list<{dtype.value_type}>" if pa.types.is_list(dtype) else str(dtype)


_METADATA_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType({
    "generator": (str,), "config": (dict,), "notes": (list,),
    **dict.fromkeys(("model", "hardware", "licence"), (str, type(None))),
    **dict.fromkeys(("seed", "hash_block_size"), (int, type(None))),
})  # fmt: skip


@lru_cache(maxsize=1)
def this_generator() -> str:
    """Return this package's name and version, as written into every file."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"mini-deepinfer {version('mini-deepinfer')}"
    except PackageNotFoundError:
        return "mini-deepinfer (not installed)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Where a table comes from; one JSON document under the file's key `mdi`.

    `source` is one of SOURCES, `clock` one of CLOCKS. `hash_block_size` is tokens per `hash_ids`
    entry. `notes` are sentences for people, such as what an importer left out.
    """

    table: str
    source: str
    clock: str = "none"
    generator: str = field(default_factory=this_generator)
    model: str | None = None
    hardware: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    licence: str | None = None
    hash_block_size: int | None = None
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        assert self.table in SCHEMAS, f"table {self.table!r} is none of {', '.join(SCHEMAS)}"
        assert self.source in SOURCES, f"source {self.source!r} is none of {', '.join(SOURCES)}"
        assert self.clock in CLOCKS, f"clock {self.clock!r} is none of {', '.join(CLOCKS)}"

    def to_json(self) -> str:
        """Return one line of JSON with sorted keys: equal metadata, equal bytes."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes, file: str) -> "Metadata":
        """Parse what `to_json` wrote; `file` is for the message of the `TraceError` it raises."""
        try:
            document = parse_json(text)
        except ValueError as error:
            raise TraceError(file, f"its metadata is not JSON ({error})") from error
        return cls.from_document(document, file)

    @classmethod
    def from_document(cls, document: object, file: str) -> "Metadata":
        """Build from the parsed JSON document; raises `TraceError` naming the offending key."""
        if not isinstance(document, dict) or type(document.get("schema_version")) is not int:
            raise TraceError(
                file, "its metadata has no schema_version: not a trace of this project"
            )
        found = document["schema_version"]
        if found > SCHEMA_VERSION:
            raise TraceError(file, f"schema version {found} is newer than {SCHEMA_VERSION}, the "
                             "newest this version reads: upgrade mini-deepinfer")  # fmt: skip
        known = {f.name for f in fields(cls)}
        missing, extra = sorted(known - set(document)), sorted(set(document) - known)
        if missing or extra or found < 1:
            problem = f"lacks {missing[0]!r}" if missing else f"has unknown keys {extra}"
            raise TraceError(file, f"its metadata {problem}, schema version {found}")
        for key, allowed in (("table", tuple(SCHEMAS)), ("source", SOURCES), ("clock", CLOCKS)):
            if document[key] not in allowed:
                raise TraceError(file, f"its metadata has {key} = {document[key]!r:.60}; allowed: "
                                 f"{', '.join(allowed)}")  # fmt: skip
        _require_types(document, file)
        return cls(**{**document, "notes": tuple(document["notes"])})


def _require_types(document: Mapping[str, Any], file: str) -> None:
    """Raise `TraceError` for a value that its key cannot have."""
    for key, kinds in _METADATA_TYPES.items():
        if type(document[key]) not in kinds:
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise TraceError(file, f"its metadata has {key} = {document[key]!r:.60}; must be of "
                             f"type {wanted}")  # fmt: skip
    if not all(isinstance(note, str) for note in document["notes"]):
        raise TraceError(file, "its metadata has notes that are not text")
    block = document["hash_block_size"]
    if block is not None and block < 1:
        raise TraceError(file, f"its metadata has hash_block_size = {block}; must be at least 1")
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise TraceError(file, "its metadata holds half a character") from error
