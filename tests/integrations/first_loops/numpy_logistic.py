import numpy as np

import holdfast as hf  # +

rng = np.random.default_rng(0)
x = rng.normal(size=(120, 5))
y = (x @ np.arange(5.0) > 0).astype(float)
weights = np.zeros(5)
velocity = np.zeros(5)

with hf.CheckpointCallback("run", save_interval_steps=1) as checkpoint:  # +
    (weights, velocity), start = checkpoint.restore_or_initialize((weights, velocity), rng=rng)  # +
    # - for epoch in range(4):
    for epoch in range(start, 4):  # +
        order = rng.permutation(len(x))
        for batch in np.array_split(order, 8):
            p = 1 / (1 + np.exp(-x[batch] @ weights))
            velocity = 0.9 * velocity - 0.1 * x[batch].T @ (p - y[batch]) / len(batch)
            weights = weights + velocity
        print(epoch, np.mean((p > 0.5) == y[batch]))
        if checkpoint.on_step(epoch + 1, (weights, velocity), rng=rng).should_stop:  # +
            raise SystemExit(checkpoint.exit_status)  # +
np.savez("model.npz", weights)
