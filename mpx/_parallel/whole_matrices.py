"""`whole_matrices`: give each device whole matrices of what a rule multiplies, such as Muon's momentum."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.shard_alike import shard_alike
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from mpx import _errors, _trees
from mpx._autocast.transform import autocast
from mpx._chain import element
from mpx._jaxprs import closed_jaxpr, flatten, is_literal, part_of, run_equations
from mpx._primitives import facts_of
from mpx._shardings import explicit_sharding, in_auto
from mpx._stored.blocks import returns_its_operand


@element
def whole_matrices(inner, *, products=None, sent=None, axis=None):
    inner = _errors.as_transformation(inner, "whole_matrices")
    sent = _errors.floating_dtype(sent, "`whole_matrices`: `sent`")

    def update_fn(updates, state, params=None, **extra_args):
        given = (updates, state, params, extra_args)
        mesh = _mesh(given)
        arrays, put = _trees.partition_leaves(given, _trees.is_array)

        def update(arrays):
            updates, state, params, extra_args = put(arrays)
            return _updated(inner, updates, state, params, extra_args, products, sent, axis)

        if mesh is None:
            return update(arrays)
        everywhere = NamedSharding(mesh, PartitionSpec())
        shardings = jax.tree.map(lambda x: explicit_sharding(x) or everywhere, (updates, state))
        return in_auto(update, mesh, shardings)(arrays)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _mesh(tree):
    return next((s.mesh for s in map(explicit_sharding, jax.tree.leaves(tree)) if s is not None), None)


def _updated(inner, updates, state, params, extra_args, products, sent, axis):
    rule = lambda updates, state, params: inner.update(updates, state, params, **extra_args)
    program, values, tree = _traced(rule, updates, state, params)
    parts = _parts(program)
    if parts:
        grads = jax.tree.leaves(updates)
        of_part = [_leaf_of(part, program, len(grads)) for part in parts]
        shapes = [x.shape for x in grads]
        lead = {}
        for part, i in zip(parts, of_part):
            count = part.products[0][0]
            k = next((k for k in range(len(shapes[i])) if math.prod(shapes[i][:k]) == count), None)
            assert k is not None
            lead[i] = k
        one = lambda i, x: jax.ShapeDtypeStruct((1,) * lead.get(i, 0) + x.shape[lead.get(i, 0) :], x.dtype)
        one_of = lambda t: jax.tree.unflatten(jax.tree.structure(t), [one(i, x) for i, x in enumerate(jax.tree.leaves(t))])
        grads1 = one_of(updates)
        params1 = None if params is None else one_of(params)
        state1 = jax.eval_shape(inner.init, grads1 if params is None else params1)
        program1, _, _ = _traced(rule, grads1, state1, params1)
        parts1 = _parts(program1)
        leaf_values = {id(part): grads[i] for part, i in zip(parts, of_part)}
        _run(program, values, parts, program1, parts1, products, sent, axis, leaf_values)
    else:
        run_equations(program, list(program.eqns), values)
    return jax.tree.unflatten(tree, [v.val if is_literal(v) else values[v] for v in program.outvars])


def _traced(rule, *given):
    jaxpr, results = jax.make_jaxpr(rule, return_shape=True)(*given)
    program, constants = flatten(jaxpr, returns_its_operand)
    values = constants | dict(zip(program.invars, jax.tree.leaves(given), strict=True))
    return program, values, jax.tree.structure(results)


class _Part(NamedTuple):
    eqns: list
    inputs: list
    outputs: list
    products: list  # (number of matrices, shapes of one) of each
    small: int

    def is_large(self, v):
        return v.aval.size >= self.small


def _products(eqns):
    """Return how many matrices each product of two matrices has, and the shapes of one of them."""
    found = []
    for eqn in eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, batch) = eqn.params["dimension_numbers"]
            shapes = [v.aval.shape for v in eqn.invars]
            count = math.prod(shapes[0][i] for i in batch[0])
            rest = [tuple(n for i, n in enumerate(s) if i not in b) for s, b in zip(shapes, batch)]
            if all(math.prod(r) > math.prod(s[i] for i in c) for r, s, c in zip(rest, shapes, contracted)):
                found.append((count, tuple(rest)))
        elif eqn.primitive.name in _FACTORS:
            s = eqn.invars[0].aval.shape
            found.append((math.prod(s[:-2]), (s[-2:],)))
        else:
            for inner in jex_core.jaxprs_in_params(eqn.params):
                found += _products(getattr(inner, "jaxpr", inner).eqns)
    return found


_FACTORS = ("svd", "eigh", "qr", "cholesky", "lu", "triangular_solve", "geqrf", "eig", "schur")


def _parts(program):
    eqns = program.eqns
    made = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    uses = defaultdict(set)
    for i, eqn in enumerate(eqns):
        for v in eqn.invars:
            if not is_literal(v):
                uses[v].add(i)
    for v in program.outvars:
        if not is_literal(v):
            uses[v].add(len(eqns))
    sources = lambda i: {made[v] for v in eqns[i].invars if not is_literal(v) and v in made}
    seeds = {i for i, eqn in enumerate(eqns) if _products([eqn])}
    below, above = set(seeds), set(seeds)
    for i in range(len(eqns)):
        if sources(i) & below:
            below.add(i)
    for i in reversed(range(len(eqns))):
        if i in above:
            above |= sources(i)
    core = below & above
    group = {}
    for i in sorted(core):
        own = {i}
        for j in sources(i) & core:
            own |= group[j]
        for j in own:
            group[j] = own
    groups = {min(g): g for g in group.values()}
    return [_grown(program, g, made, uses, below) for _, g in sorted(groups.items())]


def _grown(program, group, made, uses, below):
    eqns = program.eqns
    products = _products([eqns[i] for i in sorted(group)])
    small = min(count * math.prod(s) for count, shapes in products for s in shapes)

    def inputs(inside):
        own = {v for i in inside for v in eqns[i].outvars}
        return list(dict.fromkeys(v for i in sorted(inside) for v in eqns[i].invars if not is_literal(v) and v not in own))

    def outputs(inside):
        return [v for i in sorted(inside) for v in eqns[i].outvars if uses[v] - inside]

    large = lambda vs: [v for v in vs if v.aval.size >= small]
    best = inside = set(group)
    fewest = len(large(inputs(inside)))
    while True:
        found = {made[v] for v in inputs(inside) if v in made}
        found = [i for i in found if all(uses[v] <= inside for v in eqns[i].outvars)]
        if not found:
            break
        inside = inside | {max(found)}
        if (n := len(large(inputs(inside)))) <= fewest:
            best, fewest = inside, n
    inside = best
    fewest = len(large(outputs(inside)))
    while True:
        own = {v for i in inside for v in eqns[i].outvars}
        known = own | {*inputs(inside)}
        found = {i for v in own for i in uses[v] - inside if i < len(eqns)}

        def fits(i):
            outside = [v for v in eqns[i].invars if not is_literal(v) and v not in known]
            return not large(outside) and not any(made.get(v) in below for v in outside)

        found = [i for i in found if fits(i)]
        if not found:
            break
        inside = inside | {min(found)}
        if (n := len(large(outputs(inside)))) <= fewest:
            best, fewest = inside, n
    return _Part([eqns[i] for i in sorted(best)], inputs(best), outputs(best), products, small)


def _leaf_of(part, program, count):
    """Return the number of the gradient's leaf that a part multiplies."""
    made = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    number = {v: i for i, v in enumerate(program.invars[:count])}
    waiting, seen, found = [v for v in part.inputs if part.is_large(v)], set(), set()
    while waiting:
        v = waiting.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in number:
            found.add(number[v])
        elif v in made:
            waiting += [w for w in made[v].invars if not is_literal(w) and part.is_large(w)]
    (i,) = found
    return i


