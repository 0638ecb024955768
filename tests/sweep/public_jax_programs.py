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
import optax.contrib  # type: ignore[import-untyped]
from flax import nnx, struct
from flax.core import FrozenDict, freeze
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


# ---- loops over epochs


@program("flax examples: mnist, an order of each epoch from a split key", is_exact=True)
def _mnist(run: Run) -> None:
    @jax.jit
    def step(state: Any, x: Any, key: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda params: mean_error(state, params, x, key))(state.params)
        return state.apply_gradients(grads=gradients), loss

    state, rng = new_state(optax.sgd(0.05, 0.9)), jax.random.key(1)
    with run.callback() as checkpoint:
        rng, key = jax.random.split(rng)
        order = np.asarray(jax.random.permutation(key, EXAMPLES))
        state, done = checkpoint.restore_or_initialize(state, rng=rng, order=order)
        rng, order = checkpoint.extras["rng"], checkpoint.extras["order"]
        while done < run.total:
            at = done % EPOCH
            if at == 0 and done:
                rng, key = jax.random.split(rng)
                order = np.asarray(jax.random.permutation(key, EXAMPLES))
            batch = DATA[order[at * SIZE : (at + 1) * SIZE]]
            state, loss = step(state, batch, jax.random.fold_in(rng, done))
            done += 1
            if run.report(checkpoint, done, state, loss, rng=rng, order=order, batch=batch):
                break


class StatisticsState(TrainState):
    batch_stats: Any = None
    dynamic_scale: Any = None


@program("flax examples: imagenet, statistics of batches, a dynamic scale, a cosine", is_exact=True)
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


class MetricsState(TrainState):
    rngs: Any = None
    metrics: Any = None


@struct.dataclass
class Average:
    total: Any
    count: Any

    @classmethod
    def empty(cls) -> Average:
        return cls(jnp.zeros(()), jnp.zeros((), jnp.int32))

    def merge(self, value: Any) -> Average:
        return Average(self.total + value, self.count + 1)


@program("a SimpleTrainState with keys and clu's metrics, emptied at each epoch", is_exact=True)
def _metrics_state(run: Run) -> None:
    state = new_state(optax.adamw(0.01), MetricsState, rngs=jax.random.key(5), metrics={"loss": Average.empty()})

    @jax.jit
    def update(state: Any, x: Any) -> Any:
        rngs, key = jax.random.split(state.rngs)
        loss, gradients = jax.value_and_grad(lambda params: mean_error(state, params, x, key))(state.params)
        metrics = {"loss": state.metrics["loss"].merge(loss)}
        return state.apply_gradients(grads=gradients, rngs=rngs, metrics=metrics), loss

    batches = Batches()

    def step(state: Any) -> Any:
        if int(state.step) % EPOCH == 0:
            state = state.replace(metrics={"loss": Average.empty()})
        return update(state, next(batches).numpy())

    train(run, state, step, data=batches)


@program("cyreal: the loader's state is a pytree, and a step is compiled with it", is_exact=True)
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


@program("numpyro: SVI, an epoch within a loop of lax", is_exact=True)
def _svi(run: Run) -> None:
    class SVIState(NamedTuple):
        optim_state: Any
        rng_key: Any

    tx = optax.adam(0.05)

    @jax.jit
    def epoch(svi: SVIState, order: Any) -> Any:
        def body(number: Any, carry: Any) -> Any:
            total, (params, moments), rng = carry
            rng, key = jax.random.split(rng)
            x = DATA[jax.lax.dynamic_slice(order, (number * SIZE,), (SIZE,))]

            def loss_of(params: Any) -> Any:
                z = params["mean"] + jnp.exp(params["log"]) * jax.random.normal(key, (FEATURES,))
                return jnp.square(x @ z - x.sum(1)).mean() - params["log"].sum() * 0.01

            loss, gradients = jax.value_and_grad(loss_of)(params)
            change, moments = tx.update(gradients, moments, params)
            return total + loss, (optax.apply_updates(params, change), moments), rng

        total, optim_state, rng = jax.lax.fori_loop(0, EPOCH, body, (jnp.zeros(()), svi.optim_state, svi.rng_key))
        return SVIState(optim_state, rng), total

    params = {"mean": jnp.zeros(FEATURES), "log": -jnp.ones(FEATURES)}
    generator = np.random.default_rng(4)
    state = SVIState((params, tx.init(params)), jax.random.key(1))
    train(run, state, lambda state: epoch(state, generator.permutation(EXAMPLES)), generator=generator)


