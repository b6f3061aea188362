"""A training loop in plain torch for handwritten digits.

fromtorch.yaml takes `network` and `data` from this file and trains with the same losses on devices
(docs/from-torch.md).
"""

import torch
from torch import nn
from torchmetrics import F1Score

STEPS = 200
BATCH = 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        convolution = nn.Conv2d(1, 16, 3, padding=1)
        self.features = nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2))
        hidden = nn.Linear(16 * 4 * 4, 64)
        self.head = nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images):
        return self.head(self.features(images))


def network():
    # The scenario begins with the same weights.
    torch.manual_seed(0)
    return Net()


def data():
    from sklearn.datasets import load_digits

    digits = load_digits()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(digits.target), generator=generator)
    # Pixels are 0 to 16.
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def main():
    model = network()
    (images, labels), (test_images, test_labels) = data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    batches = len(images) // BATCH
    losses = []
    for step in range(STEPS):
        # In stored order, as with `shuffle: false` in the scenario.
        first = (step % batches) * BATCH
        chosen = slice(first, first + BATCH)
        loss = criterion(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        outputs = model(test_images)
    metric = F1Score(task="multiclass", num_classes=10, average="macro")
    f1 = metric(outputs, test_labels)
    print(f"loss {losses[-1]:.4f}, F1 {f1:.4f}")
    return losses, float(f1)


if __name__ == "__main__":
    main()
