"""Sampling without filters: three passes over the logits, nothing of vocabulary size written.

The first finds each row's best logit, the second adds up fixed-point masses and finds the best
score (logit plus Gumbel noise), the third picks the token and its logprob. A row is cut into chunks
of a fixed size, so its result is its own; masses are integers and maxima have a tie rule, so the
order of threads does not show. Random bits equal `ops/gumbel.py`'s on every device. Scores leave
out the row's normaliser, which is the same for each token: a draw can differ from the reference's
only where two scores agree to `SCORE_TOLERANCE`. Read next: `sampler.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops import gumbel
from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import WARP
from mdi_exec.ops.sampler import FILTERED_LOGPROB, NO_GOLDEN, Bans, Sampled, SamplingRows, mass_bits

THREADS = 256
WARPS = THREADS // WARP
PER_THREAD = 4
CHUNK = THREADS * PER_THREAD
FINAL_THREADS = 32
NOBODY = 2**31 - 1  # a token id that loses every tie


@T.macro
def _load(logits, is_banned, bans_eos, row, first, vocab: int, eos_id: int, x):
    """Read a thread's logits of a chunk; a banned token's, and none's, become minus infinity."""
    thread = T.get_thread_binding()
    for i in T.unroll(PER_THREAD):
        token = first + i * THREADS + thread
        x[i] = -T.infinity("float32")
        if token < vocab:
            is_allowed = is_banned[token] == 0 and (token != eos_id or bans_eos[row] == 0)
            x[i] = T.if_then_else(is_allowed, logits[row, token], -T.infinity("float32"))


@T.macro
def _best_of_warp(value, token, dtype: str):
    """Leave the warp's highest value[0] and its lowest token[0] in every lane."""
    other, other_token = T.alloc_var(dtype), T.alloc_var("int32")
    for step in T.unroll(5):
        other = T.shfl_xor(value[0], 1 << step)
        other_token = T.shfl_xor(token[0], 1 << step)
        if other > value[0] or (other == value[0] and other_token < token[0]):
            value[0] = other
            token[0] = other_token


