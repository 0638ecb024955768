import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import holdfast as hf  # +


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(16)(x)))


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def train_epoch(state, train_ds, batch_size, rng):
    perms = jax.random.permutation(rng, len(train_ds["image"]))
    perms = perms[: len(perms) // batch_size * batch_size].reshape((-1, batch_size))
    losses = []
    for perm in perms:
        state, loss = train_step(state, {key: value[perm, ...] for key, value in train_ds.items()})
        losses.append(loss)
    return state, np.mean(losses)


data = np.random.default_rng(0)
train_ds = {"image": data.normal(size=(90, 8)).astype(np.float32), "label": data.integers(0, 3, 90)}
rng = jax.random.key(0)
rng, init_rng = jax.random.split(rng)
model = CNN()
params = model.init(init_rng, jnp.ones([1, 8]))["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

with hf.CheckpointCallback("run", save_interval_steps=2) as checkpoint:  # +
    state, start = checkpoint.restore_or_initialize(state, rng=rng)  # +
    rng = checkpoint.extras["rng"]  # +
    # - for epoch in range(1, 11):
    for epoch in range(start + 1, 11):  # +
        rng, input_rng = jax.random.split(rng)
        state, train_loss = train_epoch(state, train_ds, 16, input_rng)
        print(f"epoch:{epoch:3d}, train_loss: {train_loss:.4f}")
        if checkpoint.on_step(epoch, state, rng=rng, metrics={"train_loss": train_loss}).should_stop:  # +
            raise SystemExit(checkpoint.exit_status)  # +
np.savez("model.npz", *jax.tree.leaves(state.params))
