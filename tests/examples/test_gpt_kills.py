"""A training that is killed often ends as if nobody had; `python -m tests.examples.kills` kills it more often."""

from tests.examples.kills import kill_again_and_again


def test_three_kills_change_no_bit(tmp_path):
    counts = kill_again_and_again(tmp_path, kills=3, steps=12, seed=1)
    assert counts["kills"] == 3