# ---- models of other forms


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(FEATURES, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))[:, 0]


@program("flax nnx: mnist, metrics and an optimizer that are modules", is_exact=True)
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


@program("nnx: a target network, soft updates, an average of the weights", is_exact=True)
def _nnx_target(run: Run) -> None:
    online, target = Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0))
    optimizer = nnx.Optimizer(online, optax.sgd(0.05), wrt=nnx.Param)
    batches = Batches()

    @nnx.jit
    def step(online: Any, target: Any, optimizer: Any, x: Any) -> Any:
        aim = jax.lax.stop_gradient(target(x)) * 0.5 + x.sum(1) * 0.5
        loss, gradients = nnx.value_and_grad(lambda model: jnp.square(model(x) - aim).mean())(online)
        optimizer.update(online, gradients)
        soft = jax.tree.map(
            lambda one, other: 0.9 * one + 0.1 * other, nnx.state(target, nnx.Param), nnx.state(online, nnx.Param)
        )
        nnx.update(target, soft)
        return loss

    def update(state: Any) -> Any:
        return state, step(state["online"], state["target"], state["optimizer"], next(batches).numpy())

    train(run, {"online": online, "target": target, "optimizer": optimizer}, update, data=batches)


@struct.dataclass
class KeyedState:
    """As programs of equinox write it: everything that changes in one pytree."""

    step: Any
    model: Any
    opt_state: Any
    key: Any


@program("equinox's form: one pytree of step, model, optimizer and key", is_exact=True)
def _one_pytree(run: Run) -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.01))
    params = new_params()
    state = KeyedState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key(7))

    @jax.jit
    def update(state: Any) -> Any:
        key, batch, noise = jax.random.split(state.key, 3)
        x = DATA[jax.random.choice(batch, EXAMPLES, (SIZE,), replace=False)]
        x = x + 0.1 * jax.random.normal(noise, x.shape)
        loss, gradients = jax.value_and_grad(error_of)(state.model, x)
        change, opt_state = tx.update(gradients, state.opt_state, state.model)
        return KeyedState(state.step + 1, optax.apply_updates(state.model, change), opt_state, key), loss

    train(run, state, update)


@program("haiku's form: parameters and state apart, frozen, a sequence of keys", is_exact=True)
def _haiku(run: Run) -> None:
    tx, batches = optax.rmsprop(0.01, momentum=0.9, centered=True), Batches()

    @jax.jit
    def step(params: Any, state: Any, opt_state: Any, key: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            mean = 0.9 * state["mean"] + 0.1 * x.mean(0)
            noise = 0.01 * jax.random.normal(key, x.shape)
            return error_of(params, x - mean + noise), {"mean": mean, "counter": state["counter"] + 1}

        (loss, after), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        change, opt_state = tx.update(gradients, opt_state)
        return optax.apply_updates(params, change), freeze(after), opt_state, loss

    params = new_params()
    state = {
        "params": freeze(params),
        "state": FrozenDict({"mean": jnp.zeros(FEATURES), "counter": jnp.zeros((), jnp.int32)}),
        "opt_state": tx.init(freeze(params)),
        "keys": jax.random.PRNGKey(3),
    }

    def update(state: Any) -> Any:
        keys, key = jax.random.split(state["keys"])
        x = next(batches).numpy()
        params, inner, opt_state, loss = step(state["params"], state["state"], state["opt_state"], key, x)
        return {"params": params, "state": inner, "opt_state": opt_state, "keys": keys}, loss

    train(run, state, update, data=batches)


# ---- optimizers with a state of their own


def optimized(run: Run, tx: Any, *, sees_loss: bool = False) -> None:
    """Train a linear model on shuffled batches."""
    batches, params = Batches(), new_params()

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(error_of)(state["params"], x)
        more = {"value": loss} if sees_loss else {}
        change, opt_state = tx.update(gradients, state["opt_state"], state["params"], **more)
        return {"params": optax.apply_updates(state["params"], change), "opt_state": opt_state}, loss

    train(run, {"params": params, "opt_state": tx.init(params)}, lambda s: step(s, next(batches).numpy()), data=batches)


@program("optax: accumulation with MultiSteps", is_exact=True)
def _multi_steps(run: Run) -> None:
    optimized(run, optax.MultiSteps(optax.adam(0.05), every_k_schedule=3).gradient_transformation())


@program("optax: hyperparameters that are injected, and a plateau", is_exact=True)
def _plateau(run: Run) -> None:
    injected = optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.05, 0.01, 15))
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=2, cooldown=1, accumulation_size=2)
    optimized(run, optax.chain(injected, plateau), sees_loss=True)


