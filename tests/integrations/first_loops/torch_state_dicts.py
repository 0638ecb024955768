import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf  # +

torch.manual_seed(2)
# - loader = DataLoader(TensorDataset(torch.randn(96, 6), torch.randn(96, 1)), batch_size=16, shuffle=True)
loader = hf.resumable(DataLoader(TensorDataset(torch.randn(96, 6), torch.randn(96, 1)), batch_size=16, shuffle=True))  # +
model = nn.Linear(6, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

with hf.CheckpointCallback("run", save_interval_steps=4) as checkpoint:  # +
    state, step = checkpoint.restore_or_initialize({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, data=loader)  # +
    # - step = 0
    # - for epoch in range(3):
    for epoch in range(loader.epoch, 3):  # +
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            checkpoint.on_step(step, state, data=loader)  # +
        # - torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
torch.save(model.state_dict(), "model.pt")
raise SystemExit(checkpoint.exit_status)  # +
