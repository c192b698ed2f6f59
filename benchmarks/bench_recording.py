"""What recording a run costs the engine's thread, per decode step and by batch size.

A tiny model serves batches of equal requests on the CPU; the calls into the recorder are timed, by
the thread's own time, and only they. What they do does not depend on the model or the device. "On
the way" is what stands between one step and the next; the step's work is counted from its plan "in
waiting", while the engine waits for the device anyway. The share is of a step of a recorded run
(--beside), and an upper bound: under overlapped scheduling all of it passes while the device works.

    python benchmarks/bench_recording.py [--batches 1 8 64 256] [--steps 60]
        [--beside traces/recorded/h200-flash-slice/decode]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.recording import Recording
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.weights.make_checkpoint import make_checkpoint
from mdi_traces.run import load_run

ON_THE_WAY, IN_WAITING = ("launched", "landed", "reported"), ("catch_up",)


def timed_calls(recording: Recording, names: tuple[str, ...]) -> list[int]:
    """Make a recording add the nanoseconds of each call to a list; returns the list."""
    spent: list[int] = []

    def wrap(name: str) -> None:
        original = getattr(recording, name)

        def call(*arguments: Any) -> Any:  # noqa: ANN401
            begin = time.thread_time_ns()
            out = original(*arguments)
            spent.append(time.thread_time_ns() - begin)
            return out

        setattr(recording, name, call)

    for name in names:
        wrap(name)
    return spent


def per_step_us(model: Path, batch: int, steps: int, folder: Path) -> tuple[float, float]:
    """Median microseconds of recording a decode step of `batch` rows: on the way, in waiting."""
    options = {"max_num_seqs": batch, "max_model_len": 256, "record": str(folder / f"b{batch}"),
               "num_blocks": 2 + 3 * batch, "prefill_attempt_interval": 1}  # fmt: skip
    with LLM(model, **options) as llm:
        assert llm.engine.recording is not None
        params = SamplingParams(max_tokens=steps, ignore_eos=True, seq_seed=0)
        for _ in range(batch):
            llm.engine.add_request([5, 6, 7], params)
        for _ in range(4):
            llm.engine.step()
        lists = [timed_calls(llm.engine.recording, names) for names in (ON_THE_WAY, IN_WAITING)]
        sums: list[list[int]] = [[], []]
        while llm.engine.has_unfinished_requests():
            before = [len(spent) for spent in lists]
            llm.engine.step()
            for total, spent, start in zip(sums, lists, before, strict=True):
                total.append(sum(spent[start:]))
    on_the_way, in_waiting = (statistics.median(total) / 1e3 for total in sums)
    return on_the_way, in_waiting


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=60, help="tokens of each request")
    parser.add_argument(
        "--beside", type=Path, default=Path("traces/recorded/h200-flash-slice/decode")
    )
    options = parser.parse_args()
    steps = load_run(options.beside).steps
    decodes = steps[steps["kind"] == "decode"].groupby("n_seqs")["gpu_ms"].median()
    print("batch  on the way us  in waiting us  device step ms  share on the way")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_checkpoint(folder / "tiny", with_draft=False, with_vision=False)
        for batch in options.batches:
            cost_us, waiting_us = per_step_us(model, batch, options.steps, folder)
            step_ms = decodes.get(batch)
            beside = "" if step_ms is None else f"{step_ms:14.2f}  {cost_us / 1e3 / step_ms:.2%}"
            print(f"{batch:5}  {cost_us:13.1f}  {waiting_us:13.1f}  {beside}", flush=True)


if __name__ == "__main__":
    main()