@program("optax: schedule-free, two sequences of weights", is_exact=True)
def _schedule_free(run: Run) -> None:
    optimized(run, optax.contrib.schedule_free_adamw(0.05, warmup_steps=4))


@program("optax: noise for privacy, with its own key", is_exact=True)
def _private(run: Run) -> None:
    tx = optax.contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(5))
    batches, params, sgd = Batches(), new_params(), optax.sgd(0.05)

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        losses, gradients = jax.vmap(jax.value_and_grad(error_of), (None, 0))(state["params"], x[:, None])
        change, private = tx.update(gradients, state["private"])
        change, opt_state = sgd.update(change, state["opt_state"])
        after = optax.apply_updates(state["params"], change)
        return {"params": after, "private": private, "opt_state": opt_state}, losses.mean()

    state = {"params": params, "private": tx.init(params), "opt_state": sgd.init(params)}
    train(run, state, lambda state: step(state, next(batches).numpy()), data=batches)


@program("optax: sharpness-aware, every other step moves away", is_exact=True)
def _sam(run: Run) -> None:
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    optimized(run, optax.contrib.sam(optax.sgd(0.05), ascent, sync_period=2))


@program("optax: L-BFGS with a line search over all data", is_exact=True)
def _lbfgs(run: Run) -> None:
    tx = optax.lbfgs(memory_size=4)

    def loss_of(params: Any) -> Any:
        return error_of(params, DATA) + 0.1 * jnp.cos(3 * params["w"]).sum()

    value_and_grad = optax.value_and_grad_from_state(loss_of)

    @jax.jit
    def step(state: Any) -> Any:
        params, opt_state = state
        loss, gradient = value_and_grad(params, state=opt_state)
        change, opt_state = tx.update(gradient, opt_state, params, value=loss, grad=gradient, value_fn=loss_of)
        return (optax.apply_updates(params, change), opt_state), loss

    params = new_params()
    train(run, (params, tx.init(params)), step)


@program("optax: lookahead, slow and fast weights in one tree", is_exact=True)
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


@program("big_vision: frozen and trained parts, mixup with a folded key", is_exact=True)
def _masked(run: Run) -> None:
    labels = {"w": "trained", "b": "frozen"}
    tx = optax.multi_transform({"trained": optax.adafactor(0.05), "frozen": optax.set_to_zero()}, labels)
    params, batches = new_params(), Batches()

    @jax.jit
    def step(state: Any, x: Any, number: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(1), number)
        share = jax.random.beta(key, 0.4, 0.4)
        x = share * x + (1 - share) * x[::-1]
        loss, gradients = jax.value_and_grad(error_of)(state["params"], x)
        change, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], change), "opt": opt}, loss

    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize({"params": params, "opt": tx.init(params)}, data=batches)
        for number in range(start, run.total):
            batch = next(batches).numpy()
            state, loss = step(state, batch, number)
            if run.report(checkpoint, number + 1, state, loss, data=batches, batch=batch):
                break


# ---- learning by acting, and by chance


class EnvState(NamedTuple):
    place: Any
    speed: Any
    time: Any


def act(env: EnvState, action: Any, key: Any) -> tuple[EnvState, Any]:
    speed = 0.9 * env.speed + 0.1 * action + 0.01 * jax.random.normal(key)
    place, ends = env.place + speed, env.time >= 6
    after = EnvState(place, speed, env.time + 1)
    fresh = EnvState(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))
    return jax.tree.map(partial(jnp.where, ends), fresh, after), -jnp.abs(place - 1)


