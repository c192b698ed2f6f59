"""The block pool by itself: order, limits, reference counts, and a state machine."""

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mdi_shared.blocks import BlockPool, Fit


def test_later_when_empty_and_never_at_the_total():
    pool = BlockPool(5)
    assert pool.fits(0) is Fit.OK
    assert pool.fits(4) is Fit.OK
    assert pool.fits(5) is Fit.NEVER
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.fits(1) is Fit.LATER
    assert pool.fits(0) is Fit.OK


def test_ids_return_to_the_tail_in_the_order_given():
    pool = BlockPool(8)
    table = pool.allocate(3)
    pool.free(reversed(table))
    assert pool.allocate(7) == [4, 5, 6, 7, 3, 2, 1]


def test_a_shared_block_survives_one_free():
    pool = BlockPool(3)
    (block,) = pool.allocate()
    pool.pin(block)
    pool.free([block])
    assert (pool.num_free, pool.references(block)) == (1, 1)
    pool.free([block])
    assert pool.num_free == 2


def test_double_free_and_stray_pins_are_caught():
    pool = BlockPool(3)
    (block,) = pool.allocate()
    pool.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])
    with pytest.raises(AssertionError, match="not in use"):
        pool.pin(block)
    with pytest.raises(AssertionError, match="3 ids wanted, 2 free"):
        pool.allocate(3)


def test_an_idle_pool_reads_one_id_in_use():
    assert BlockPool(10).usage == pytest.approx(0.1)


class PoolMachine(RuleBasedStateMachine):
    """Random allocations, pins and frees against a list and a dict."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(9)
        self.free = deque(range(1, 9))
        self.refs = {}

    @rule(count=st.integers(0, 10))
    def allocate(self, count):
        fit = self.pool.fits(count)
        if count >= 9:
            assert fit is Fit.NEVER
        elif count > len(self.free):
            assert fit is Fit.LATER
        else:
            assert fit is Fit.OK
            expected = [self.free.popleft() for _ in range(count)]
            assert self.pool.allocate(count) == expected
            self.refs.update(dict.fromkeys(expected, 1))

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def pin(self, data):
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.pin(block)
        self.refs[block] += 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data):
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.free([block])
        self.refs[block] -= 1
        if self.refs[block] == 0:
            del self.refs[block]
            self.free.append(block)

    @invariant()
    def agree(self):
        assert self.pool.num_free == len(self.free)
        assert all(self.pool.references(b) == n for b, n in self.refs.items())
        assert self.pool.num_free + len(self.refs) == 8


TestPool = PoolMachine.TestCase
