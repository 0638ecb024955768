import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf  # +

torch.manual_seed(1)
dataset = TensorDataset(torch.randn(100, 6), torch.randn(100, 1))
# - loader = DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True)
loader = hf.resumable(DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True))  # +
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)

with hf.CheckpointCallback("run", save_interval_steps=4) as checkpoint:  # +
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}  # +
    (_, step), loss = checkpoint.restore_or_initialize(state, data=loader), torch.zeros(())  # +
    # - step = 0
    # - for epoch in range(3):
    for epoch in range(loader.epoch, 3):  # +
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x + 0.01 * torch.randn_like(x)), y)
            loss.backward()
            optimizer.step()
            step += 1
            checkpoint.on_step(step, state, data=loader, metrics={"loss": loss})  # +
        scheduler.step()
        print(epoch, loss.item())
torch.save(model.state_dict(), "model.pt")
raise SystemExit(checkpoint.exit_status)  # +