@program("purejaxrl: environments, observations and keys in the state of a scan", is_exact=True)
def _purejaxrl(run: Run) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(lambda count: 0.01 * (1 - count / 40), eps=1e-5))

    @jax.jit
    def update(state: Any) -> Any:
        def one(carry: Any, _: Any) -> Any:
            env, rng = carry
            rng, choice, noise = jax.random.split(rng, 3)
            seen = jnp.stack([env.place, env.speed])
            action = jnp.tanh(seen @ state["params"]["w"][:2] + jax.random.normal(choice))
            env, reward = act(env, action, noise)
            return (env, rng), (seen, action, reward)

        (env, rng), (seen, actions, rewards) = jax.lax.scan(one, (state["env"], state["rng"]), None, 5)

        def loss_of(params: Any) -> Any:
            return -(rewards * jnp.square(jnp.tanh(seen @ params["w"][:2]) - actions) * -1).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        change, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], change), "opt": opt, "env": env, "rng": rng}, loss

    params = new_params()
    env = EnvState(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))
    train(run, {"params": params, "opt": tx.init(params), "env": env, "rng": jax.random.PRNGKey(30)}, update)


@program("jaxrl: SAC, two critics, a temperature, a buffer of numpy", is_exact=True)
def _sac(run: Run) -> None:
    tx = optax.adam(0.01)
    critics = {"one": new_params(), "two": jax.tree.map(lambda leaf: leaf + 0.1, new_params())}
    state = {
        "actor": new_params(),
        "critics": critics,
        "target": jax.tree.map(jnp.copy, critics),
        "log_temperature": jnp.zeros(()),
        "rng": jax.random.key(0),
    }
    state["opt"] = tx.init((state["actor"], critics, state["log_temperature"]))
    buffer = {"seen": np.zeros((8, FEATURES), np.float32), "rewards": np.zeros(8, np.float32), "size": 0, "at": 0}

    @jax.jit
    def step(state: Any, seen: Any, rewards: Any) -> Any:
        rng, key = jax.random.split(state["rng"])

        def loss_of(parts: Any) -> Any:
            actor, critics, log = parts
            action = jnp.tanh(seen @ actor["w"] + actor["b"] + 0.1 * jax.random.normal(key, (len(seen),)))
            values = [seen @ one["w"] + action * one["b"] for one in critics.values()]
            aims = [seen @ one["w"] for one in state["target"].values()]
            aim = jax.lax.stop_gradient(rewards + 0.9 * jnp.minimum(*aims))
            return sum(jnp.square(value - aim).mean() for value in values) + jnp.exp(log) * jnp.square(action).mean()

        parts = state["actor"], state["critics"], state["log_temperature"]
        loss, gradients = jax.value_and_grad(loss_of)(parts)
        change, opt = tx.update(gradients, state["opt"])
        actor, critics, log = optax.apply_updates(parts, change)
        target = optax.incremental_update(critics, state["target"], 0.05)
        return {
            "actor": actor,
            "critics": critics,
            "target": target,
            "log_temperature": log,
            "rng": rng,
            "opt": opt,
        }, loss

    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, buffer=buffer)
        buffer = checkpoint.extras["buffer"]
        for number in range(start, run.total):
            at = buffer["at"]
            buffer["seen"][at], buffer["rewards"][at] = np.random.randn(FEATURES), np.random.rand()
            buffer["at"], buffer["size"] = (at + 1) % 8, min(buffer["size"] + 1, 8)
            chosen = np.random.randint(0, buffer["size"], SIZE)
            state, loss = step(state, buffer["seen"][chosen], buffer["rewards"][chosen])
            if run.report(checkpoint, number + 1, state, loss, buffer=buffer):
                break


@program("brax: running statistics of observations, several updates of a batch", is_exact=True)
def _brax(run: Run) -> None:
    @struct.dataclass
    class Running:
        mean: Any
        squares: Any
        count: Any

    tx = optax.adam(0.01)

    @jax.jit
    def update(state: Any) -> Any:
        key, draw, shuffle = jax.random.split(state["key"], 3)
        seen, running = jax.random.normal(draw, (6, FEATURES)) + 1, state["running"]
        count = running.count + len(seen)
        mean = running.mean + (seen - running.mean).sum(0) / count
        squares = running.squares + ((seen - running.mean) * (seen - mean)).sum(0)
        x = (seen - mean) / jnp.sqrt(squares / count + 1e-6)

        def one(carry: Any, key: Any) -> Any:
            params, opt = carry
            loss, gradients = jax.value_and_grad(error_of)(params, jax.random.permutation(key, x)[:3])
            change, opt = tx.update(gradients, opt)
            return (optax.apply_updates(params, change), opt), loss

        (params, opt), losses = jax.lax.scan(one, (state["params"], state["opt"]), jax.random.split(shuffle, 3))
        return {"params": params, "opt": opt, "running": Running(mean, squares, count), "key": key}, losses.mean()

    params = new_params()
    running = Running(jnp.zeros(FEATURES), jnp.zeros(FEATURES), jnp.zeros((), jnp.int32))
    train(run, {"params": params, "opt": tx.init(params), "running": running, "key": jax.random.key(9)}, update)


