"""Groups of two ranks whose processes are killed, stopped, interrupted, or do not fit together.

Ranks that `mdi` starts and ranks started by hand, as a launcher would. Whatever happens: every
process ends within its limit, one line says why, what was recorded can be read, and nothing that
was started lives on. A case takes as long as starting torch three times, and longer than a limit.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from mdi_traces.run import load_run
from tests.fuzz.suite import drawn, one_line

TINY = Path(__file__).parent.parent / "golden" / "tiny"
MARK = "MDI_FUZZ_CASE"
TIMEOUT_S, START_S = 6, 25
LONGEST_S = 200.0  # for all processes of a case to end; on a machine with other work
BUSY = ("--requests", "8", "--rate", "1000", "--max-prompt", "60", "--max-output", "60",
        "--out", "run")  # fmt: skip
OTHER_VERSION = (
    "import mdi_exec.engine.loaded as loaded; loaded.this_generator = lambda: 'another';"
    "from minideepinfer.__main__ import main; main()"
)
# What another rank has that does not fit, and what the one line says.
MISFITS = {
    "options differ": "ranks must agree", "model differs": "checkpoint = ",
    "version differs": "version = ", "sizes differ": "WORLD_SIZE = ",
    "same rank twice": "RANK = 1: another process", "rank 1 alone": "rank 0, where all ranks meet,",
    "rank 0 alone": "rank 1 has not come within", "token differs": "has not come within",
}  # fmt: skip
FATES = tuple(f"{who} {what}" for who in ("worker", "front", "rank") for what in (
    "killed", "stopped", "interrupted") if (who, what) != ("front", "stopped"))  # fmt: skip


def groups(folder):
    """Return the suite; it runs in `folder`."""
    other = folder / "other"
    shutil.copytree(TINY, other, copy_function=shutil.copyfile)
    raw = bytearray((other / "model.safetensors").read_bytes())
    raw[-1000] ^= 1
    (other / "model.safetensors").write_bytes(raw)

    def case(seed, counts: Counter[str]):
        rng = drawn("groups", seed)
        kinds = (*MISFITS, *FATES)
        what = kinds[seed % len(kinds)]
        place = folder / f"case{seed}"
        place.mkdir()
        group = Group(place, other)
        try:
            group.misfit(what) if what in MISFITS else group.fate(what, rng)
        finally:
            group.end()
        counts[what] += 1

    return case


class Group:
    """The processes of one case."""

    def __init__(self, place, other):
        self.place, self.other = place, other
        self.mark = f"{os.getpid()}-{place.name}"
        self.started = []
        self.texts = {}

    def start(self, *arguments, code=None, **env):
        program = ["-c", code] if code else ["-m", "minideepinfer"]
        with (self.place / f"error{len(self.started)}").open("w") as error:
            self.started.append(subprocess.Popen(
                [sys.executable, *program, *map(str, arguments)], cwd=self.place,
                stdout=subprocess.DEVNULL, stderr=error, stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), MARK: self.mark, **env},
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            ))  # fmt: skip

    def rank(self, rank, port, *extra, size=2, token="", model=TINY, code=None):
        """Start a rank as a launcher would."""
        limits = (f"--set=group_timeout_s={TIMEOUT_S}", f"--set=group_start_timeout_s={START_S}")
        self.start("record", *limits, *extra, model, "azure-conv", *BUSY, code=code,
                   RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(port), MDI_GROUP_TOKEN=token)  # fmt: skip

    # ---- ranks that do not fit -----------------------------------------------------------------

    def misfit(self, what):
        port = free_port()
        if what != "rank 1 alone":
            self.rank(0, port)
        changes = {
            "options differ": {"extra": ("--set=lookahead=1",)},
            "model differs": {"model": self.other},
            "version differs": {"code": OTHER_VERSION}, "sizes differ": {"size": 3},
            "token differs": {"token": "another token of a group"},
        }.get(what, {})  # fmt: skip
        if what != "rank 0 alone":
            self.rank(1, port, *changes.pop("extra", ()), **changes)
        if what == "same rank twice":
            self.rank(1, port)
        self.wait()
        codes = sorted(process.returncode for process in self.started)
        errors = self.errors()
        assert MISFITS[what] in " ".join(errors), errors
        if what == "same rank twice":  # the two that fit go on
            assert codes == [0, 0, 2], codes
            assert len(errors) == 1, errors
            load_run(self.place / "run")
            return
        assert set(codes) == {2}, codes
        # Ranks that cannot hear each other speak for themselves.
        most = 2 if what in ("sizes differ", "token differs") else 1
        assert len(errors) <= most, errors

    # ---- ranks that meet with something --------------------------------------------------------

    def fate(self, fate, rng):
        who, what = fate.split()
        if who == "rank":
            port = free_port()
            for rank in range(2):
                self.rank(rank, port)
            victims = [self.started[rng.randrange(2)].pid]
        else:
            self.start("record", TINY, "azure-conv", "--ranks", 2, *BUSY,
                       f"--set=group_timeout_s={TIMEOUT_S}")  # fmt: skip
            victims = [self.started[0].pid]
        self.await_start(rng.choice((0.0, 1.0, 3.0, 6.0)))
        if who == "worker":
            victims = [rng.choice(self.workers() or victims)]
        if what == "interrupted":  # as a terminal does it: everybody hears it
            victims = [process.pid for process in self.started] + (
                self.workers() if who != "rank" else [])  # fmt: skip
        self.strike(victims, what)
        left = victims if fate == "rank stopped" else ()  # for its launcher to end
        self.wait([process for process in self.started if process.pid not in left])
        self.judge(fate, victims)

    def await_start(self, longer_s):
        """Wait until ranks have told their memory, or a while; then a little longer."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any("rank 1 of 2" in t for t in self.said()):
            if any(process.poll() is not None for process in self.started):
                break
            time.sleep(0.05)
        time.sleep(longer_s)

    def strike(self, pids, what):
        number = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP,
                  "interrupted": signal.SIGINT}[what]  # fmt: skip
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def judge(self, fate, victims):
        errors, who, what = self.errors(), *fate.split()
        codes = {p.pid: p.returncode for p in self.started}
        if all(code == 0 for code in codes.values()):  # it had done its work before
            load_run(self.place / "run")
            return
        if what == "interrupted":
            told = [line for text in self.said() for line in text.splitlines()
                    if "interrupt" in line]  # fmt: skip
            assert len(told) <= 1, told
            assert not errors or who == "rank", errors
        elif fate != "front killed":
            assert len(errors) == 1, errors
        self.read_parts()

    def read_parts(self):
        """Every recording that is there can be read."""
        for path in self.place.glob("run*.steps.parquet"):
            load_run(path)

    # ---- what is left --------------------------------------------------------------------------

    def wait(self, processes=None):
        deadline = time.monotonic() + LONGEST_S
        for process in self.started if processes is None else processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"a process does not end: {self.said()}") from None
        while strays := set(self.living()) - {p.pid for p in self.started}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        assert not strays, f"processes live on: {strays}"

    def said(self):
        return [path.read_text(errors="replace") for path in sorted(self.place.glob("error*"))]

    def errors(self):
        """Return the lines of error of all processes; there must be no more to them."""
        text = "\n".join(self.said())
        assert "Traceback" not in text, text[-1_500:]
        return [one_line(line) for line in text.splitlines() if line.startswith("error: ")]

    def living(self):
        """Return the processes of this case that run, by the mark in their environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARK}={self.mark}\0".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def workers(self):
        return [pid for pid in self.living() if pid not in {p.pid for p in self.started}
                and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]  # fmt: skip

    def end(self):
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
