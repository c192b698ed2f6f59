"""Asks a scheduling policy at the core's decisions, and holds it to its rules.

The core keeps memory and progress: who holds blocks stays first, nothing is asked when nothing
runs, and between two decisions nothing is asked at all. Whatever a policy does wrong ends in one
line that names it (`PolicyError`).

Read next: `policies/base.py` (the questions), `prefill.py` and `decode.py` (the decisions).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from math import inf
from operator import ne
from typing import NoReturn, TypeVar

from mdi_shared.errors import MiniDeepInferError, PolicyError, raised
from mdi_shared.policies.base import SECOND, Key, Policy, View, shown
from mdi_shared.queues import Queues
from mdi_shared.request import Sequence

Asked = Callable[[Sequence, View], Key]
Answer = TypeVar("Answer")


class Decisions:
    """One scheduler's policy, what it sees, and what it has been told was served."""

    __slots__ = (
        "_asks_admit",
        "_asks_order",
        "_keys",
        "_looks",
        "_order",
        "_policy",
        "_queues",
        "_tells",
        "_told",
        "evicts",
        "has_phase",
        "mixes",
        "view",
    )

    def __init__(self, policy: Policy, queues: Queues) -> None:
        self._policy = policy
        self._queues = queues
        self.has_phase = policy.has_phase  # it is asked at each turn whether prompts go
        self.mixes = policy.mixes  # and then they go beside those who decode
        # Output tokens the policy has been told of, per sequence that ever had a chunk.
        self._told: dict[Sequence, int] = {}
        self.view = View(queues.config.block_size, queues.blocks.num_total - 1)
        self.evicts = policy.evict > 0
        # What a policy leaves as it is, is not asked.
        self._looks, self._tells = policy.answers("look"), policy.answers("served")
        self._asks_admit = policy.answers("admit")
        self._order = policy.answering("order").order
        self._asks_order = policy.answers("order") or policy.max_wait_s < inf
        self._keys: dict[Sequence, Key] = {}  # of `order`, where they last

    def lets_prompts_go(self) -> bool:
        """Say whether prompts go in this turn, where somebody waits below the watermark."""
        queues = self._queues
        if len(queues.running) == len(queues.dead):
            return True
        self._refresh(())
        answer = self._call("phase", None, self._policy.phase, self.view)
        return self._require_bool("phase", None, answer)

    def mixed_budget(self) -> int:
        """Return the most tokens that a mixed step may have."""
        return self._policy.budget or self._queues.config.token_budget

    def begin_prefill(self) -> None:
        """Tell what was served since the last attempt, and sort the waiting queue."""
        if self._tells:
            self._tell_outputs()
        if self._looks or self._asks_order:
            self._refresh(())
        if self._looks:
            self._call("look", None, self._policy.look, self.view)
        if not self._asks_order:
            return
        queues = self._queues
        held = int(bool(queues.waiting and queues.waiting[0].block_table))
        if len(queues.waiting) - held > 1:
            rest = list(islice(queues.waiting, held, None))
            queues.waiting = deque([*islice(queues.waiting, held), *self._arranged(rest)])
            self.view.waiting = queues.waiting

    def admits(self, seq: Sequence, picked: list[Sequence], leaving: list[Sequence]) -> bool:
        """Say whether the head, which fits, may take memory beside those running and picked.

        `leaving` run, but give way to it.
        """
        queues = self._queues
        if len(queues.running) == len(queues.dead) and not picked:
            return True
        if not self._asks_admit or self._is_overdue(seq):
            return True
        self._refresh(picked, leaving)
        answer = self._call("admit", seq, self._policy.admit, seq, self.view)
        return self._require_bool("admit", seq, answer)

    def took(self, seq: Sequence, tokens: int) -> None:
        """Tell that a chunk of so many prompt tokens is planned."""
        self._keys.pop(seq, None)
        if not self._tells:
            return
        self._told.setdefault(seq, seq.output_len)
        self._call("served", seq, self._policy.served, seq, tokens, 0)

    def victims_first(self) -> list[Sequence]:
        """Return the running sequences, those first that give way first."""
        self._refresh(())
        return self._by_victim(self._queues.running)

    def _by_victim(self, seqs: list[Sequence]) -> list[Sequence]:
        ask = self._policy.answering("victim").victim
        by_age = sorted(seqs, key=lambda seq: seq.seq_id)
        return self._sorted("victim", ask, by_age, greatest_first=True)

    def giving_way(self, waiter: Sequence) -> Iterator[Sequence]:
        """Yield the running sequences that give way to `waiter`, those first that do so first.

        Never one that has done so as often as the policy allows, or that is overdue.
        """
        self._refresh(())
        most = self._policy.evict
        may = [seq for seq in self._queues.running if seq.clock is not None
               and seq.num_preempted < most and not self._is_overdue(seq)]  # fmt: skip
        for seq in self._by_victim(may):
            answer = self._call("makes_way", seq, self._policy.makes_way, seq, waiter, self.view)
            if self._require_bool("makes_way", seq, answer):
                yield seq

    def _require_bool(self, hook: str, seq: Sequence | None, answer: bool) -> bool:
        if type(answer) is not bool:
            self._fail(hook, seq, f"returned {answer!r}, which is neither True nor False")
        return answer

    # ---- how it asks ---------------------------------------------------------------------------

    def _tell_outputs(self) -> None:
        left = []
        for seq, told in self._told.items():
            new = seq.output_len - told
            if new or seq.is_finished:
                self._call("served", seq, self._policy.served, seq, 0, new)
                self._told[seq] = seq.output_len
            if seq.is_finished:
                left.append(seq)
        for seq in left:
            del self._told[seq]

    def _refresh(self, picked: Iterable[Sequence], leaving: Collection[Sequence] = ()) -> None:
        queues, view = self._queues, self.view
        view.free_blocks = queues.blocks.num_free
        view.waiting = queues.waiting
        view.running = [seq for seq in queues.running if seq.clock is not None]
        view.running += picked
        if leaving:
            view.free_blocks += sum([queues.owned_blocks(seq) for seq in leaving])
            view.running = [seq for seq in view.running if seq not in leaving]

    def _is_overdue(self, seq: Sequence) -> bool:
        most = self._policy.max_wait_s
        return most < inf and self.view.now_ns - seq.request.arrived_ns >= most * SECOND

    def _arranged(self, rest: list[Sequence]) -> list[Sequence]:
        late: list[Sequence] = []
        if self._policy.max_wait_s < inf:
            late = [seq for seq in rest if self._is_overdue(seq)]
        if late:
            rest = [seq for seq in rest if not self._is_overdue(seq)]
            late.sort(key=lambda seq: (seq.request.arrived_ns, seq.seq_id))
        if not self._policy.keeps_keys:
            return late + self._sorted("order", self._order, rest)
        known = self._keys
        new = [seq for seq in rest if seq not in known]
        known.update(zip(new, self._asked("order", self._order, new), strict=True))
        if len(known) > 2 * len(rest) + 100:  # of requests that were aborted while they waited
            self._keys = known = {seq: known[seq] for seq in rest}
        return late + self._by_keys("order", rest, [known[seq] for seq in rest])

    def _sorted(
        self, hook: str, ask: Asked, seqs: list[Sequence], *, greatest_first: bool = False
    ) -> list[Sequence]:
        """Return `seqs` by the keys that `ask` gives, equals as they stand."""
        return self._by_keys(hook, seqs, self._asked(hook, ask, seqs), greatest_first)

    def _by_keys(
        self, hook: str, seqs: list[Sequence], keys: list[Key], greatest_first: bool = False
    ) -> list[Sequence]:
        places = range(len(seqs))
        try:
            by_key = sorted(places, key=keys.__getitem__, reverse=greatest_first)
        except TypeError:
            self._name_mixed(hook, seqs, keys)
        return [seqs[place] for place in by_key]

    def _asked(self, hook: str, ask: Asked, seqs: list[Sequence]) -> list[Key]:
        """Return the keys of `seqs`; whose is wrong is found out only if one is."""
        view = self.view
        try:
            keys = [ask(seq, view) for seq in seqs]
        except Exception:  # noqa: BLE001 - raised again for the one that it is about
            keys = []
        if len(keys) == len(seqs) and _are_plain(keys):
            return keys
        return [self._key(hook, ask, seq) for seq in seqs]

    def _key(self, hook: str, ask: Asked, seq: Sequence) -> Key:
        key = self._call(hook, seq, ask, seq, self.view)
        for part in key if type(key) is tuple else (key,):
            if not isinstance(part, int | float | str):
                self._fail(hook, seq, f"returned {key!r}: a key is a number, a text, or a tuple "
                           "of these")  # fmt: skip
            if part != part:
                self._fail(hook, seq, f"returned {key!r}: NaN compares with nothing")
        return key

    def _name_mixed(self, hook: str, seqs: list[Sequence], keys: list[Key]) -> NoReturn:
        """Name the first key that does not compare with the one of the first sequence."""
        for seq, key in zip(seqs, keys, strict=True):
            try:
                _ = key < keys[0]  # type: ignore[operator]
            except TypeError:
                self._fail(hook, seq, f"returned {key!r}, which does not compare with {keys[0]!r} "
                           f"of {seqs[0].request.req_id!r}")  # fmt: skip
        self._fail(hook, seqs[0], "returned keys that do not compare with one another")

    def _call(
        self, hook: str, seq: Sequence | None, ask: Callable[..., Answer], *args: object
    ) -> Answer:
        try:
            return ask(*args)
        except MiniDeepInferError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a policy raises, one line names it
            self._fail(hook, seq, raised(error), error)

    def _fail(
        self, hook: str, seq: Sequence | None, problem: str, cause: Exception | None = None
    ) -> NoReturn:
        name = "" if seq is None else seq.request.req_id
        raise PolicyError(shown(self._policy), hook, name, problem) from cause


def _are_plain(keys: list[Key]) -> bool:
    """Say whether all keys are numbers and texts, or all tuples of these, and none is NaN."""
    parts: Collection[object] = keys
    if keys and type(keys[0]) is tuple:
        if set(map(type, keys)) != {tuple}:
            return False
        parts = list(chain.from_iterable(keys))  # type: ignore[arg-type]
    kinds = set(map(type, parts))
    return kinds <= {int, float, str, bool} and not (float in kinds and any(map(ne, parts, parts)))