@program("evosax: an evolution strategy, its mean, its width and the best of all", is_exact=True)
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


@program("blackjax: a chain of Hamiltonian Monte Carlo that adapts its step", is_exact=True)
def _chain(run: Run) -> None:
    def potential(place: Any) -> Any:
        return 0.5 * jnp.square(place).sum() + 0.1 * jnp.square(DATA @ place - DATA.sum(1)).sum()

    @jax.jit
    def step(state: Any) -> Any:
        key, draw, choice = jax.random.split(state["key"], 3)
        speed = jax.random.normal(draw, (FEATURES,))
        place, width = state["place"], jnp.exp(state["log_width"])
        moving = speed - 0.5 * width * jax.grad(potential)(place)
        for _ in range(3):
            place = place + width * moving
            moving = moving - width * jax.grad(potential)(place)
        change = potential(state["place"]) + 0.5 * speed @ speed - potential(place) - 0.5 * moving @ moving
        accepts = jnp.log(jax.random.uniform(choice)) < change
        chance = jnp.minimum(1.0, jnp.exp(change))
        count = state["count"] + 1
        log_width = state["log_width"] + (chance - 0.8) / jnp.sqrt(count)
        kept = jnp.where(accepts, place, state["place"])
        return {"place": kept, "log_width": log_width, "count": count, "key": key}, potential(kept)

    train(
        run,
        {"place": jnp.zeros(FEATURES), "log_width": -jnp.ones(()), "count": jnp.zeros(()), "key": jax.random.key(8)},
        step,
    )


# ---- averages, images and text


class EmaState(TrainState):
    params_ema: Any = None


@program("diffusion with params_ema: times and noise from a key that is split", is_exact=True)
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


@program("BYOL: an online and a target branch, a rate of the average that rises", is_exact=True)
def _byol(run: Run) -> None:
    tx, batches = optax.lars(0.1, 1e-4), Batches()

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        key, one, other = jax.random.split(state["key"], 3)
        first, second = (x + 0.1 * jax.random.normal(each, x.shape) for each in (one, other))

        def loss_of(online: Any) -> Any:
            seen = jnp.tanh(first @ online["w"] + online["b"])
            return jnp.square(seen - jnp.tanh(second @ state["target"]["w"] + state["target"]["b"])).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["online"])
        change, opt = tx.update(gradients, state["opt"], state["online"])
        online, count = optax.apply_updates(state["online"], change), state["count"] + 1
        rate = 0.5 * 0.1 * (jnp.cos(jnp.pi * count / run.total) + 1)
        target = optax.incremental_update(online, state["target"], rate)
        return {"online": online, "target": target, "opt": opt, "count": count, "key": key}, loss

    online = new_params()
    target = jax.tree.map(lambda leaf: leaf + 0.5, online)
    state = {"online": online, "target": target, "opt": tx.init(online), "count": jnp.zeros((), jnp.int32)}
    train(run, state | {"key": jax.random.key(6)}, lambda state: step(state, next(batches).numpy()), data=batches)


@program("jaxnerf: rays drawn on the host, a rate that decays in logarithms", is_exact=True)
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


@program("levanter's form: data by the number of the step, keys folded with it", is_exact=True)
def _by_step(run: Run) -> None:
    @jax.jit
    def step(params: Any, number: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), number)
        x = DATA[jax.random.permutation(jax.random.fold_in(key, 1), EXAMPLES)[:SIZE]]
        return descend(params, lambda params: error_of(params, x * jax.random.bernoulli(key, 0.8, x.shape)))

    with run.callback() as checkpoint:
        params, start = checkpoint.restore_or_initialize(new_params())
        for number in range(start, run.total):
            params, loss = step(params, number)
            if run.report(checkpoint, number + 1, params, loss):
                break


@program("dreamer: episodes in a deque, sequences from a generator, a carried belief", is_exact=True)
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


@program("numpy alone: a tabular agent, its counts and its generator", is_exact=True)
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
