"""Programs of jax in the form that public repositories give them, in small: all hand over what their next steps need.

Each is named after the repository, or the kind of program, whose loop it has.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import holdfast as hf

from .hidden_case import Run, program
from .hidden_jax import descend, error_of, new_params, train
from .hidden_programs import EPOCH, EXAMPLES, FEATURES, SIZE, Batches, examples

DATA = jnp.asarray(examples().numpy())


class MLP(linen.Module):
    """Two layers, with dropout where a key is given and statistics of batches where they are mutable."""

    normalises: bool = False

    @linen.compact
    def __call__(self, x: Any, *, train: bool = True) -> Any:
        x = linen.Dense(8)(x)
        if self.normalises:
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = linen.Dropout(0.2, deterministic=not train)(linen.relu(x))
        return linen.Dense(1)(x)[:, 0]


def new_state(tx: Any, kind: Any = TrainState, *, normalises: bool = False, **more: Any) -> Any:
    """Return a train state with the parameters of an MLP, and its statistics if it has some."""
    model = MLP(normalises)
    variables = model.init(jax.random.key(0), DATA[:SIZE], train=False)
    if normalises:
        more["batch_stats"] = variables["batch_stats"]
    return kind.create(apply_fn=model.apply, params=variables["params"], tx=tx, **more)


def mean_error(state: Any, params: Any, x: Any, key: Any) -> Any:
    return jnp.square(state.apply_fn({"params": params}, x, rngs={"dropout": key}) - x.sum(1)).mean()


class StatisticsState(TrainState):
    batch_stats: Any = None
    dynamic_scale: Any = None


@program("flax examples: imagenet, statistics of batches, a dynamic scale, a cosine")
def _imagenet(run: Run) -> None:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, run.total)
    scale = DynamicScale(growth_interval=4)
    state = new_state(optax.sgd(schedule, 0.9, nesterov=True), StatisticsState, normalises=True, dynamic_scale=scale)

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            rngs = {"dropout": jax.random.fold_in(jax.random.key(3), state.step)}
            found, changed = state.apply_fn(variables, x, mutable=["batch_stats"], rngs=rngs)
            decay = sum(jnp.square(one).sum() for one in jax.tree.leaves(params) if one.ndim > 1)
            return jnp.square(found - x.sum(1)).mean() + 1e-4 * decay, changed["batch_stats"]

        dynamic, finite, (loss, statistics), gradients = state.dynamic_scale.value_and_grad(loss_of, has_aux=True)(
            state.params
        )
        after = state.apply_gradients(grads=gradients)
        kept = jax.tree.map(partial(jnp.where, finite), after.params, state.params)
        return after.replace(params=kept, batch_stats=statistics, dynamic_scale=dynamic), loss

    loader = hf.resumable([DATA[start : start + SIZE] for start in range(0, EXAMPLES, SIZE)])
    with run.callback() as checkpoint:
        state, done = checkpoint.restore_or_initialize(state, data=loader)
        while done < run.total:
            for batch in loader:
                state, loss = step(state, batch)
                done += 1
                if run.report(checkpoint, done, state, loss, data=loader, batch=batch):
                    return


@program("cyreal: the loader's state is a pytree, and a step is compiled with it")
def _cyreal(run: Run) -> None:
    class LoaderState(NamedTuple):
        key: Any
        order: Any
        at: Any

    @jax.jit
    def step(state: Any) -> Any:
        loader = state["loader"]
        key, now = jax.random.split(loader.key)
        fresh = LoaderState(key, jax.random.permutation(now, EXAMPLES), jnp.zeros((), jnp.int32))
        loader = jax.tree.map(partial(jnp.where, loader.at == EPOCH), fresh, loader)
        x = DATA[jax.lax.dynamic_slice(loader.order, (loader.at * SIZE,), (SIZE,))]
        params, loss = descend(state["params"], lambda params: error_of(params, x))
        return {"params": params, "loader": loader._replace(at=loader.at + 1)}, loss

    loader = LoaderState(jax.random.key(2), jnp.arange(EXAMPLES), jnp.zeros((), jnp.int32))
    train(run, {"params": new_params(), "loader": loader}, step)


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(FEATURES, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))[:, 0]


@program("flax nnx: mnist, metrics and an optimizer that are modules")
def _nnx(run: Run) -> None:
    model = Noisy(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.adamw(0.01, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    @nnx.jit
    def step(model: Any, optimizer: Any, metrics: Any, x: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda model: jnp.square(model(x) - x.sum(1)).mean())(model)
        metrics.update(loss=loss)
        optimizer.update(model, gradients)
        return loss

    batches = Batches()
    parts = {"model": model, "optimizer": optimizer, "metrics": metrics}

    def update(state: Any) -> Any:
        loss = step(state["model"], state["optimizer"], state["metrics"], next(batches).numpy())
        return state, loss

    train(run, parts, update, data=batches)


@program("optax: lookahead, slow and fast weights in one tree")
def _lookahead(run: Run) -> None:
    tx, batches = optax.lookahead(optax.adam(0.05), sync_period=4, slow_step_size=0.5), Batches()

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(error_of)(params.fast, x)
        change, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, change), opt_state), loss

    params = optax.LookaheadParams.init_synced(new_params())
    train(run, (params, tx.init(params)), lambda state: step(state, next(batches).numpy()), data=batches)


class EmaState(TrainState):
    params_ema: Any = None


@program("diffusion with params_ema: times and noise from a key that is split")
def _diffusion(run: Run) -> None:
    state = new_state(optax.adam(0.01), EmaState)
    state = state.replace(params_ema=jax.tree.map(jnp.copy, state.params))

    @jax.jit
    def step(state: Any, x: Any, key: Any) -> Any:
        times, noise, dropout = jax.random.split(key, 3)
        t = jax.random.uniform(times, (len(x), 1))
        mixed = jnp.sqrt(1 - t) * x + jnp.sqrt(t) * jax.random.normal(noise, x.shape)
        loss, gradients = jax.value_and_grad(lambda params: mean_error(state, params, mixed, dropout))(state.params)
        after = state.apply_gradients(grads=gradients)
        return after.replace(params_ema=optax.incremental_update(after.params, state.params_ema, 0.1)), loss

    rng, batches = jax.random.PRNGKey(42), Batches()
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, data=batches, rng=rng)
        rng = checkpoint.extras["rng"]
        for number in range(start, run.total):
            rng, key = jax.random.split(rng)
            state, loss = step(state, next(batches).numpy(), key)
            if run.report(checkpoint, number + 1, state, loss, data=batches, rng=rng):
                break


@program("jaxnerf: rays drawn on the host, a rate that decays in logarithms")
def _rays(run: Run) -> None:
    rng = np.random.RandomState(20201473)
    schedule = optax.exponential_decay(0.05, 10, 0.1)
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=schedule)

    @jax.jit
    def step(params: Any, opt: Any, rays: Any) -> Any:
        loss, gradients = jax.value_and_grad(error_of)(params, rays)
        change, opt = tx.update(gradients, opt)
        return optax.apply_updates(params, change), opt, loss

    params = new_params()

    def update(state: Any) -> Any:
        image = np.asarray(DATA)[rng.randint(0, EXAMPLES, (1,))]
        rays = image + rng.uniform(-0.1, 0.1, (3, FEATURES)).astype(np.float32)
        params, opt, loss = step(state["params"], state["opt"], rays)
        return {"params": params, "opt": opt}, loss

    train(run, {"params": params, "opt": tx.init(params)}, update, rng=rng)


@program("evosax: an evolution strategy, its mean, its width and the best of all")
def _evolution(run: Run) -> None:
    @jax.jit
    def generation(state: Any) -> Any:
        key, draw = jax.random.split(state["key"])
        noise = jax.random.normal(draw, (8, FEATURES))
        members = state["mean"] + state["sigma"] * noise
        fitness = jnp.square(members @ DATA.T - DATA.sum(1)).mean(1)
        ranks = jnp.argsort(jnp.argsort(fitness)) / 7 - 0.5
        best = jnp.argmin(fitness)
        better = fitness[best] < state["best"]
        return {
            "mean": state["mean"] - 0.2 * state["sigma"] * (ranks @ noise) / 8,
            "sigma": jnp.maximum(0.99 * state["sigma"], 0.05),
            "best": jnp.minimum(fitness[best], state["best"]),
            "best_member": jnp.where(better, members[best], state["best_member"]),
            "key": key,
        }, fitness.mean()

    state = {"mean": jnp.zeros(FEATURES), "sigma": jnp.ones(()), "best": jnp.array(jnp.inf)}
    train(run, state | {"best_member": jnp.zeros(FEATURES), "key": jax.random.key(11)}, generation)


@program("dreamer: episodes in a deque, sequences from a generator, a carried belief")
def _dreamer(run: Run) -> None:
    generator, tx = np.random.default_rng(21), optax.chain(optax.clip(1.0), optax.adam(0.02))

    @jax.jit
    def step(state: Any, sequence: Any) -> Any:
        def loss_of(params: Any) -> Any:
            def one(belief: Any, x: Any) -> Any:
                belief = jnp.tanh(0.5 * belief + params["w"] * x)
                return belief, jnp.square(belief.sum() + params["b"] - x.sum())

            belief, losses = jax.lax.scan(one, state["belief"], sequence)
            return losses.mean(), belief

        (loss, belief), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        change, opt = tx.update(gradients, state["opt"])
        return {"params": optax.apply_updates(state["params"], change), "opt": opt, "belief": belief}, loss

    params = new_params()
    state = {"params": params, "opt": tx.init(params), "belief": jnp.zeros(FEATURES)}
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, episodes=[], generator=generator)
        episodes = deque(checkpoint.extras["episodes"], maxlen=4)
        for number in range(start, run.total):
            episodes.append(generator.normal(size=(6, FEATURES)).astype(np.float32))
            chosen = episodes[int(generator.integers(len(episodes)))]
            begin = int(generator.integers(3))
            state, loss = step(state, chosen[begin : begin + 3])
            if run.report(checkpoint, number + 1, state, loss, episodes=list(episodes), generator=generator):
                break


@program("numpy alone: a tabular agent, its counts and its generator")
def _tabular(run: Run) -> None:
    generator = np.random.Generator(np.random.Philox(3))
    state = {"q": np.zeros((5, 2)), "visits": np.zeros((5, 2), np.int64), "place": 0, "returns": []}

    def update(state: Any) -> Any:
        place, q = state["place"], state["q"]
        action = int(generator.integers(2)) if generator.random() < 0.3 else int(q[place].argmax())
        after = min(max(place + 2 * action - 1, 0), 4)
        state["visits"][place, action] += 1
        error = float(after == 4) + 0.9 * q[after].max() - q[place, action]
        q[place, action] += error / state["visits"][place, action]
        state["returns"].append(float(error))
        state["place"] = 0 if after == 4 else after
        return state, abs(error)

    train(run, state, update, generator=generator)
