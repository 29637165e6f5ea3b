"""Scientific models: spectra, complex numbers, differential equations, implicit layers,
linear algebra, forces.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import complexes, positive, program, rows

D = 16
X = {"x": rows(D)}
XY = {"x": rows(D), "y": rows(D)}
FIELD = {"a": (D, D), "b": (D,), "c": (D, D)}


def field(p, x):
    return jnp.tanh(x @ p["a"] + p["b"]) @ p["c"]


@program(
    {
        "lift": (2, D),
        "modes": complexes(3, D, D),
        "skip": (D, D),
        "b": (D,),
        "down": (D, 1),
    },
    u=rows(8, 2),
)
def fourier_neural_operator(p, u):
    h = u @ p["lift"]
    spectrum = jnp.fft.rfft(h, axis=1)
    low = jnp.einsum("bkd,kde->bke", spectrum[:, :3], p["modes"])
    spectral = jnp.fft.irfft(jnp.zeros_like(spectrum).at[:, :3].set(low), n=8, axis=1)
    return jnp.square(
        jax.nn.gelu(spectral + h @ p["skip"] + p["b"]) @ p["down"] - u[..., :1]
    ).mean()


@program({"w": complexes(D, D), "v": complexes(D, D), "out": (D, D)}, **X)
def complex_layers(p, x):
    h = x @ p["w"] + 1j * x
    h = h / (1e-3 + jnp.abs(h)) * jax.nn.relu(jnp.abs(h) - 0.1)
    out = jnp.abs(jnp.fft.fft(h @ p["v"])) / 4
    return jnp.square(jnp.log1p(out) @ p["out"]).mean() + jnp.angle(h + 2).mean()


@program(FIELD, **XY)
def runge_kutta_steps(p, x, y):
    def step(x, dt):
        k1 = field(p, x)
        k2 = field(p, x + dt / 2 * k1)
        k3 = field(p, x + dt / 2 * k2)
        return x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + field(p, x + dt * k3)), None

    return jnp.square(lax.scan(step, x, jnp.full(3, 0.2))[0] - y).mean()


@jax.custom_vjp
def solved(p, x):
    return lax.fori_loop(0, 4, lambda i, x: x + 0.2 * field(p, x), x)


def solved_forward(p, x):
    out = solved(p, x)
    return out, (p, out)


def solved_backward(residuals, cotangent):
    def back(i, carry):
        x, adjoint, gradient = carry
        move, pull = jax.vjp(field, p, x)
        of_p, of_x = pull(adjoint)
        return (
            x - 0.2 * move,
            adjoint + 0.2 * of_x,
            jax.tree.map(lambda g, d: g + 0.2 * d, gradient, of_p),
        )

    p, x = residuals
    _, adjoint, gradient = lax.fori_loop(
        0, 4, back, (x, cotangent, jax.tree.map(jnp.zeros_like, p))
    )
    return gradient, adjoint


solved.defvjp(solved_forward, solved_backward)


@program({"field": FIELD, "in": (D, D), "out": (D, D)}, **XY)
def differential_equation_with_an_adjoint(p, x, y):
    return jnp.square(solved(p["field"], x @ p["in"]) @ p["out"] - y).mean()


@program(FIELD, **XY)
def all_products_in_a_custom_derivative(p, x, y):
    return jnp.square(solved(p, x) - y).mean()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(f, p, x):
    return lax.while_loop(
        lambda c: c[1] < 20, lambda c: (f(p, x, c[0]), c[1] + 1), (jnp.zeros_like(x), 0)
    )[0]


def fixed_point_forward(f, p, x):
    z = fixed_point(f, p, x)
    return z, (p, x, z)


def fixed_point_backward(f, residuals, cotangent):
    p, x, z = residuals
    pull_z = jax.vjp(lambda z: f(p, x, z), z)[1]
    u = lax.fori_loop(0, 20, lambda i, u: cotangent + pull_z(u)[0], cotangent)
    return jax.vjp(lambda p, x: f(p, x, z), p, x)[1](u)


fixed_point.defvjp(fixed_point_forward, fixed_point_backward)


@program({"w": (D, D), "u": (D, D), "b": (D,), "out": (D, D)}, **XY)
def deep_equilibrium(p, x, y):
    z = fixed_point(
        lambda p, x, z: jnp.tanh(0.4 * z @ p["w"] + x @ p["u"] + p["b"]), p, x
    )
    return jnp.square(z @ p["out"] - y).mean()


@program({"w": (D, D), "b": (D,), "out": (D, D)}, **XY)
def root_of_an_equation(p, x, y):
    f = lambda z: z - 0.3 * jnp.tanh(z @ p["w"] + p["b"]) - x
    solve = lambda f, z: lax.fori_loop(0, 15, lambda i, z: z - f(z), z)
    tangent_solve = lambda g, y: lax.fori_loop(0, 15, lambda i, z: z - g(z) + y, y)
    return jnp.square(lax.custom_root(f, x, solve, tangent_solve) @ p["out"] - y).mean()


@program({"w": (D, D), "b": (D,), "log_noise": ()}, x=rows(D), y=rows())
def marginal_likelihood_of_a_gaussian_process(p, x, y):
    h = jnp.tanh(x @ p["w"] + p["b"])
    square = jnp.sum((h[:, None] - h[None]) ** 2, -1)
    kernel = jnp.exp(-0.1 * square) + (jnp.exp(p["log_noise"]) + 0.1) * jnp.eye(
        x.shape[0]
    )
    factor = jnp.linalg.cholesky(kernel)
    white = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    return (0.5 * white @ white + jnp.log(jnp.diag(factor)).sum()) / x.shape[0]


@program(
    {"embed": (1, D), **FIELD, "v": (D,)},
    place=rows(5, 3),
    energy=rows(),
    force=rows(5, 3),
)
def energies_with_forces(p, place, energy, force):
    def potential(place):
        gap = place[:, None] - place[None] + jnp.eye(5)[..., None]
        length = jnp.sqrt(jnp.sum(gap**2, -1))[..., None]
        return (
            jnp.sum(
                jax.nn.silu(field(p, jnp.sin(length @ p["embed"])))
                @ p["v"]
                * (1 - jnp.eye(5))
            )
            / 10
        )

    predicted, slope = jax.vmap(jax.value_and_grad(potential))(place)
    return jnp.square(predicted - energy).mean() + jnp.square(slope + force).mean()


@program({"embed": (2, D), **FIELD, "v": (D, 1)}, t=positive(), x=positive())
def physics_informed_residual(p, t, x):
    u = lambda t, x: jnp.sum(field(p, jnp.sin(jnp.stack([t, x]) @ p["embed"])) @ p["v"])
    residual = lambda t, x: (
        jax.grad(u)(t, x) - 0.1 * jax.grad(jax.grad(u, 1), 1)(t, x) + u(t, x)
    )
    return (
        jnp.square(jax.vmap(residual)(t, x)).mean()
        + jnp.square(jax.vmap(u)(jnp.zeros_like(x), x) - x).mean()
    )


@program({"a": (8, D), "b": (D,), "c": (D, D), "v": (D,)}, q=rows(4), momentum=rows(4))
def hamiltonian_steps(p, q, momentum):
    energy = lambda s: (
        jnp.sum(jax.nn.softplus(field(p, s)) @ p["v"]) + 0.5 * jnp.sum(s**2)
    )

    def leap(state, _):
        of_q, of_p = jnp.split(jax.grad(energy)(state), 2, axis=-1)
        return state + 0.1 * jnp.concatenate([of_p, -of_q], -1), None

    state, _ = lax.scan(leap, jnp.concatenate([q, momentum], -1), length=3)
    return jnp.square(state[:, :4] - jnp.roll(q, 1, 1)).mean()


@program({"w": (D, D), "b": (D,), "v": (D, 4, 4)}, **X)
def eigenvalues_of_a_predicted_matrix(p, x):
    m = jnp.einsum("bd,dij->bij", jnp.tanh(x @ p["w"] + p["b"]), p["v"]) + jnp.diag(
        jnp.arange(4.0) * 3
    )
    values, vectors = jnp.linalg.eigh(m + m.swapaxes(1, 2))
    return (
        jnp.square(values - jnp.arange(4.0)).mean()
        + jnp.square(vectors[..., 0]).max(-1).mean()
    )


@program({"a": (2, 4, 4), "w": (D, 4), "b": (4,), "out": (4, D)}, **XY)
def exponentials_and_orthogonal_factors(p, x, y):
    rotation = jax.scipy.linalg.expm(p["a"][0] - p["a"][0].T)
    q, r = jnp.linalg.qr(p["a"][1] + 2 * jnp.eye(4))
    h = jnp.tanh(x @ p["w"] + p["b"]) @ rotation @ q @ r
    return jnp.square(h @ p["out"] - y).mean()


@program({"w": (D, D), "b": (D,), "cost": (D, D)}, **XY)
def transport_by_sinkhorn(p, x, y):
    a, b = jnp.tanh(x @ p["w"] + p["b"]), y @ p["cost"]
    cost = jnp.square(a[:, None] - b[None]).mean(-1)

    def update(fg, _):
        f, g = fg
        f = -jax.nn.logsumexp(g[None] - cost, axis=1)
        return (f, -jax.nn.logsumexp(f[:, None] - cost, axis=0)), None

    (f, g), _ = lax.scan(
        update, (jnp.zeros(x.shape[0]), jnp.zeros(y.shape[0])), length=5
    )
    return jnp.sum(jnp.exp(f[:, None] + g[None] - cost) * cost) / x.shape[0]


@program({"one": (3, D), "b": (D,), "orbitals": (D, 4), "v": (D, D)}, place=rows(4, 3))
def wave_function_with_its_kinetic_energy(p, place):
    def log_psi(flat):
        h = jnp.tanh(flat.reshape(4, 3) @ p["one"] + p["b"])
        h = h + jnp.tanh(h.mean(0) @ p["v"])
        return (
            jnp.linalg.slogdet(h @ p["orbitals"] + 2 * jnp.eye(4))[1]
            - 0.1 * flat @ flat
        )

    def kinetic(flat):
        slope, along = jax.linearize(jax.grad(log_psi), flat)
        return -0.5 * (jnp.trace(jax.vmap(along)(jnp.eye(12))) + slope @ slope)

    return jnp.tanh(jax.vmap(kinetic)(place.reshape(-1, 12))).mean()


@program({"w": (D, D), "b": (D,), "v": complexes(D, D), "out": (D, D)}, **XY)
def real_rows_times_a_complex_matrix(p, x, y):
    """A product of float32 with complex numbers, and a norm of the result."""
    h = lax.dot(
        jnp.tanh(x @ p["w"] + p["b"]), p["v"], preferred_element_type=jnp.complex64
    )
    size = jnp.einsum("bd,bd->b", h, h.conj()).real
    return jnp.square(h.real @ p["out"] - y).mean() + jnp.sqrt(size + 1e-3).mean() / D
