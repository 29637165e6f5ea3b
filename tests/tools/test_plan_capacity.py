"""The largest size that fits, against all sizes tried one by one."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpx.tools.cli.programs import largest_batch
from mpx.tools.plan.capacity import largest_that_fits


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 150), st.integers(1, 60))
def test_it_is_the_largest_of_all_sizes_from_any_start(steps, memory, start):
    """Use bytes that rise at random, then steeply."""

    def bytes_of(size):
        assert size >= 1
        return sum(steps[:size]) + 200 * max(0, size - len(steps))

    expected = max((size for size in range(1, len(steps) + 2) if bytes_of(size) <= memory), default=0)
    assert largest_that_fits(bytes_of, memory, start=start) == expected


def test_few_sizes_are_tried():
    """41 doublings pass the answer, and 40 bisections find it."""
    tried = []
    assert largest_that_fits(lambda size: tried.append(size) or 18 * size, 18e12) == 10**12
    assert len(tried) <= 82


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from([0.0, 0.03, 0.5]))
@example(35, 1, 0.03)  # where a step too many would end at 34
def test_a_size_larger_by_the_resolution_does_not_fit(answer, start, resolution):
    found = largest_that_fits(lambda size: size, answer, start=start, resolution=resolution)
    assert found <= answer < found + max(1, int(found * resolution))


@pytest.mark.parametrize("batches", [[8], [1], [64, 128], [4096], [100_000]], ids=str)
def test_a_few_compilations_find_the_largest_batch(batches):
    """Temporaries are padded, so that peaks are not quite a line."""
    tried = set()
    peak = lambda batch: tried.add(batch) or 6 * 10**9 + 44 * 10**6 * (-(-batch // 16) * 16) + 10**7 * (batch % 7)
    found = largest_batch(peak, batches, 141 * 10**9)
    assert peak(found) <= 141 * 10**9 < peak(int(found * 1.03) + 1)
    assert len(tried) <= 12
