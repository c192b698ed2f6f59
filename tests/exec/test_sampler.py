"""The sampler: golden random numbers, filters against brute force, batch independence."""

import math
from dataclasses import replace

import pytest
import torch

from mdi_exec.engine.sampling import Draw, SamplingParams
from mdi_exec.ops.gumbel import (
    ACCEPT,
    FRESH,
    RESAMPLE,
    gumbel_noise,
    mix,
    signed,
    stream_key,
    uniform,
)
from mdi_exec.ops.sampler import FILTERED_LOGPROB, Sampler, mass_bits
from mdi_shared.errors import ConfigError
from tests.exec.draws import rows_of_draws

HALVES = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
EOS = 1

# Golden numbers (docs/rules.md, R30): seed, position, case, token id, key, bits, u
GOLDEN_NUMBERS = [
    (42, 10, FRESH, 0, 0xE742790A40E0737C, 0xE7309BF4BF197E2C, 0.9030854675794213),
    (42, 10, FRESH, 1, 0xE742790A40E0737C, 0xA541F5DBF4EFB9D1, 0.6455377256397119),
    (42, 10, RESAMPLE, 0, 0x517FD55DC3CA81F1, 0x6FB218A2E8A7404E, 0.4363112828947609),
    (42, 10, ACCEPT, 0, 0x155704AA0AA49CE6, 0xE3B350F2989D8AF8, 0.8894548980975883),
    (42, 11, FRESH, 0, 0xFF4E64682C900AE5, 0x72A881F8A25E325C, 0.44788372345134847),
    (2**64 - 1, 131_072, FRESH, 129_279, 0xF120C61CCBB2B02A, 0x219BC7F3C13C8FFF,
     0.1312832803825918),
]  # fmt: skip


def int64(*values):
    return torch.tensor([signed(value) for value in values], dtype=torch.int64)


def rows_of(params, *, positions=None, output_index=None):
    count = len(params)
    return rows_of_draws(
        [
            Draw(*draw)
            for draw in zip(
                params, positions or range(count), output_index or [1] * count, strict=True
            )
        ]
    )


def sample(logits, params, **columns):
    sampler = Sampler(logits.shape[1], eos_token_id=EOS)
    return sampler(logits, rows_of(params, **columns))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0xE220A8397B1DCDAF), (1, 0x910A2DEC89025CC1), (2**64 - 1, 0xE4D971771B652C20)],
)
def test_mix_is_splitmix64(value, expected):
    assert torch.equal(mix(int64(value)), int64(expected))


@pytest.mark.parametrize(("seed", "position", "case", "token", "key", "bits", "u"), GOLDEN_NUMBERS)
def test_random_numbers_are_the_golden_ones(seed, position, case, token, key, bits, u):
    found_key = stream_key(int64(seed), int64(position), case)
    assert torch.equal(found_key, int64(key))
    found_bits = mix(found_key + token)
    assert torch.equal(found_bits, int64(bits))
    assert uniform(found_bits).item() == u


def test_noise_comes_from_those_bits():
    seeds, positions = int64(42, 42), int64(10, 11)
    noise = gumbel_noise(seeds, positions, FRESH, 2)
    expected = [[0.9030854675794213, 0.6455377256397119], [0.44788372345134847]]
    for row, us in enumerate(expected):
        for token, u in enumerate(us):
            assert noise[row, token].item() == pytest.approx(-math.log(-math.log(u)), abs=1e-12)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(42, [1, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3, 3, 2, 1, 2]),
     (7, [3, 0, 0, 0, 3, 1, 0, 0, 1, 0, 0, 1, 0, 0, 2, 3])],
)  # fmt: skip
def test_a_seeds_tokens_are_the_golden_ones(seed, expected):
    drawn = sample(HALVES.expand(16, 4), [SamplingParams(seq_seed=seed)] * 16)
    assert drawn.token_ids.tolist() == expected


def test_twenty_thousand_positions_give_the_golden_counts():
    drawn = sample(HALVES.expand(20_000, 4), [SamplingParams(seq_seed=1)] * 20_000)
    assert drawn.token_ids.bincount().tolist() == [10_063, 4_926, 2_437, 2_574]


def brute_force(logits, temperature, top_p, top_k):
    """Kept token ids and their probabilities, straight from the definition (R28)."""
    weights = [math.exp((float(x) - float(logits.max())) / temperature) for x in logits]
    probabilities = [w / sum(weights) for w in weights]
    order = sorted(range(len(weights)), key=lambda v: (-float(logits[v]), v))
    kept, before = {}, 0.0
    for rank, token in enumerate(order):
        if (top_p == 1 or before <= top_p) and (top_k == -1 or rank < top_k):
            kept[token] = probabilities[token]
        before += probabilities[token]
    return {token: p / sum(kept.values()) for token, p in kept.items()}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, -1), (0.7, -1), (1.0, 5), (0.9, 12), (0.05, 3)])
