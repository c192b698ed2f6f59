"""One rank in this process: its group, its loaded model, and the engine that serves it.

A process of its own is a group of one. Ranks of a larger group are made alike wherever they live:
under torchrun by `LLM`, in workers by `rank_worker.py`. Read next: `loaded.py`, `engine.py`.
"""

from collections.abc import Callable
from pathlib import Path

from mdi_exec.engine.loaded import LoadedModel, read_cost_model
from mdi_exec.engine.options import split_options
from mdi_exec.errors import EngineStoppedError
from mdi_exec.ranks.meeting import RankAddress, join_group
from mdi_exec.ranks.parallel import RankGroup, own_device


class Rank:
    """A model with an engine; `options` are those of `LLM`, and so is what it raises.

    `address` is its place in a group, None for a group of one; `on_estimate` is called with a line
    on the memory it will take. `notes` are lines that the user should see.
    """

    def __init__(
        self, model: str | Path, options: dict[str, object], *, address: RankAddress | None,
        on_estimate: Callable[[str], None],
    ) -> None:  # fmt: skip
        engine_options, scheduler_options = split_options(options)
        # Read first: a bad file is no reason to load weights.
        cost_model = read_cost_model(engine_options)
        engine_options.require_group(1 if address is None else address.size)
        self.group = RankGroup()
        if address is not None:
            self.group = join_group(
                address, engine_options.group_timeout_s, engine_options.group_start_timeout_s
            )
        self._is_closed = False
        with self.group.ends_with():
            self.loaded = LoadedModel(
                model, engine_options, scheduler_options, self.group, on_estimate
            )
            self.options, self.model = self.loaded.options, self.loaded.transformer
            self.engine, self.notes = self.loaded.engine(
                self.options, scheduler_options, cost_model
            )

    def reopen(self, options: dict[str, object]) -> None:
        """See `LLM.reopen`."""
        if self._is_closed:
            raise EngineStoppedError("it was closed")
        if "device" in options:  # a rank that was given "cuda" has one of the GPUs
            options["device"] = own_device(str(options["device"]), self.group)
        loaded = self.loaded
        engine_options, scheduler_options = split_options(loaded.options.keep_loading(options))
        engine_options.require_seen_ranks(self.group.size)
        loaded.planned_config(engine_options, scheduler_options)
        cost_model = read_cost_model(engine_options)
        with self.group.ends_with():
            self._save_last()
            self.engine.close(leaves_group=False)
            loaded.require_room(engine_options, scheduler_options)
            self.engine, self.notes = loaded.engine(engine_options, scheduler_options, cost_model)
            self.options = engine_options

    def save_recording(self) -> None:
        """Write the run so far to the files `record` names; in a group all ranks call this."""
        if self.options.record is not None:
            run = self.engine.recorded_run()
            if run is not None:
                run.save(self.options.record)

    def close(self, *, saves: bool = True) -> None:
        """Save the recording, unless somebody else `saves` it, and release the device.

        When its group has failed, a rank saves what it has recorded itself, as PREFIX.rankN.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._save_last(saves=saves)
        finally:
            self.engine.close()

    def _save_last(self, *, saves: bool = True) -> None:
        """Save the recording of an engine that will be closed."""
        if not self.group.is_open:
            recording = self.engine.recording
            if self.options.record is not None and recording is not None:
                run = recording.run(self.engine.scheduler)
                run.save(f"{self.options.record}.rank{self.group.rank}")
        elif saves and (not self.engine.is_stopped or self.group.size == 1):
            self.save_recording()
