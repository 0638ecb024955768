import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
import torch
from torch.utils.data import DataLoader

import holdfast as hf  # +


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.linear1 = nnx.Linear(6, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.linear2 = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.linear2(self.dropout(nnx.relu(self.linear1(x))))


def loss_fn(model, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def collate(items):
    images, labels = zip(*items)
    return np.stack(images), np.array(labels)


data = np.random.default_rng(0)
train_ds = [(data.normal(size=6).astype(np.float32), int(data.integers(3))) for _ in range(96)]
# - train_loader = DataLoader(train_ds, batch_size=16, shuffle=True, collate_fn=collate)
train_loader = hf.resumable(DataLoader(train_ds, batch_size=16, shuffle=True, collate_fn=collate))  # +
torch.manual_seed(7)
model = Model(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)

with hf.CheckpointCallback("run", save_interval_steps=4) as checkpoint:  # +
    state, step = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer}, data=train_loader)  # +
    loss = None  # +
    # - step = 0
    # - for epoch in range(3):
    for epoch in range(train_loader.epoch, 3):  # +
        for batch in train_loader:
            loss = train_step(model, optimizer, batch)
            step += 1
            checkpoint.on_step(step, state, data=train_loader, metrics={"loss": loss})  # +
        print(epoch, loss)
np.savez("model.npz", *jax.tree.leaves(nnx.state(model, nnx.Param)))
raise SystemExit(checkpoint.exit_status)  # +
