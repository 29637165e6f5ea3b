"""Every rule of Optax under every way to keep its state: types, one compilation, finite numbers, a loss that falls.

All 700 combinations are traced. Compiled and trained is one for each rule, a low format and a way to keep parameters in
turn, and of AdamW each low format. `benchmarks/state_formats.py` trains them all and writes the table.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import sweep
from tests.helpers import QUICKLY, types_of
from tests.rules import RULES

pytestmark = pytest.mark.optax_promotion

LOW = [state for state in sweep.STATES if state != "f32"]
TABLE = Path(__file__).parents[1] / "benchmarks" / "STATE_FORMATS.md"
AVERAGING = [name for name in RULES if sweep.moment_fields(name)]


@pytest.mark.parametrize("name", RULES)
def test_an_update_changes_no_type_of_any_stored_state(name):
    """Structure, shapes, dtypes and weak types, for all ways to keep parameters and state."""
    rule = RULES[name]
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), sweep.initial_params(0))
    batch = jax.tree.map(lambda a: jnp.asarray(a[0]), sweep.examples())
    for write_back in sweep.WRITE_BACKS:
        for state in sweep.STATES:
            tx = sweep.Case(name, write_back, state).transformation()
            if tx is None:
                continue
            start = jax.eval_shape(lambda tx=tx: (params, tx.init(params)))
            step = sweep.make_step(rule, tx)
            after = jax.eval_shape(lambda carry, step=step: step(carry, batch)[0], start)
            assert types_of(after) == types_of(start), (write_back, state)


IN_TURN = [(name, LOW[i % len(LOW)]) for i, name in enumerate(AVERAGING)]


@pytest.mark.parametrize(("name", "state"), [*dict.fromkeys([*IN_TURN, *[("adamw", state) for state in LOW]])])
def test_a_rule_trains_with_its_averages_in_few_bits(name, state):
    """In one program, whose steps compile once: the scan would refuse a state that changes type."""
    write_backs = list(sweep.WRITE_BACKS)
    turn = (AVERAGING.index(name) + LOW.index(state)) % len(write_backs)
    tx = sweep.Case(name, write_backs[turn], state).transformation()
    before, after, final_state = sweep.train(name, tx, jnp.bfloat16, compiler_options=QUICKLY)
    assert after < before
    leaves = [x for x in jax.tree.leaves(final_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in leaves)
    narrow = np.dtype(np.uint8) if state == "8-bit" else np.dtype(jnp.bfloat16)
    assert any(
        x.dtype == narrow for x in jax.tree.leaves(final_state[0] if "Kahan" in write_backs[turn] else final_state)
    )


def test_the_table_in_the_docs_has_every_rule_and_combination():
    sections = re.split(r"^## ", TABLE.read_text(), flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections] == list(sweep.STATES)
    for section in sections:
        state = section.splitlines()[0]
        rows = {
            line.split("|")[1].strip(): line.split("|")[5:9] for line in section.splitlines() if line.startswith("| ")
        }
        header = rows.pop("rule")
        assert [cell.strip() for cell in header] == list(sweep.WRITE_BACKS)
        assert list(rows) == (list(RULES) if state == "f32" else AVERAGING)
        assert all(
            re.fullmatch(r" (\*\*)?([+-]\d+\.\d\d|nan|inf)(\*\*)? ", cell) for row in rows.values() for cell in row
        )
