"""Handwritten digits by a loop in plain torch; fromtorch.yaml trains the same on devices (docs/from-torch.md)."""

import torch
from torch import nn
from torchmetrics import F1Score

STEPS, BATCH = 200, 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, images):
        return self.head(self.features(images))


def network():
    torch.manual_seed(0)
    return Net()


def data():
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(
        len(digits.target), generator=torch.Generator().manual_seed(0)
    )
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def main():
    model, ((images, labels), (test_images, test_labels)) = network(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))[
        : len(images) // BATCH
    ]
    losses = []
    for step in range(STEPS):
        inputs, wanted = batches[step % len(batches)]
        loss = criterion(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        outputs = model(test_images)
    f1 = F1Score(task="multiclass", num_classes=10, average="macro")(
        outputs, test_labels
    )
    print(f"loss {losses[-1]:.4f}, F1 {f1:.4f}")
    return losses, float(f1)


if __name__ == "__main__":
    main()
