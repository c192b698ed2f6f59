"""Which kernels a model can reach, found without a GPU, and each compiled once."""

import shutil
import tempfile

import pytest

from mdi_exec.engine import kernels_ahead
from mdi_exec.engine.kernels_ahead import (
    Reach,
    compile_ahead,
    reach_of,
    reachable_kernels,
    told_in_lines,
)
from mdi_exec.model.cache import CacheLayout
from mdi_exec.numerics import Numerics
from mdi_exec.weights.source import random_config
from mdi_shared.errors import ConfigError

pytest.importorskip("tilelang")

LAYOUT = CacheLayout(config=random_config("small"), numerics=Numerics.QUANTISED)
REACH = Reach(LAYOUT, max_rows=12, max_num_seqs=4, max_model_len=16384, expanded_bytes=1e9)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Note what would be compiled; the cache is a folder of the test's own."""
    from mdi_exec.ops.kernels import jit

    done = []

    def compile_all(samples, architecture, num_processes):
        for sample in samples:
            done.append(sample)
            yield sample

    monkeypatch.setattr(kernels_ahead, "_compile_all", compile_all)
    monkeypatch.setattr(jit, "cache_folder", lambda: (tmp_path, None))
    return done


def silent(done, total):
    pass


def test_every_part_of_the_model_is_reached():
    names = {sample.builder.__name__ for sample in reachable_kernels(REACH, "sm_90a")}
    assert {
        "weight_gemm", "gemm", "sparse_attention_program", "index_scores_program",
        "top_visible_program", "block_maxima_program", "route_program", "combine_program",
        "engram_add_program", "hc_write_rows", "norm_store_rows", "choose_program",
    } <= names  # fmt: skip


def test_larger_steps_reach_more():
    small = set(reachable_kernels(REACH, "sm_90a"))
    large = set(reachable_kernels(Reach(LAYOUT, 2048, 4, 16384, 1e9), "sm_90a"))
    assert small < large


def test_kernels_are_those_of_the_architecture():
    hopper, blackwell = (set(reachable_kernels(REACH, arch)) for arch in ("sm_90a", "sm_100a"))
    assert hopper != blackwell, "only Hopper's register order is used directly"


def test_a_kernel_is_compiled_once(compiled, monkeypatch):
    assert compile_ahead(REACH, "sm_90a", silent) == len(compiled) == len(set(compiled)) > 20
    monkeypatch.setattr(kernels_ahead, "reachable_kernels", pytest.fail)
    assert compile_ahead(REACH, "sm_90a", silent) == 0, "a mark says that nothing is missing"


def test_only_what_is_missing_is_compiled(compiled):
    first = compile_ahead(REACH, "sm_90a", silent)
    more = compile_ahead(Reach(LAYOUT, 2048, 4, 16384, 1e9), "sm_90a", silent)
    assert first > more > 0
    assert len(set(compiled)) == first + more


def test_a_compilation_cut_off_goes_on_where_it_was(compiled, monkeypatch):
    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_ahead(REACH, "sm_90a", stop)
    rest = compile_ahead(REACH, "sm_90a", silent)
    assert rest == len(set(compiled)) - 5


def test_progress_is_told_in_tenths():
    lines = []
    on_progress = told_in_lines(lines.append)
    for done in range(96 + 1):
        on_progress(done, 96)
    assert len(lines) == 11
    assert lines[0] == "compiling kernels: 0 of 96"
    assert lines[-1] == "compiling kernels: 96 of 96"
    told_in_lines(pytest.fail)(0, 0)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="compiling needs nvcc")
def test_kernels_are_compiled_in_processes_of_their_own(tmp_path, monkeypatch):
    """Two small ones for real: they come back, and are in the cache on disk."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    samples = [s for s in reachable_kernels(REACH, "sm_90a")
               if s.builder.__name__ in ("rms_norm_rows", "hc_read_rows")][:2]  # fmt: skip
    assert set(kernels_ahead._compile_all(samples, "sm_90a", 2)) == set(samples)
    assert list(tmp_path.rglob("*.so"))


def test_an_unknown_architecture_is_refused():
    from mdi_exec.ops.kernels.jit import require_architecture

    assert require_architecture("sm_100a") == "sm_100a"
    with pytest.raises(ConfigError, match="--arch = 'sm_80': must be sm_90a or sm_100a"):
        require_architecture("sm_80")


def test_a_reach_is_that_of_the_options():
    reach = reach_of("random:small", {"max_num_seqs": 3, "max_model_len": 700})
    assert (reach.max_num_seqs, reach.max_model_len, reach.max_rows) == (3, 700, 700)


def test_a_home_that_cannot_be_written_has_a_makeshift(monkeypatch, tmp_path):
    from mdi_exec.ops.kernels import jit

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder, note = jit.cache_folder.__wrapped__()
    assert folder.is_dir()
    assert folder.parent == tmp_path
    assert "cannot be written (Not a directory)" in note