def _run(program, values, parts, program1, parts1, products, sent, axis, leaf_values):
    inside = {id(eqn) for part in parts for eqn in part.eqns}
    late = {v for part in parts for v in part.outputs}
    before, after = [], []
    for eqn in program.eqns:
        if id(eqn) in inside:
            continue
        if any(not is_literal(v) and v in late for v in eqn.invars):
            late |= {*eqn.outvars}
            after.append(eqn)
        else:
            before.append(eqn)
    run_equations(program, before, values)
    alike = defaultdict(list)
    for part, part1 in zip(parts, parts1, strict=True):
        is_mapped = tuple(part.is_large(v) or v.aval.shape != w.aval.shape for v, w in zip(part.inputs, part1.inputs, strict=True))
        shared = tuple(v for v, m in zip(part.inputs, is_mapped) if not m)
        jaxpr = part_of(program1, part1.eqns, part1.outputs)
        assert jaxpr.invars == part1.inputs
        alike[str(jaxpr), is_mapped, shared].append((part, jaxpr))
    for (_, is_mapped, shared), members in alike.items():
        jaxpr = members[0][1]
        fun = jex_core.jaxpr_as_fun(closed_jaxpr(jaxpr))
        order = sorted(range(len(is_mapped)), key=lambda i: not is_mapped[i])
        nshared = [values[v] for v in shared]
        n = sum(is_mapped)

        def one(xs, fun=fun, order=order, nshared=nshared):
            args = dict(zip(order, [*xs, *nshared], strict=True))
            f = lambda *a: fun(*a)
            if products is not None:
                f = autocast(f, products)
            return f(*[args[i] for i in range(len(args))])

        units = [jaxpr.invars[i].aval.shape for i in order[:n]]
        stacks = []
        for part, _ in members:
            count = part.products[0][0]
            alike_g = lambda x, g=leaf_values[id(part)]: shard_alike(g, x)[1] if x.shape == g.shape else x
            cast = lambda x: alike_g(x if sent is None else alike_g(x).astype(sent))
            stacks.append([cast(values[part.inputs[i]]).reshape(count, *u) for i, u in zip(order, units)])
        results = _on_devices(one, stacks, sent, axis)
        for (part, _), ys in zip(members, results, strict=True):
            for v, y in zip(part.outputs, ys, strict=True):
                g = leaf_values[id(part)]
                y = y.reshape(v.aval.shape)
                values[v] = (shard_alike(g, y)[1] if y.shape == g.shape else y).astype(v.aval.dtype)
    run_equations(program, after, values)


