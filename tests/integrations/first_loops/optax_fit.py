import jax
import jax.numpy as jnp
import numpy as np
import optax

import holdfast as hf  # +

rng = np.random.default_rng(0)
TRAINING_DATA = rng.integers(0, 2, size=(24, 8, 8)).astype(np.float32)
LABELS = jax.nn.one_hot(TRAINING_DATA.sum(axis=2).astype(int) % 2, 2)
params = {
    "hidden": jax.random.normal(jax.random.PRNGKey(0), (8, 32)) * 0.1,
    "output": jax.random.normal(jax.random.PRNGKey(1), (32, 2)) * 0.1,
}


def net(x, params):
    return jax.nn.relu(x @ params["hidden"]) @ params["output"]


@jax.jit
def loss(params, batch, labels):
    return optax.sigmoid_binary_cross_entropy(net(batch, params), labels).sum(axis=-1).mean()


def fit(params, optimizer):
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, batch, labels):
        loss_value, grads = jax.value_and_grad(loss)(params, batch, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss_value

    data = hf.resumable(list(zip(TRAINING_DATA, LABELS)))  # +
    with hf.CheckpointCallback("run", save_interval_steps=4) as checkpoint:  # +
        (params, opt_state), start = checkpoint.restore_or_initialize((params, opt_state), data=data)  # +
        # - for i, (batch, labels) in enumerate(zip(TRAINING_DATA, LABELS)):
        for i, (batch, labels) in enumerate(data, start):  # +
            params, opt_state, loss_value = step(params, opt_state, batch, labels)
            if i % 8 == 0:
                print(f"step {i}, loss: {loss_value}")
            if checkpoint.on_step(i + 1, (params, opt_state), data=data, metrics={"loss": loss_value}).should_stop:  # +
                raise SystemExit(checkpoint.exit_status)  # +
    return params


params = fit(params, optax.adam(learning_rate=optax.warmup_cosine_decay_schedule(0.0, 1.0, 5, 24, 0.0)))
np.savez("model.npz", *jax.tree.leaves(params))
