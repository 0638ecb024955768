import numpy as np

rng = np.random.default_rng(0)
x = rng.normal(size=(120, 5))
y = (x @ np.arange(5.0) > 0).astype(float)
weights = np.zeros(5)
velocity = np.zeros(5)

step = 0
for epoch in range(4):
    order = rng.permutation(len(x))
    for batch in np.array_split(order, 8):
        p = 1 / (1 + np.exp(-x[batch] @ weights))
        velocity = 0.9 * velocity - 0.1 * x[batch].T @ (p - y[batch]) / len(batch)
        weights = weights + velocity
        step += 1
    print(epoch, np.mean((p > 0.5) == y[batch]))
np.savez("model.npz", weights)
