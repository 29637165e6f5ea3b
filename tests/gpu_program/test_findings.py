"""Check what findings say of programs for GPUs: of faults that users write, and nothing
where there is none.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.tools.program import TARGETS, target_devices

pytestmark = [pytest.mark.many_devices, pytest.mark.optax_promotion]

F32, BF16, F8 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
everywhere = lambda w: jax.sharding.reshard(w, P())
constrained = lambda w: jax.lax.with_sharding_constraint(w, P())


def on(devices, shape, dtype=F32, spec=None, kind=AxisType.Explicit):
    mesh = Mesh(np.array(devices), ("data",), axis_types=(kind,))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or P()))


def found(step, *args, target="h200", donate=0):
    """Return the beginnings of the findings of a program."""
    return [
        finding.what
        for finding in mpx.step_report(
            step, *args, target=target, donate_argnums=donate
        ).findings
    ]


def descent(loss):
    return lambda w, x: jax.tree.map(
        lambda p, g: (p - 0.1 * g).astype(p.dtype), w, jax.grad(loss)(w, x)
    )


def two_layers(gathered):
    """Return a loss of two layers in bfloat16, cast by hand, whose weights `gathered`
    makes whole.
    """

    def loss(w, x):
        for weight in w:
            x = jnp.tanh(x.astype(BF16) @ gathered(weight)).astype(F32)
        return jnp.mean(x)

    return loss


def sharded(devices):
    weights = [
        on(devices, shape, spec=P("data")) for shape in ((2048, 8192), (8192, 2048))
    ]
    return weights, on(devices, (4096, 2048), spec=P("data"))


def used_in_float32_too(w, x):
    hidden = x.astype(BF16) @ everywhere(w[0]).astype(BF16)
    return jnp.mean(hidden.astype(F32)) + jnp.sum(jnp.sin(everywhere(w[0])) ** 2)


SUMS = "Devices add up arrays of the shapes of weights in bf16"
PARTS = "Every device gets a whole sum and keeps a part of it"
KEPT = "Weights that were gathered for the forward pass are kept for the backward pass"


@pytest.mark.parametrize(
    ("loss", "beginnings"),
    [
        (
            two_layers(lambda w: everywhere(w).astype(BF16)),
            [
                SUMS,
                PARTS,
                KEPT,
                "Devices send float32 arrays that are rounded to bf16 right after",
            ],
        ),
        (two_layers(lambda w: everywhere(w.astype(BF16))), [SUMS, KEPT]),
        (
            used_in_float32_too,
            [SUMS, PARTS],
        ),
    ],
    ids=["cast after", "cast before", "used in float32 too"],
)
def test_weights_that_are_gathered(h200, loss, beginnings):
    """Plain JAX adds up the gradients of a bfloat16 weight in bfloat16."""
    findings = found(descent(loss), *sharded(h200))
    assert [
        what[: len(beginning)]
        for what, beginning in zip(findings, beginnings, strict=True)
    ] == beginnings


def kept_weights(devices, loss, kind):
    """Return the bytes of gathered weights that four layers of 2,048 x 2,048 keep
    between the passes.
    """
    w = [on(devices, (2048, 2048), spec=P("data"), kind=kind) for _ in range(4)]
    x = on(devices, (8 * 4096, 2048), spec=P("data"), kind=kind)
    findings = mpx.step_report(
        descent(loss), w, x, target="h200", donate_argnums=0
    ).findings
    return [finding.bytes for finding in findings if finding.what.startswith(KEPT)]


def in_float32(gathered, checkpoint=lambda layer: layer):
    layer = checkpoint(lambda x, w: jnp.tanh(x @ gathered(w)))
    return lambda w, x: jnp.mean(functools.reduce(layer, w, x))


def test_gathered_weights_are_kept_unless_the_remedy_gathers_them_again(h200):
    """The backward pass needs all but the first."""
    by_hand = two_layers(lambda w: w.astype(BF16))  # XLA gathers them by itself
    assert kept_weights(h200, by_hand, AxisType.Auto) == [3 * 2 * 2048**2]
    for gathered, kind in (
        (everywhere, AxisType.Explicit),
        (constrained, AxisType.Auto),
    ):
        assert kept_weights(h200, mpx.autocast(in_float32(gathered), "bf16"), kind) == [
            3 * 2 * 2048**2
        ]
        for policy in (None, jax.checkpoint_policies.dots_saveable):
            again = mpx.autocast(
                in_float32(gathered, functools.partial(jax.checkpoint, policy=policy)),
                "bf16",
            )
            assert kept_weights(h200, again, kind) == []


def scanned(w, x):
    layer = lambda x, w: (x + jnp.tanh(x @ everywhere(w[0])) @ everywhere(w[1]), None)
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_peak_that_does_not_fit_holds_the_residual_stream_and_gradients(h200, dtype):
    """16 layers of two matrices of 1,024 x 1,024. The norm of all gradients needs all
    of them at once.
    """

    def step(w, x):
        grads = mpx.grad(mpx.autocast(scanned, "bf16"), grad_dtype=dtype)(w, x)
        norm = jnp.sqrt(sum(jnp.sum(g.astype(F32) ** 2) for g in grads))
        return [
            (p - 0.1 * g / norm).astype(p.dtype) for p, g in zip(w, grads, strict=True)
        ]

    w, x = (
        [on(h200, (16, 1024, 1024), BF16, P(None, "data"))] * 2,
        on(h200, (8 * 512, 1024), spec=P("data")),
    )
    small = dataclasses.replace(TARGETS["h200"], memory_bytes=5 * 10**7)
    stream, *others = mpx.step_report(
        step, w, x, target=small, donate_argnums=0
    ).findings
    assert stream.what.endswith(
        " is above the 0.0375 GB that JAX takes of one H200. It holds 1 x"
        " f32[16,512,1024]"
    )
    assert stream.source.startswith("tests/gpu_program/test_findings.py:")
    assert "mpx.checkpoint" in stream.remedy
    name = {F32: "f32", BF16: "bf16"}[dtype]
    (gradients,) = (
        finding
        for finding in others
        if finding.what.endswith(f"2 x {name}[16,128,1024]")
    )
    assert gradients.bytes == 2 * 16 * 128 * 1024 * np.dtype(dtype).itemsize
    assert ("grad_dtype" in gradients.remedy) == (dtype == F32)


def closes_over_float32(w, x):
    return jnp.mean(
        (jnp.tanh(x @ w) @ np.ones((2048, 2048), np.float32)).astype(BF16) @ w
    )


def has_cotangents_in_float32(w, x):
    """The cotangent of a float32 result is float32, and so are both products of the
    backward pass.
    """
    return jnp.mean(jax.nn.gelu(jnp.dot(x, w, preferred_element_type=F32)) ** 2)


@pytest.mark.parametrize("loss", [closes_over_float32, has_cotangents_in_float32])
def test_products_in_float32_among_those_of_bfloat16(h200, loss):
    args = on(h200[:1], (2048, 2048), BF16), on(h200[:1], (4096, 2048), BF16)
    (product,) = found(descent(loss), *args)
    assert "of all FLOPs multiply float32 numbers" in product
    assert found(descent(mpx.autocast(loss, "bf16")), *args) == []


def test_products_that_a_gpu_has_not_are_counted_in_the_dtype_that_it_takes(h200):
    del h200  # skips where nothing compiles for GPUs
    product = lambda a, b: jnp.dot(a, b, preferred_element_type=F32)
    for target, dtype in {"a100": "f16", "h200": "f8e4m3fn"}.items():
        args = [on(target_devices(target, 1), (1024, 1024), F8)] * 2
        report = mpx.step_report(product, *args, target=target)
        assert report.flops == {dtype: 2 * 1024**3}
        assert report.findings == ()


def test_a_step_that_calls_python_is_refused_for_a_device_that_is_not_here(h200):
    def step(w):
        jax.debug.print("{}", w.sum())
        return w

    with pytest.raises(RuntimeError, match="calls Python while it runs"):
        found(step, on(h200[:1], (8, 8)))


@pytest.mark.parametrize(
    ("rule", "count"),
    [(optax.contrib.muon(1e-3), 1), (optax.adamw(1e-3), 0)],
    ids=["muon", "adamw"],
)
def test_products_of_a_rule_that_devices_send_are_found_and_none_of_the_loss(
    h200, rule, count
):
    params = {"up": on(h200, (1024, 4096), spec=P("data"), kind=AxisType.Auto)}
    x = on(h200, (1024, 1024), spec=P("data"), kind=AxisType.Auto)
    shapes = {"up": jax.ShapeDtypeStruct((1024, 4096), F32)}
    divided = lambda leaf: on(
        h200, leaf.shape, leaf.dtype, P("data") if leaf.ndim > 1 else P(), AxisType.Auto
    )
    state = jax.tree.map(divided, jax.eval_shape(rule.init, shapes))
    loss = lambda params, x: jnp.mean(jnp.tanh(x @ params["up"]))

    def step(params, state, x):
        updates, state = rule.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    beginnings = found(step, params, state, x, donate=(0, 1))
    assert (
        sum(
            what.startswith("A rule multiplies matrices that lie on several devices")
            for what in beginnings
        )
        == count
    )
