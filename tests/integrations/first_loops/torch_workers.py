import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import holdfast as hf  # +


class Squares(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        x = torch.tensor([index / 96.0, 1.0])
        return x, x[:1] ** 2


def main():
    torch.manual_seed(3)
    sampler = WeightedRandomSampler(torch.linspace(0.1, 1.0, 96), num_samples=96)
    # - loader = DataLoader(Squares(), batch_size=12, sampler=sampler, num_workers=2)
    loader = hf.resumable(DataLoader(Squares(), batch_size=12, sampler=sampler, num_workers=2))  # +
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    state, loss = {"model": model, "optimizer": optimizer}, torch.zeros(())  # +
    with hf.CheckpointCallback("run", save_interval_steps=4) as checkpoint:  # +
        state, step = checkpoint.restore_or_initialize(state, data=loader)  # +
        # - step = 0
        # - for epoch in range(3):
        for epoch in range(loader.epoch, 3):  # +
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if checkpoint.on_step(step, state, data=loader, metrics={"loss": loss}).should_stop:  # +
                    raise SystemExit(checkpoint.exit_status)  # +
            print(f"epoch {epoch}: {loss.item():.4f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
