import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
import torch

import holdfast as hf  # +

keras.utils.set_random_seed(6)
x_train = np.random.normal(size=(96, 6)).astype("float32")
y_train = (x_train.sum(axis=1) > 0).astype("int64")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(12, activation="relu"), keras.layers.Dense(2)])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
train_dataset = torch.utils.data.TensorDataset(torch.from_numpy(x_train), torch.from_numpy(y_train))
# - train_dataloader = torch.utils.data.DataLoader(train_dataset, batch_size=16, shuffle=True)
train_dataloader = hf.resumable(torch.utils.data.DataLoader(train_dataset, batch_size=16, shuffle=True))  # +

with hf.CheckpointCallback("run", save_interval_steps=4) as checkpoint:  # +
    (state, done), loss = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer}, data=train_dataloader), torch.zeros(())  # +
    # - for epoch in range(3):
    for epoch in range(train_dataloader.epoch, 3):  # +
        # - for step, (inputs, targets) in enumerate(train_dataloader):
        for done, (inputs, targets) in enumerate(train_dataloader, done + 1):  # +
            logits = model(inputs)
            loss = loss_fn(targets, logits)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.on_step(done, state, data=train_dataloader, metrics={"loss": loss})  # +
        print(f"epoch {epoch}: {loss.item():.4f}")
torch.save(model.state_dict(), "model.pt")
raise SystemExit(checkpoint.exit_status)  # +
