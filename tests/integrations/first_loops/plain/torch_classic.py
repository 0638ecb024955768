import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
dataset = TensorDataset(torch.randn(100, 6), torch.randn(100, 1))
loader = DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)

step = 0
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x + 0.01 * torch.randn_like(x)), y)
        loss.backward()
        optimizer.step()
        step += 1
    scheduler.step()
    print(epoch, loss.item())
torch.save(model.state_dict(), "model.pt")