def _on_devices(one, stacks, sent, axis):
    mesh = jax.sharding.get_abstract_mesh()
    names = mesh.axis_names if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    devices = math.prod(mesh.shape[name] for name in names)

    def put(x):
        if devices == 1:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(names)))

    def of_round(xs):
        ys = jax.vmap(one)([x.astype(jnp.float32) for x in xs])
        return [y if sent is None else y.astype(sent) for y in ys]

    def rounds(xs):
        """From [rounds * devices, ...]."""
        xs = [put(x.reshape(devices, -1, *x.shape[1:])) for x in xs]
        ys = lax.map(of_round, [jnp.moveaxis(x, 1, 0) for x in xs])
        return [put(jnp.moveaxis(y, 0, 1)).reshape(-1, *y.shape[2:]) for y in ys]

    cast = lambda xs: xs if sent is None else [x.astype(sent) for x in xs]
    full = [len(xs[0]) // devices * devices for xs in stacks]
    results = [rounds([x[:n] for x in xs]) if n else None for n, xs in zip(full, stacks)]
    rest = [len(xs[0]) - n for n, xs in zip(full, stacks)]
    if sum(rest):
        xs = [jnp.concatenate([s[i][n:] for n, s in zip(full, stacks)]) for i in range(len(stacks[0]))]
        pad = -len(xs[0]) % devices
        xs = [jnp.concatenate([x, jnp.zeros((pad, *x.shape[1:]), x.dtype)]) for x in xs]
        ys = rounds(xs)
        start = 0
        for j, n in enumerate(rest):
            got = [y[start : start + n] for y in ys]
            start += n
            if n:
                results[j] = got if results[j] is None else [jnp.concatenate(p) for p in zip(results[j], got)]
    return results