def test_logprobs_are_of_the_tempered_filtered_distribution(temperature, top_p, top_k):
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(3)) * 3
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, top_logprobs=64, seq_seed=5
    )
    drawn = sample(logits, [params] * 6)
    for row in range(6):
        expected = brute_force(logits[row], temperature, top_p, top_k)
        for token, logprob in zip(
            drawn.top_ids[row].tolist(), drawn.top_logprobs[row].tolist(), strict=True
        ):
            if token in expected:
                assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)
            else:
                assert logprob == FILTERED_LOGPROB
        chosen = int(drawn.token_ids[row])
        assert chosen in expected
        assert drawn.logprobs[row].item() == pytest.approx(math.log(expected[chosen]), abs=1e-5)


def test_top_p_keeps_the_token_that_crosses_and_ties_go_to_the_lower_id():
    logits = torch.zeros(3, 4)  # four times a quarter
    params = [SamplingParams(top_p=p, top_logprobs=4, seq_seed=1) for p in (0.25, 0.2, 0.5)]
    drawn = sample(logits, params)
    kept = (drawn.top_logprobs > FILTERED_LOGPROB).sum(dim=1).tolist()
    assert kept == [2, 1, 3]  # mass before it <= top_p
    assert drawn.top_ids.tolist() == [[0, 1, 2, 3]] * 3
    assert drawn.token_ids[1] == 0


def test_temperature_zero_is_argmax_and_turns_filters_off():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    drawn = sample(logits, [SamplingParams(temperature=0, top_k=1, top_p=0.1)])
    assert drawn.token_ids.tolist() == [1]
    assert drawn.logprobs.item() == pytest.approx(math.log(0.5))  # both threes are still there


def test_a_cold_temperature_counts_as_the_coldest_and_still_draws():
    logits = torch.tensor([[0.0, 2e-5, 0.0, -1.0]]).expand(64, 4)
    cold = [SamplingParams(temperature=1e-9, top_k=1, seq_seed=3)] * 64
    limit = [SamplingParams(temperature=1e-5, seq_seed=3)] * 64
    drawn = sample(logits, cold)
    assert torch.equal(drawn.token_ids, sample(logits, limit).token_ids)
    assert set(drawn.token_ids.tolist()) == {0, 1, 2}


def test_bans_hold_for_greedy_and_sampled_rows():
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]]).expand(4, 4)  # EOS is the most likely
    params = [
        SamplingParams(temperature=t, first_n_token_no_eos=1, seq_seed=1) for t in (0, 0, 1, 1)
    ]
    sampler = Sampler(4, eos_token_id=EOS, blacklist=[2])
    rows = rows_of(params, output_index=[0, 1, 0, 1])
    drawn = sampler(logits, rows)
    assert drawn.token_ids.tolist()[:2] == [3, 1]  # the second token may be EOS
    assert drawn.token_ids[2] in (0, 3)
    total = math.log(math.exp(0) + math.exp(1))
    assert drawn.logprobs[0].item() == pytest.approx(0.0, abs=1e-6)
    assert drawn.logprobs[2].item() == pytest.approx([0, 0, 0, 1][drawn.token_ids[2]] - total)


def test_golden_tokens_replace_sampled_ones_and_keep_their_logprob():
    params = SamplingParams(temperature=0, top_k=-1, golden_token_ids=[3, -1, 2])
    drawn = sample(HALVES.expand(4, 4), [params] * 4, output_index=[0, 1, 2, 3])
    assert drawn.token_ids.tolist() == [3, 0, 2, 0]
    assert drawn.logprobs.tolist()[0] == FILTERED_LOGPROB  # ln(1/4) / 1e-5 is far below


def mixed_batch(vocab_size):
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(64, vocab_size, generator=generator) * 4
    params = [
        SamplingParams(
            temperature=(0, 0.2, 1.0, 1.7)[i % 4],
            top_p=(1.0, 0.9, 0.5)[i % 3],
            top_k=(-1, 1, 40, 7, -1)[i % 5],
            top_logprobs=i % 6,
            seq_seed=i * 0x9E3779B97F4A7C15 % 2**64,
        )
        for i in range(64)
    ]
    return logits, params


@pytest.mark.parametrize("vocab_size", [1027, 32_771])
def test_a_row_alone_equals_the_row_in_a_batch_of_64(vocab_size):
    logits, params = mixed_batch(vocab_size)
    positions = list(range(100, 164))
    whole = sample(logits, params, positions=positions)
    for i in range(64):
        alone = sample(logits[i : i + 1], params[i : i + 1], positions=positions[i : i + 1])
        num_top = params[i].top_logprobs
        assert alone.token_ids.item() == whole.token_ids[i].item()
        assert alone.logprobs.item() == whole.logprobs[i].item()
        assert torch.equal(alone.top_ids[0], whole.top_ids[i, :num_top])
        assert torch.equal(alone.top_logprobs[0], whole.top_logprobs[i, :num_top])


