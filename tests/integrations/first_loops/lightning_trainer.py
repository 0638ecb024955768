import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import CheckpointCallback  # +


class LitModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


L.seed_everything(4)
loader = DataLoader(TensorDataset(torch.randn(96, 6), torch.randn(96, 1)), batch_size=12, shuffle=True)
model = LitModel()
# - trainer = L.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
checkpoint = CheckpointCallback("run", save_interval_steps=4)  # +
trainer = L.Trainer(max_epochs=3, accelerator="cpu", logger=False, callbacks=[checkpoint], enable_progress_bar=False)  # +
trainer.fit(model, loader)
torch.save(model.state_dict(), "model.pt")
