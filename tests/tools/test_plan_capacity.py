"""The largest size that fits, against all sizes tried one by one."""

from hypothesis import example, given
from hypothesis import strategies as st

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
