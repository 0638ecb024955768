import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf  # +

torch.manual_seed(5)
accelerator = Accelerator(cpu=True)
# - loader = DataLoader(TensorDataset(torch.randn(96, 6), torch.randn(96, 1)), batch_size=12, shuffle=True)
loader = hf.resumable(DataLoader(TensorDataset(torch.randn(96, 6), torch.randn(96, 1)), batch_size=12, shuffle=True))  # +
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with hf.CheckpointCallback("run", save_interval_steps=4) as checkpoint:  # +
    state, step = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer}, data=loader)  # +
    loss = torch.zeros(())  # +
    # - step = 0
    # - for epoch in range(3):
    for epoch in range(loader.epoch, 3):  # +
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            checkpoint.on_step(step, state, data=loader, metrics={"loss": loss})  # +
        print(epoch, loss.item())
torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
raise SystemExit(checkpoint.exit_status)  # +
