"""Walk over an optimizer state: its leaves, each with its role, for all that looks into states."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from mpx import _trees
from mpx._stored.roles import KEPT_OF_WEIGHTS, Role, fields_of, registered_types, role_of_field, role_of_key
from mpx._stored.state_format import StateFormat, format_of, position_of

# A state with one of these roles that has lost its type is no state any more to what looks into it.
_TYPED_ROLES = {"master", "compensation", "average", "loss scale"}


class Coded(NamedTuple):
    """How a leaf is kept in a `StateFormat` that has scales."""

    format: StateFormat
    scales: Any
    scales_path: _trees.Path


class StateLeaf(NamedTuple):
    """A leaf of a state (or a node, on the way to its leaves), and what it is."""

    leaf: Any
    path: _trees.Path = ()  # in the state
    role: Role = "unknown"
    field: str = ""  # of the innermost state that contains the leaf
    below: _trees.Path = ()  # the path from that field on: that of a parameter, if the field is a tree like those
    place: tuple[str, ...] = ()  # the path without declared wrappers and positions in chains, the same for equal rules
    declared: bool = False  # whether that innermost state is one that `register_state` knows
    wrapped: bool = False  # whether it stands somewhere in such a state
    coded: Coded | None = None  # how it is kept in few bits; None if it is kept as it is


def leaves_of(state: Any) -> list[StateLeaf]:
    """Return all leaves of a state, in their order."""
    return list(_walk(StateLeaf(state), {}))


def weights_kept(leaves: Iterable[StateLeaf]) -> dict[_trees.Path, StateLeaf]:
    """Return what a state keeps of the parameters (masters, low bits, compensations), by their paths."""
    return {leaf.below: leaf for leaf in leaves if leaf.role in KEPT_OF_WEIGHTS}


def coded_leaves(state: Any) -> list[tuple[StateLeaf, Coded]]:
    """Return the leaves that are kept in a format with scales, and how."""
    return [(leaf, leaf.coded) for leaf in leaves_of(state) if leaf.coded]


def require_types(opt_state: Any, caller: str) -> None:
    """Raise for what is no state, and for a state whose NamedTuples a checkpoint gave back as dictionaries."""
    if callable(getattr(opt_state, "init", None)):
        raise TypeError(f"`{caller}` needs an optimizer state, but got a transformation; `init` makes its state.")
    kinds = [kind for kind in registered_types() if _TYPED_ROLES & set(fields_of(kind).roles.values())]  # type: ignore
    is_untyped = lambda x: isinstance(x, dict) and any(set(x) == set(kind._fields) for kind in kinds)
    # In a state that has its types, dictionaries are the user's, who may call a parameter as a field is called.
    is_known = lambda x: is_untyped(x) or hasattr(x, "_fields")
    if any(is_untyped(part) for part in jax.tree.leaves(opt_state, is_leaf=is_known)):
        raise TypeError(
            f"`{caller}`: the optimizer state was restored without its types: what was a NamedTuple is a dictionary. "
            "Restore it into `jax.eval_shape(tx.init, params)`."
        )


def _walk(here: StateLeaf, coded: dict[_trees.Path, Coded]) -> Iterator[StateLeaf]:
    node = here.leaf
    found = _coded(node, here.path)
    coded = coded | found if found else coded
    for key, child in jax.tree.leaves_with_path(node, is_leaf=lambda x: x is not node):
        if key:
            yield from _walk(_child(here, key, child), coded)
        else:
            yield here._replace(coded=coded.get(here.path))


def _child(here: StateLeaf, key: _trees.Path, child: Any) -> StateLeaf:
    """Return what is known of a child of a node."""
    node, path, name = here.leaf, here.path + key, jax.tree_util.keystr(key, simple=True)
    if here.field:  # this is below a field that was decided about
        place = here.place if type(node) is tuple else (*here.place, _named(node, name))
        return here._replace(leaf=child, path=path, below=here.below + key, place=place)
    declared = fields_of(type(node)) is not None
    wrapped = here.wrapped or declared
    if isinstance(key[0], jax.tree_util.GetAttrKey):
        role = role_of_field(type(node), name)
    elif isinstance(node, Mapping) and _is_state(here.path) and not _holds_states(child):
        role = role_of_key(name)
    else:
        role = "inner"
    if role == "inner":
        place = here.place if declared or type(node) is tuple else (*here.place, _named(node, name))
        return here._replace(leaf=child, path=path, place=place, wrapped=wrapped)
    place = (_named(node, name),) if declared else (*here.place, _named(node, name))
    return StateLeaf(child, path, role, name, place=place, declared=declared, wrapped=wrapped)


def _is_state(path: _trees.Path) -> bool:
    """Return whether a dictionary here can be a state: it holds neither labels (`optax.partition`) nor parameters.

    The keys of a dictionary that is a field of a state are labels. Below other keys there are no states.
    """
    is_field = [isinstance(key, jax.tree_util.GetAttrKey) for key in (None, *path)]
    is_key = [isinstance(key, jax.tree_util.DictKey) for key in path]
    return not is_field[-1] and all(labels for labels, below in zip(is_field[:-1], is_key, strict=True) if below)


def _holds_states(node: Any) -> bool:
    """Return whether a node has states in it, as an element of `optax.named_chain` has; its key is a label then."""
    is_state = lambda x: hasattr(x, "_fields") and not _trees.is_masked(x)
    return any(is_state(x) for x in jax.tree.leaves(node, is_leaf=is_state))


def _named(node: Any, name: str) -> str:
    return f"{type(node).__name__}.{name}" if hasattr(node, "_fields") else name


def _coded(node: Any, path: _trees.Path) -> dict[_trees.Path, Coded]:
    """Return the leaves of a state's inner state that are kept in formats, by their paths, as its scales name them."""
    fields = fields_of(type(node))
    if fields is None or "scales" not in fields.roles.values():
        return {}
    attribute, by_role = jax.tree_util.GetAttrKey, {role: field for field, role in fields.roles.items()}
    leaves = list(_trees.leaves_by_path(getattr(node, by_role["inner"])))
    return {
        (*path, attribute(by_role["inner"]), *leaves[position_of(name)]): Coded(
            format_of(name), scales, (*path, attribute(by_role["scales"]), jax.tree_util.DictKey(name))
        )
        for name, scales in getattr(node, by_role["scales"]).items()
    }
