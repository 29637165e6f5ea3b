"""Walk over an optimizer state: its leaves, each with its role, for all code that looks
into states.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from mpx import _flax, _trees
from mpx._stored.roles import KEPT_OF_WEIGHTS, ROLES, Role, role_by_name, role_of_field
from mpx._stored.state_format import is_stored
from mpx._stored.weights import KeptWeight, storage_of

# Fields with these roles are found by the type of their state only, so a state that has
# lost its type is refused.
_TYPED_ROLES = {"master", "compensation", "loss scale"}


class StateLeaf(NamedTuple):
    """A leaf of a state, and what it is: an array or a `StoredLeaf` (or a node, on the
    way to the leaves).
    """

    leaf: Any
    path: _trees.Path = ()  # in the state
    role: Role = "unknown"
    field: str = ""  # of the innermost state that contains the leaf
    # below that field, if the field is a tree like the parameters
    path_of_parameter: _trees.Path = ()
    path_in_rule: tuple[
        str, ...
        # without declared wrappers and positions in chains: the same for equal rules
    ] = ()
    # the type of that innermost state, if `register_state` knows it
    owner: type | None = None
    wrapped: bool = False  # whether it stands somewhere in such a state

    @property
    def storage(self) -> KeptWeight:
        """How the state keeps a weight, if this is what it keeps of one."""
        return storage_of(self.role, self.leaf.dtype)


def leaves_of(state: Any) -> list[StateLeaf]:
    """Return all leaves of a state, in their order."""
    return list(_walk(StateLeaf(state)))


def weights_kept(leaves: Iterable[StateLeaf]) -> dict[_trees.Path, StateLeaf]:
    """Return what a state keeps of the parameters (masters, low bits, compensations),
    by their paths.
    """
    return {
        leaf.path_of_parameter: leaf for leaf in leaves if leaf.role in KEPT_OF_WEIGHTS
    }


def require_types(opt_state: Any, caller: str) -> None:
    """Raise for a transformation, and for a state whose NamedTuples a checkpoint gave
    back as dictionaries.
    """
    if callable(getattr(opt_state, "init", None)):
        raise TypeError(
            f"`{caller}` needs an optimizer state, but got a transformation; `init`"
            " makes its state."
        )
    kinds: list[Any] = [
        kind for kind, roles in ROLES.items() if _TYPED_ROLES & set(roles.values())
    ]

    def is_untyped(x):
        return isinstance(x, dict) and any(
            set(x) == set(kind._fields) for kind in kinds
        )

    # In a state that has its types, dictionaries are the user's, who may call a
    # parameter as a field is called.
    if any(
        map(
            is_untyped,
            jax.tree.leaves(opt_state, is_leaf=lambda x: is_untyped(x) or _is_typed(x)),
        )
    ):
        raise TypeError(
            f"`{caller}`: the optimizer state was restored without its types: what was"
            " a NamedTuple is a dictionary. Restore it into `jax.eval_shape(tx.init,"
            " params)`."
        )


def is_state(tree: Any) -> bool:
    """Return whether a tree holds the state of an optimizer: Optax's states are
    NamedTuples.
    """
    return any(_is_typed(part) for part in jax.tree.leaves(tree, is_leaf=_is_typed))


def _is_typed(node: Any) -> bool:
    return hasattr(node, "_fields") or (type(node) is tuple and not node)


def _walk(here: StateLeaf) -> Iterator[StateLeaf]:
    node = here.leaf
    # One level at a time: the node is opened, and its children and stored leaves are
    # not.
    for key, child in jax.tree.leaves_with_path(
        node, is_leaf=lambda x: x is not node or is_stored(x)
    ):
        if key:
            yield from _walk(_child(here, key, child))
        else:
            yield here


def _child(here: StateLeaf, key: _trees.Path, child: Any) -> StateLeaf:
    """Return what is known of a child of a node."""
    node, path, name = (
        here.leaf,
        here.path + key,
        jax.tree_util.keystr(key, simple=True),
    )
    if here.field:  # below a field, which decides the role
        in_rule = (
            here.path_in_rule
            if _flax.is_box(node)
            else (*here.path_in_rule, _named(node, name))
        )
        of_parameter = here.path_of_parameter + key
        return here._replace(
            leaf=child, path=path, path_of_parameter=of_parameter, path_in_rule=in_rule
        )
    owner = type(node) if type(node) in ROLES else None
    wrapped = here.wrapped or owner is not None
    if isinstance(key[0], jax.tree_util.GetAttrKey):
        role = role_of_field(type(node), name)
    elif (
        isinstance(node, Mapping) and _is_state(here.path) and not _holds_states(child)
    ):
        role = role_by_name("", name, "inner")
    else:
        role = "inner"
    if role == "inner":
        in_rule = (
            here.path_in_rule
            if owner or type(node) is tuple
            else (*here.path_in_rule, _named(node, name))
        )
        return here._replace(
            leaf=child, path=path, path_in_rule=in_rule, wrapped=wrapped
        )
    in_rule = (
        (_named(node, name),) if owner else (*here.path_in_rule, _named(node, name))
    )
    return StateLeaf(
        child, path, role, name, path_in_rule=in_rule, owner=owner, wrapped=wrapped
    )


def _is_state(path: _trees.Path) -> bool:
    """Return whether a dictionary here can be a state: it holds neither labels
    (`optax.partition`) nor parameters.

    The keys of a dictionary that is a field of a state are labels. Below other keys
    there are no states.
    """

    def is_field(key):
        return isinstance(key, jax.tree_util.GetAttrKey)

    pairs = zip((None, *path), path, strict=False)  # each key, and the one before it
    are_labels = [
        is_field(before)
        for before, key in pairs
        if isinstance(key, jax.tree_util.DictKey)
    ]
    return not (path and is_field(path[-1])) and all(are_labels)


def _holds_states(node: Any) -> bool:
    """Return whether a node has states in it, as an element of `optax.named_chain` has;
    its key is a label then.
    """

    def is_state(x):
        return hasattr(x, "_fields") and not _trees.is_masked(x)

    return any(is_state(x) for x in jax.tree.leaves(node, is_leaf=is_state))


def _named(node: Any, name: str) -> str:
    return f"{type(node).__name__}.{name}" if hasattr(node, "_fields") else name
