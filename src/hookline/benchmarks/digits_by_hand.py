"""The digits ConvNet by hand, as a script, which imports nothing of hookline.

It does what ``configs/digits/convnet.yaml`` asks for: 20 epochs, AdamW, warm-up and cosine schedule, an evaluation per
epoch, checkpoints. It logs to the console and to a file of JSON lines.

    python digits_by_hand.py FOLDER [EPOCHS]
"""

import json
import math
import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def conv(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *conv(1, 32), *conv(32, 32), nn.MaxPool2d(2), *conv(32, 64), *conv(64, 64)
        )  # fmt: skip
        self.classifier = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def main(folder: str, epochs: int) -> None:
    torch.manual_seed(42)
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:355], order[355:]
    x = (images / 16.0).reshape(-1, 1, 8, 8).astype(np.float32)
    x = torch.from_numpy((x - x[train].mean()) / x[train].std())
    y = torch.from_numpy(labels.astype(np.int64))
    train_loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=64, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[test], y[test]), batch_size=64)
    model, loss_function = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
    steps, total = len(train_loader), epochs * len(train_loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / total))
    )
    with open(f"{folder}/metrics.json", "w") as rows:
        step = 0
        for epoch in range(epochs):
            model.train()
            for inputs, targets in train_loader:
                loss = loss_function(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                step += 1
                if step % 20 == 0:
                    row = {"iteration": step, "loss": loss.item(), "lr": schedule.get_last_lr()[0]}
                    print(row)
                    rows.write(json.dumps(row) + "\n")
            model.eval()
            hits, losses = 0, 0.0
            with torch.no_grad():
                for inputs, targets in test_loader:
                    outputs = model(inputs)
                    hits += int((outputs.argmax(1) == targets).sum())
                    losses += loss_function(outputs, targets).item() * len(targets)
            row = {"iteration": step, "accuracy": hits / len(test), "test_loss": losses / len(test)}
            print(row)
            rows.write(json.dumps(row) + "\n")
            if (epoch + 1) % 5 == 0 or epoch + 1 == epochs:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, f"{folder}/model_{epoch}.pth")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