@T.macro
def _best_of_block(value, token, values, tokens, dtype: str):
    """Leave the block's highest value[0] and its lowest token[0] in thread 0."""
    thread = T.get_thread_binding()
    _best_of_warp(value, token, dtype)
    if thread % WARP == 0:
        values[thread // WARP] = value[0]
        tokens[thread // WARP] = token[0]
    T.sync_threads()
    for w in T.unroll(WARPS):
        if values[w] > value[0] or (values[w] == value[0] and tokens[w] < token[0]):
            value[0] = values[w]
            token[0] = tokens[w]


@T.macro
def _mix(z):
    """Take one SplitMix64 step of uint64 z[0]; unsigned, since it is meant to wrap."""
    z[0] = z[0] + T.reinterpret(T.int64(gumbel.GOLDEN_RATIO), "uint64")
    z[0] = z[0] ^ (z[0] >> T.uint64(30))
    z[0] = z[0] * T.reinterpret(T.int64(gumbel.FACTOR_1), "uint64")
    z[0] = z[0] ^ (z[0] >> T.uint64(27))
    z[0] = z[0] * T.reinterpret(T.int64(gumbel.FACTOR_2), "uint64")
    z[0] = z[0] ^ (z[0] >> T.uint64(31))


@T.macro
def _best_score(seed, position, first, tempered, value, token):
    """Set value[0] and token[0] to a thread's best sum of a tempered logit and Gumbel noise."""
    thread = T.get_thread_binding()
    bits, key = T.alloc_local((1,), "uint64"), T.alloc_local((1,), "uint64")
    noise = T.alloc_var("float64")
    key[0] = T.reinterpret(position, "uint64") * T.uint64(gumbel.NUM_CASES)
    key[0] = key[0] + T.uint64(gumbel.FRESH)
    key[0] = key[0] * T.reinterpret(T.int64(gumbel.GOLDEN_RATIO), "uint64")
    key[0] = key[0] ^ T.reinterpret(seed, "uint64")
    _mix(key)
    for i in T.unroll(PER_THREAD):
        bits[0] = key[0] + T.cast(first + i * THREADS + thread, "uint64")
        _mix(bits)
        noise = (T.cast(bits[0] >> T.uint64(11), "float64") + 0.5) * 2.0**-53
        noise = tempered[i] - T.log(-T.log(noise))
        if noise > value[0]:
            value[0] = noise
            token[0] = first + i * THREADS + thread


def best_logit_program(vocab: int, eos_id: int):
    """Find the highest logit of each chunk, and the lowest token that has it."""
    rows, num_chunks = T.dynamic("rows"), -(-vocab // CHUNK)

    @T.prim_func
    def main(
        logits: T.Tensor((rows, vocab), "float32"),
        is_banned: T.Tensor((vocab,), "uint8"),
        bans_eos: T.Tensor((rows,), "uint8"),
        best: T.Tensor((rows, num_chunks), "float32"),
        best_token: T.Tensor((rows, num_chunks), "int32"),
    ):
        with T.Kernel(rows, num_chunks, threads=THREADS) as (row, chunk):
            thread = T.get_thread_binding()
            x = T.alloc_local((PER_THREAD,), "float32")
            value, token = T.alloc_local((1,), "float32"), T.alloc_local((1,), "int32")
            values = T.alloc_shared((WARPS,), "float32")
            tokens = T.alloc_shared((WARPS,), "int32")
            _load(logits, is_banned, bans_eos, row, chunk * CHUNK, vocab, eos_id, x)
            value[0] = -T.infinity("float32")
            token[0] = NOBODY
            for i in T.unroll(PER_THREAD):
                if x[i] > value[0]:
                    value[0] = x[i]
                    token[0] = chunk * CHUNK + i * THREADS + thread
            _best_of_block(value, token, values, tokens, "float32")
            if thread == 0:
                best[row, chunk] = value[0]
                best_token[row, chunk] = token[0]

    return main


def scores_program(vocab: int, eos_id: int):
    """Add up each chunk's masses; where a row has noise, find its best score and token."""
    rows, num_chunks = T.dynamic("rows"), -(-vocab // CHUNK)
    one = 2.0 ** mass_bits(vocab)

    @T.prim_func
    def main(
        logits: T.Tensor((rows, vocab), "float32"),
        is_banned: T.Tensor((vocab,), "uint8"),
        bans_eos: T.Tensor((rows,), "uint8"),
        is_greedy: T.Tensor((rows,), "uint8"),
        temperature: T.Tensor((rows,), "float64"),
        seeds: T.Tensor((rows,), "int64"),
        positions: T.Tensor((rows,), "int64"),
        best: T.Tensor((rows, num_chunks), "float32"),
        mass: T.Tensor((rows, num_chunks), "int64"),
        score: T.Tensor((rows, num_chunks), "float64"),
        score_token: T.Tensor((rows, num_chunks), "int32"),
    ):
        with T.Kernel(rows, num_chunks, threads=THREADS) as (row, chunk):
            thread = T.get_thread_binding()
            x = T.alloc_local((PER_THREAD,), "float32")
            tempered = T.alloc_local((PER_THREAD,), "float64")
            value, token = T.alloc_local((1,), "float64"), T.alloc_local((1,), "int32")
            own, top = T.alloc_var("int64"), T.alloc_var("float32")
            factor = T.alloc_var("float64")
            values = T.alloc_shared((WARPS,), "float64")
            tokens = T.alloc_shared((WARPS,), "int32")
            masses = T.alloc_shared((WARPS,), "int64")
            _load(logits, is_banned, bans_eos, row, chunk * CHUNK, vocab, eos_id, x)
            top = -T.infinity("float32")
            for i in T.unroll(-(-num_chunks // WARP)):
                if i * WARP + thread % WARP < num_chunks:
                    top = T.max(top, best[row, i * WARP + thread % WARP])
            top = T.warp_reduce_max(top)
            factor = 1.0 / temperature[row]
            own = T.int64(0)
            for i in T.unroll(PER_THREAD):
                tempered[i] = T.cast(x[i], "float64") * factor - T.cast(top, "float64") * factor
                own = own + T.cast(T.exp(tempered[i]) * T.float64(one), "int64")
            for step in T.unroll(5):
                own = own + T.shfl_xor(own, 1 << step)
            if thread % WARP == 0:
                masses[thread // WARP] = own
            value[0] = -T.infinity("float64")
            token[0] = NOBODY
            if is_greedy[row] == 0:
                _best_score(seeds[row], positions[row], chunk * CHUNK, tempered, value, token)
            _best_of_block(value, token, values, tokens, "float64")
            if thread == 0:
                own = T.int64(0)
                for w in T.unroll(WARPS):
                    own = own + masses[w]
                mass[row, chunk] = own
                score[row, chunk] = value[0]
                score_token[row, chunk] = token[0]

    return main


def choose_program(vocab: int, eos_id: int):
    """Choose each row's token and report its logprob."""
    rows, num_chunks = T.dynamic("rows"), -(-vocab // CHUNK)
    unit = 2.0 ** -mass_bits(vocab)

    @T.prim_func
    def main(
        logits: T.Tensor((rows, vocab), "float32"),
        is_banned: T.Tensor((vocab,), "uint8"),
        bans_eos: T.Tensor((rows,), "uint8"),
        is_greedy: T.Tensor((rows,), "uint8"),
        temperature: T.Tensor((rows,), "float64"),
        golden_ids: T.Tensor((rows,), "int64"),
        best: T.Tensor((rows, num_chunks), "float32"),
        best_token: T.Tensor((rows, num_chunks), "int32"),
        mass: T.Tensor((rows, num_chunks), "int64"),
        score: T.Tensor((rows, num_chunks), "float64"),
        score_token: T.Tensor((rows, num_chunks), "int32"),
        token_ids: T.Tensor((rows,), "int64"),
        logprobs: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(rows, threads=FINAL_THREADS) as row:
            lane = T.get_thread_binding()
            top, top_token = T.alloc_local((1,), "float32"), T.alloc_local((1,), "int32")
            value, token = T.alloc_local((1,), "float64"), T.alloc_local((1,), "int32")
            own, chosen = T.alloc_var("int64"), T.alloc_var("int64")
            factor, logprob = T.alloc_var("float64"), T.alloc_var("float64")
            top[0] = -T.infinity("float32")
            top_token[0] = NOBODY
            value[0] = -T.infinity("float64")
            token[0] = NOBODY
            own = T.int64(0)
            for i in T.unroll(-(-num_chunks // WARP)):
                at = i * WARP + lane
                if at < num_chunks:
                    own = own + mass[row, at]
                    if best[row, at] > top[0]:
                        top[0] = best[row, at]
                        top_token[0] = best_token[row, at]
                    if score[row, at] > value[0]:
                        value[0] = score[row, at]
                        token[0] = score_token[row, at]
            for step in T.unroll(5):
                own = own + T.shfl_xor(own, 1 << step)
            _best_of_warp(top, top_token, "float32")
            _best_of_warp(value, token, "float64")
            if lane == 0:
                chosen = golden_ids[row]
                if chosen == NO_GOLDEN:
                    chosen = T.cast(
                        T.if_then_else(is_greedy[row] == 0, token[0], top_token[0]), "int64"
                    )
                chosen = T.min(chosen, T.int64(vocab - 1))  # nobody, of logits that are no numbers
                token_ids[row] = chosen
                logprob = T.float64(FILTERED_LOGPROB)
                if is_banned[chosen] == 0 and (chosen != eos_id or bans_eos[row] == 0):
                    factor = 1.0 / temperature[row]
                    logprob = T.cast(logits[row, chosen], "float64") * factor
                    logprob = logprob - T.cast(top[0], "float64") * factor
                    logprob = logprob - T.log(T.cast(own, "float64") * T.float64(unit))
                logprobs[row] = T.cast(T.max(logprob, T.float64(FILTERED_LOGPROB)), "float32")

    return main


def sample_plain(logits: Tensor, rows: SamplingRows, bans: Bans) -> Sampled:
    """Launch the three passes; see `sampler.sample`. Rows have neither filters nor alternatives."""
    num_rows, vocab = logits.shape
    num_chunks, device = -(-vocab // CHUNK), logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows:
        dtypes = (torch.float32, torch.int32, torch.int64, torch.float64, torch.int32)
        best, best_token, mass, score, score_token = (
            torch.empty((num_rows, num_chunks), dtype=dtype, device=device) for dtype in dtypes
        )
        logits = logits.contiguous()
        is_banned, eos_id = bans.is_banned.view(torch.uint8), bans.eos_token_id
        bans_eos, is_greedy = rows.bans_eos.view(torch.uint8), rows.is_greedy.view(torch.uint8)
        compiled(best_logit_program, vocab, eos_id)(logits, is_banned, bans_eos, best, best_token)
        compiled(scores_program, vocab, eos_id)(
            logits, is_banned, bans_eos, is_greedy, rows.temperature, rows.seeds, rows.positions,
            best, mass, score, score_token,
        )  # fmt: skip
        compiled(choose_program, vocab, eos_id)(
            logits, is_banned, bans_eos, is_greedy, rows.temperature, rows.golden_ids,
            best, best_token, mass, score, score_token, token_ids, logprobs,
        )  # fmt: skip
    return Sampled(
        token_ids, logprobs,
        token_ids.new_empty((num_rows, 0)), logprobs.new_empty((num_rows, 0)),
    )  # fmt: skip


SAMPLES = tuple(
    Sample(builder, (vocab, 1))
    for builder in (best_logit_program, scores_program, choose_program)
    for vocab in (129280, 1024)
)
