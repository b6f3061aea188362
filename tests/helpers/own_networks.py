"""A user's file with networks in plain torch, as scenarios name it."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import nn


class Block(nn.Module):
    """A residual block, which cannot be cut: two tensors cross each point within."""

    def __init__(self, entering, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(entering, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or entering != channels:
            self.down = nn.Sequential(
                nn.Conv2d(entering, channels, 1, stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.down is not None:
            identity = self.down(x)
        # In position, as torchvision writes it.
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, shape, classes, width=4):
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(
            Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.pool(x), 1))


def double(entering, channels):
    return nn.Sequential(
        nn.Conv2d(entering, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """A network with skip connections from each level of the encoder to the same level of the decoder."""

    def __init__(self, shape, classes, width=4):
        super().__init__()
        self.down1 = double(shape[0], width)
        self.down2 = double(width, 2 * width)
        self.middle = double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join2 = double(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join1 = double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        c = self.join2(torch.cat([self.up2(c), b], dim=1))
        c = self.join1(torch.cat([self.up1(c), a], dim=1))
        return self.head(c).mean(dim=(2, 3))


class Encoder(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * dim, dim),
        )

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A vision transformer: each row of the image is a token; a class token and positions are learned."""

    def __init__(self, shape, classes, dim=16, depth=2, heads=2, dropout=0.0):
        super().__init__()
        self.embed = nn.Linear(shape[0] * shape[2], dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, shape[1] + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(Encoder(dim, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        b = x.shape[0]
        x = self.embed(x.permute(0, 2, 1, 3).flatten(2))
        x = torch.cat([self.cls.expand(b, -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Attention(nn.Module):
    """Causal attention with a buffered mask that is sliced to the sequence's length, as in many GPT codes."""

    def __init__(self, dim, heads, longest=64):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.register_buffer(
            "mask", torch.tril(torch.ones(longest, longest)).bool(), persistent=False
        )

    def forward(self, x, mask=None):
        b, t, d = x.size()
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(d, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
        if mask is not None:
            scores = scores + mask
        scores = F.dropout(torch.softmax(scores, dim=-1), 0.0, training=self.training)
        return x + self.out((scores @ v).transpose(1, 2).reshape(b, t, d))


class Gpt(nn.Module):
    """A network with tensor sizes, constants, assertions and options in `forward`."""

    def __init__(self, shape, classes, dim=8, depth=2):
        super().__init__()
        self.embed = nn.Linear(shape[2], dim)
        self.position = nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(Attention(dim, 2) for _ in range(depth))
        # A recurrent cell makes `forward` a loop, whose length depends on the input.
        self.cell = nn.GRUCell(dim, dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x, return_features: bool = False):
        if x.dim() == 4:
            x = x.flatten(1, 2)
        assert x.shape[1] <= 64, "too long"
        x = self.embed(x * torch.tensor([0.5])) + self.position(
            torch.arange(x.size(1), device=x.device)
        )
        for block in self.blocks:
            x = block(x)
        state = torch.zeros(x.shape[0], self.cell.hidden_size)
        for position in range(x.size(1)):
            state = self.cell(x[:, position], state)
        return state if return_features else self.head(state)


def layered(shape, classes):
    """Return a Sequential with encoder layers of torch."""
    dim = 16
    return nn.Sequential(
        nn.Flatten(2),
        nn.Linear(shape[1] * shape[2], dim),
        nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True),
        nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(dim * shape[0], classes),
    )
