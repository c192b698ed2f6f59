"""Groups of ranks in one process for tests: a thread per rank, a barrier instead of gloo."""

import json
import threading
from contextlib import contextmanager
from unittest import mock

import torch

from mdi_exec.errors import GroupError
from mdi_exec.ranks.collectives import Collectives
from mdi_exec.ranks.meeting import RankAddress
from mdi_exec.ranks.parallel import RankGroup

LONGEST_S = 120  # a rank that waits longer for the others hangs


class Place:
    """Where the ranks of a group meet, again and again."""

    def __init__(self, size):
        self.barrier, self.values = threading.Barrier(size), [None] * size


class Meeting:
    """What a group's threads share."""

    def __init__(self, size):
        self.votes, self.tensors = Place(size), Place(size)
        self.size = size
        self.lock = threading.Lock()
        self.first_error = None


def meet(place, rank, value):
    """Return what every rank has brought."""
    try:
        place.values[rank] = value
        place.barrier.wait(LONGEST_S)
        found = list(place.values)
        place.barrier.wait(LONGEST_S)
    except threading.BrokenBarrierError:
        raise GroupError("the others are gone") from None
    return found


class ThreadCollectives(Collectives):
    """Exchange of tensors between threads, which meet apart from their votes."""

    def __init__(self, group):
        self.rank, self.size, self.sent_bytes = group.rank, group.size, 0
        self.meet = lambda value: meet(group.meeting.tensors, group.rank, value)

    def all_gather(self, rows):
        return torch.cat(self.meet(rows))

    def reduce_scatter(self, rows):
        parts = [part.chunk(self.size)[self.rank] for part in self.meet(rows)]
        return torch.stack(parts).sum(dim=0, dtype=torch.uint8)

    def all_to_all(self, rows, sent, received):
        parts = self.meet(torch.split(rows, list(sent)))
        return torch.cat([part[self.rank] for part in parts])

    def swap_counts(self, counts):
        got = torch.stack([part[self.rank] for part in self.meet(counts)])
        sent, received = torch.stack((counts, got)).transpose(1, 2).tolist()
        return sent, received


class ThreadGroup(RankGroup):
    """One rank's view; see `ProcessGroup` for what each method promises."""

    def __init__(self, rank, meeting):
        self.rank, self.meeting = rank, meeting
        self.size = meeting.size
        self.is_open = True

    def gather(self, values):
        return self._meet(tuple(int(value) for value in values))

    def gather_plain(self, value):
        return [json.loads(text) for text in self._meet(json.dumps(value))]

    def _meet(self, value):
        if not self.is_open:
            raise GroupError("it was left already")
        try:
            return meet(self.meeting.votes, self.rank, value)
        except GroupError as error:
            raise self.fail(error) from None

    def tensor_group(self, device):
        return ThreadCollectives(self)

    def fail(self, error):
        if not self.is_open:
            return error
        with self.meeting.lock:
            self.meeting.first_error = self.meeting.first_error or (error, self.rank)
        self.close()
        first, rank = self.meeting.first_error
        return error if first is error else GroupError(f"rank {rank}: {first}")

    def close(self):
        if self.is_open:
            self.is_open = False
            if self.meeting.first_error is not None:
                self.meeting.votes.barrier.abort()
                self.meeting.tensors.barrier.abort()


def run_ranks(size, work):
    """Call `work(group)` for every rank, each in its thread; return results, or errors, by rank."""
    meeting = Meeting(size)
    results = [None] * size

    def run(rank):
        group = ThreadGroup(rank, meeting)
        try:
            with group.ends_with():
                results[rank] = work(group)
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONGEST_S)
        assert not thread.is_alive(), "a rank hangs"
    return results


@contextmanager
def llms_find(group_of_thread):
    """Let every `LLM` made in the block belong to the group its thread has in `group_of_thread`."""

    def address():
        group = group_of_thread.group
        return RankAddress(group.rank, group.size, "nowhere", 0, leads=False)

    def join(address, timeout_s, start_s):
        return group_of_thread.group

    with (
        mock.patch.object(RankAddress, "from_environment", staticmethod(address)),
        mock.patch("mdi_exec.engine.rank.join_group", join),
    ):
        yield


def llm_results(size, work):
    """As `results_of`, for a `work` that makes and uses an `LLM`."""
    local = threading.local()

    def run(group):
        local.group = group
        return work()

    with llms_find(local):
        return results_of(size, run)


def results_of(size, work):
    """As `run_ranks`, but raise the first error that is not about another rank."""
    results = run_ranks(size, work)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, GroupError)):
        raise error
    return results