def test_place_in_the_batch_and_slicing_do_not_matter():
    logits, params = mixed_batch(512)
    positions = list(range(64))
    tripled = sample(logits.repeat(3, 1), params * 3, positions=positions * 3)
    once = sample(logits, params, positions=positions)
    for column, expected in zip(tripled, once, strict=True):
        assert torch.equal(column, torch.cat([expected] * 3))


def test_logits_are_left_alone_and_no_rows_give_no_tokens():
    logits = torch.zeros(1, 4)
    sampler = Sampler(4, eos_token_id=EOS, blacklist=[0])
    sampler(logits, rows_of([SamplingParams()]))
    assert torch.equal(logits, torch.zeros(1, 4))
    empty = sampler(logits[:0], rows_of([]))
    assert empty.token_ids.shape == (0,)
    assert empty.top_ids.shape == (0, 0)


def test_masses_never_overflow():
    for vocab_size in (2, 4, 1024, 129_280, 131_072, 131_073, 2_000_000):
        assert vocab_size * 2 ** mass_bits(vocab_size) < 2**63


def test_params_defaults_and_rules():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1, -1, 16)
    assert SamplingParams(max_tokens=0).max_tokens == 1
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_seeds_are_taken_modulo_two_to_the_64_and_random_when_absent():
    assert SamplingParams(seq_seed=-1).rng_seed == 2**64 - 1
    unseeded = SamplingParams()
    drawn = [replace(unseeded).rng_seed for _ in range(8)]
    assert len(set(drawn)) == 8
    assert all(0 <= seed < 2**64 for seed in drawn)
    assert replace(unseeded, seq_seed=5).rng_seed == 5


def test_other_names_mean_the_same_and_may_not_contradict():
    given = SamplingParams(seed=7, logprobs=2, stop="end")
    assert given == SamplingParams(seq_seed=7, top_logprobs=2, stop=["end"])
    assert replace(given, seq_seed=8).rng_seed == 8
    assert SamplingParams(seed=7, seq_seed=7).rng_seed == 7
    for options, message in (
        ({"seed": 7, "seq_seed": 8}, "seed = 7: contradicts seq_seed = 8"),
        ({"logprobs": 1, "top_logprobs": 2}, "logprobs = 1: contradicts top_logprobs = 2"),
        ({"seed": "x"}, "seed = 'x': must be an integer"),
    ):
        with pytest.raises(ConfigError) as caught:
            SamplingParams(**options)
        assert str(caught.value).startswith(message)


def test_samples_of_one_prompt_have_seeds_of_their_own():
    each = [SamplingParams(n=3, seed=2**64 - 1).sample(i) for i in range(3)]
    assert [(one.n, one.rng_seed) for one in each] == [(1, 2**64 - 1), (1, 0), (1, 1)]
    unseeded = SamplingParams(n=3)
    assert len({unseeded.sample(i).rng_seed for i in range(3)}) == 3


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "from 0 (greedy)"),
        ("temperature", math.inf, "0 (greedy) to"),
        ("temperature", math.nan, "0 (greedy) to"),
        ("temperature", "hot", "number"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_p", True, "number"),
        ("top_k", 0, "-1"),
        ("top_k", 2.0, "integer"),
        ("max_tokens", -1, "from 1 to"),
        ("top_logprobs", 1001, "0 .. 1000"),
        ("first_n_token_no_eos", 2, "0 or 1"),
        ("ignore_eos", 1, "true or false"),
        ("stop_token_ids", [-1], "at least 0"),
        ("stop_token_ids", "ab", "integers"),
        ("golden_token_ids", (-2,), "-1"),
        ("seq_seed", 1.5, "integer"),
        ("seq_seed", 2**64, "64 bits"),
        ("seq_seed", -(2**63) - 1, "64 bits"),
        ("temperature", 10**400, "3.4e+38"),
        ("temperature", 1e39, "3.4e+38"),
        ("top_k", 2**63, "2147483647"),
        ("max_tokens", 2**31, "2147483647"),
        ("n", 0, "1 to"),
        ("n", True, "integer"),
        ("stop", "", "1 to 256"),
        ("stop", ["a"] * 17, "at most 16"),
        ("stop", [b"a"], "texts"),
        ("stop", 5, "texts"),
    ],
)
def test_wrong_options_are_named(field, value, allowed):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} = ")
    assert allowed in message
    assert "\n" not in message


def test_token_ids_outside_the_vocabulary_are_named():
    with pytest.raises(ConfigError, match=r"stop_token_ids = \(9,\).*vocab_size = 9"):
        SamplingParams(stop_token_ids=[9]).require_vocabulary(9)
    with pytest.raises(ConfigError, match=r"blacklist = \(4,\)"):
        Sampler(4, eos_token_id=EOS, blacklist=[4])
    with pytest.raises(ConfigError, match="must leave a token"):
        Sampler(2, eos_token_id=EOS, blacklist=[0])
