"""Under torchrun: one rank tells an error, and leaves last.

torchrun ends all ranks once one has failed, and then lists each process that it had to end, in
seven lines of its report. So ranks that have nothing to add leave by themselves before the one that
failed does, and its error is the report's only entry.

Read next: `cli.py` (who calls), `mdi_exec/ranks/meeting.py`.
"""

import os
from contextlib import suppress
from datetime import timedelta

from minideepinfer.commands.screen import tell

_STORE_S = 5.0  # for torchrun's store to answer
_LEAVE_S = 3.0  # for the other ranks to leave


def tell_once(line: str, error: Exception) -> None:
    """Print the line of an error that ends the command, in a group from one rank only.

    Does not return on a rank that leaves it to another one of torchrun's on this machine: torchrun
    goes by that one's exit code.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    is_quoted = size != "1" and getattr(error, "is_quoted", False)
    if size == "1" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if not is_quoted:
            tell(line)
        return
    from mdi_exec.ranks.meeting import RankAddress, find_store, group_store
    from mdi_shared.errors import MiniDeepInferError

    try:
        address = RankAddress.from_environment()
        assert address is not None, "a group is larger than one"
        store = group_store(address, find_store(address, _STORE_S))
        mine = f"{address.rank} {line}"
        first = store.compare_set("last_words", "", mine).decode()
    except (MiniDeepInferError, RuntimeError):  # torchrun has gone, or its variables are not right
        tell(line)
        return
    if not is_quoted and (first == mine or first.partition(" ")[2] != line):
        tell(line)
        if address.is_local:
            others = [f"left{rank}" for rank in range(address.size) if rank != address.rank]
            with suppress(RuntimeError):
                store.wait(others, timedelta(seconds=_LEAVE_S))
    elif address.is_local:
        with suppress(RuntimeError):
            store.set(f"left{address.rank}", "")
        os._exit(0)
