import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf  # +

torch.manual_seed(0)
features = torch.randn(160, 8)
labels = (features.sum(dim=1) > 0).long()
training_data, test_data = TensorDataset(features[:128], labels[:128]), TensorDataset(features[128:], labels[128:])
# - train_dataloader = DataLoader(training_data, batch_size=16, shuffle=True)
train_dataloader = hf.resumable(DataLoader(training_data, batch_size=16, shuffle=True))  # +
test_dataloader = DataLoader(test_data, batch_size=16)

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def train(dataloader, model, loss_fn, optimizer):
    model.train()
    # - for batch, (X, y) in enumerate(dataloader):
    for batch, (X, y) in enumerate(dataloader, dataloader.batch):  # +
        loss = loss_fn(model(X), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.on_step(t * len(dataloader) + batch + 1, state, data=dataloader, metrics={"loss": loss})  # +
        if batch % 4 == 0:
            print(f"loss: {loss.item():>7f}  [{batch * len(X):>5d}]")


def test(dataloader, model, loss_fn):
    model.eval()
    with torch.no_grad():
        correct = sum((model(X).argmax(1) == y).sum().item() for X, y in dataloader)
    print(f"accuracy: {correct / len(dataloader.dataset):.2f}")


with hf.CheckpointCallback("run", save_interval_steps=4) as checkpoint:  # +
    state, _ = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer}, data=train_dataloader)  # +
    # - for t in range(3):
    for t in range(train_dataloader.epoch, 3):  # +
        print(f"Epoch {t + 1}")
        train(train_dataloader, model, loss_fn, optimizer)
        test(test_dataloader, model, loss_fn)
torch.save(model.state_dict(), "model.pt")
raise SystemExit(checkpoint.exit_status)  # +
