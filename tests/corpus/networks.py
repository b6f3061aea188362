"""Small versions of well-known architectures in plain torch, as users write them."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import nn

TOKENS = 20
"""Size of the vocabulary."""


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3)
        self.f1, self.f2 = nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(torch.tanh(self.c1(x)), 2)
        x = F.avg_pool2d(torch.tanh(self.c2(x)), 1).reshape(x.shape[0], -1)
        return self.f2(torch.tanh(self.f1(x)))


class Dense(nn.Module):
    """DenseNet: the input of each layer is the concatenation of all earlier outputs."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Conv2d(4 + 4 * index, 4, 3, padding=1) for index in range(3)
        )
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.relu(torch.cat(features, 1))))
        return self.fc(torch.cat(features, 1).mean((2, 3)))


class Excite(nn.Module):
    """SENet: residual blocks with squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.convs = nn.ModuleList(
            nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(8, 2) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, 8) for _ in range(2))
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        for conv, norm, down, up in zip(
            self.convs, self.norms, self.down, self.up, strict=True
        ):
            y = norm(conv(x))
            gate = torch.sigmoid(up(F.relu(down(y.mean((2, 3))))))
            x = F.relu(x + y * gate[:, :, None, None])
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Depthwise(nn.Sequential):
    """MobileNet: depthwise and pointwise convolutions."""

    def __init__(self):
        layers = [nn.Conv2d(1, 8, 3, padding=1)]
        for _ in range(3):
            layers += [
                nn.Conv2d(8, 8, 3, padding=1, groups=8),
                nn.BatchNorm2d(8),
                nn.ReLU6(inplace=True),
            ]
            layers += [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)]
        super().__init__(
            *layers,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(8, 10),
        )


class Shuffle(nn.Module):
    """ShuffleNet: a convolution of half of the channels, then a shuffle of all channels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(3)
        )
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            passed, changed = x.chunk(2, dim=1)
            x = torch.cat((passed, branch(changed)), dim=1)
            # Interleave the halves, as the paper shuffles channels.
            b, c, h, w = x.size()
            x = x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)
        return self.fc(x.mean([2, 3]))


class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.Conv2d(8, 4, 1),
                    nn.Conv2d(8, 2, 3, padding=1),
                    nn.Conv2d(8, 2, 5, padding=2),
                ]
            )
            for _ in range(2)
        )
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu(torch.cat([branch(x) for branch in block], 1))
        return self.fc(x.amax((2, 3)))


class Squeeze(nn.Sequential):
    """SqueezeNet: the classifier is a convolution instead of a fully connected layer."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1), nn.ReLU(inplace=True), nn.Dropout(0.5),
            nn.Conv2d(4, 10, 1), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(1),
        )  # fmt: skip


class Mixer(nn.Module):
    """MLP-Mixer: one perceptron mixes patches, another one mixes channels."""

    def __init__(self, dim=8, depth=3):
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 2, 2)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))
        self.tokens = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))
            for _ in range(depth)
        )
        self.channels = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim))
            for _ in range(depth)
        )
        self.fc = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        # Each block has two normalisations.
        for index, (tokens, channels) in enumerate(
            zip(self.tokens, self.channels, strict=True)
        ):
            x = x + tokens(self.norms[2 * index](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * index + 1](x))
        return self.fc(x.mean(1))


class Fourier(nn.Module):
    """FNet: a Fourier transform instead of attention."""

    def __init__(self, dim=8, depth=2):
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim))
            for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.fc = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.embed(x.squeeze(1))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + torch.fft.fft2(x).real)
            x = x + layer(x)
        return self.fc(x[:, -1])


class ConvMixer(nn.Sequential):
    def __init__(self, dim=8, depth=3):
        class Residual(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return self.inner(x) + x

        def block():
            around = nn.Sequential(
                nn.Conv2d(dim, dim, 3, groups=dim, padding="same"),
                nn.GELU(),
                nn.BatchNorm2d(dim),
            )
            return nn.Sequential(
                Residual(around), nn.Conv2d(dim, dim, 1), nn.GELU(), nn.BatchNorm2d(dim)
            )

        blocks = [block() for _ in range(depth)]
        super().__init__(
            nn.Conv2d(1, dim, 2, 2),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(dim, 10),
        )


class Spatial(nn.Module):
    """A spatial transformer: a small network predicts an affine transformation of the image."""

    def __init__(self):
        super().__init__()
        self.where = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 6)
        )
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4, 10)

    def forward(self, x):
        grid = F.affine_grid(
            self.where(x).view(-1, 2, 3), x.size(), align_corners=False
        )
        x = F.grid_sample(x, grid, align_corners=False)
        return self.fc(F.relu(self.conv(x)).mean((2, 3)))


class TextCnn(nn.Module):
    """Convolutions of several widths over tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.convs = nn.ModuleList(nn.Conv1d(8, 4, width) for width in (2, 3))
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = self.embed(x).transpose(1, 2)
        features = torch.cat([F.relu(conv(x)).amax(2) for conv in self.convs], 1)
        return self.fc(F.dropout(features, 0.3, self.training))


class Bag(nn.Module):
    """fastText: the mean of all word embeddings."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.EmbeddingBag(TOKENS, 8, mode="mean"), nn.Linear(8, 10)

    def forward(self, x):
        return self.fc(self.embed(x))


class Recurrent(nn.Module):
    """A recurrent network (LSTM, GRU or Elman) of three layers over tokens."""

    def __init__(self, kind="LSTM", bidirectional=False):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.cells = getattr(nn, kind)(
            8, 6, 3, batch_first=True, dropout=0.1, bidirectional=bidirectional
        )
        self.fc = nn.Linear(12 if bidirectional else 6, 10)

    def forward(self, x):
        _, last = self.cells(self.embed(x))
        # An LSTM returns its hidden state and its cell state.
        if isinstance(last, tuple):
            last = last[0]
        if self.cells.bidirectional:
            return self.fc(torch.cat((last[-2], last[-1]), 1))
        return self.fc(last[-1])


class Gru(Recurrent):
    def __init__(self):
        super().__init__("GRU")


class BiLstm(Recurrent):
    def __init__(self):
        super().__init__("LSTM", bidirectional=True)


class Elman(Recurrent):
    def __init__(self):
        super().__init__("RNN")


class Crnn(nn.Module):
    """CRNN: convolutions, then a recurrent network along the width."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d((2, 1)),
        )
        self.lstm = nn.LSTM(16, 8, 2, bidirectional=True)
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        # The width becomes the sequence, which comes first without batch_first.
        x = self.conv(x).flatten(1, 2).permute(2, 0, 1)
        x, _ = self.lstm(x)
        return self.fc(x[-1])


class Dilated(nn.Module):
    """TCN or WaveNet: gated dilated convolutions with skip connections to the output."""

    def __init__(self, channels=4, depth=3):
        super().__init__()
        self.stem = nn.Conv1d(8, channels, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(channels, 2 * channels, 2, dilation=2**index)
            for index in range(depth)
        )
        self.skips = nn.ModuleList(
            nn.Conv1d(channels, channels, 1) for _ in range(depth)
        )
        self.fc = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.stem(x.squeeze(1))
        total = 0
        for index, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            # Padding on the left alone keeps the convolution causal.
            a, b = gate(F.pad(x, (2**index, 0))).chunk(2, 1)
            y = skip(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + y, total + y
        return self.fc(F.relu(total)[..., -1])


class Padded(nn.Module):
    """`nn.TransformerEncoder` of twelve layers with a padding mask."""

    def __init__(self, depth=12, dim=8):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, dim, padding_idx=0)
        self.position = nn.Parameter(torch.randn(1, 64, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.fc = nn.Linear(dim, 10)

    def forward(self, x):
        padding = x == 0
        h = self.encoder(
            self.embed(x) + self.position[:, : x.size(1)], src_key_padding_mask=padding
        )
        # The mean over tokens that are no padding; a sample of padding alone must not divide by 0.
        weights = (~padding).unsqueeze(-1).float()
        return self.fc((h * weights).sum(1) / weights.sum(1).clamp(min=1))


class Causal(nn.Module):
    """`nn.TransformerEncoder` with a causal mask, as language models are often written."""

    def __init__(self, depth=3, dim=8):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, dim)
        layer = nn.TransformerEncoderLayer(
            dim, 2, 16, 0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, depth, norm=nn.LayerNorm(dim), enable_nested_tensor=False
        )
        self.fc = nn.Linear(dim, 10)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        embedded = self.embed(x) * math.sqrt(8)
        return self.fc(self.encoder(embedded, mask=mask, is_causal=True)[:, -1])


class Translator(nn.Module):
    """`nn.Transformer`: an encoder, and a decoder with cross-attention."""

    def __init__(self, dim=8):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, dim)
        self.transformer = nn.Transformer(dim, 2, 2, 2, 16, 0.0, batch_first=True)
        self.fc = nn.Linear(dim, 10)

    def forward(self, x):
        h = self.embed(x)
        return self.fc(self.transformer(h, h[:, :2])[:, -1])


class Decoder(nn.Module):
    """DETR or Perceiver: learned queries attend to patches."""

    def __init__(self, dim=8):
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 2, 2)
        self.queries = nn.Parameter(torch.randn(1, 3, dim))
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(dim, 2, 16, 0.0, batch_first=True), 3
        )
        self.fc = nn.Linear(3 * dim, 10)

    def forward(self, x):
        memory = self.patches(x).flatten(2).mT
        queries = self.queries.expand(x.shape[0], -1, -1)
        return self.fc(self.decoder(queries, memory).flatten(1))


class Pooled(nn.Module):
    """DeepSets or PointNet: a set of points, pooled by `nn.MultiheadAttention` and by the maximum."""

    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.seed = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = self.each(x[:, 0])
        pooled, _ = self.attention(self.seed.repeat(x.size(0), 1, 1), x, x)
        return self.fc(torch.cat([pooled[:, 0], x.max(dim=1).values], dim=1))


class Convolved(nn.Module):
    """GCN: graph convolutions on a ring of eight nodes."""

    def __init__(self):
        super().__init__()
        # Each node is connected to itself and to both neighbours; rows sum to 1.
        edges = torch.eye(8) + torch.eye(8).roll(1, 0) + torch.eye(8).roll(-1, 0)
        self.register_buffer("edges", edges / edges.sum(1, keepdim=True))
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = torch.relu(self.edges @ self.first(x[:, 0]))
        x = torch.relu(self.edges @ self.second(x))
        return self.fc(x.mean(1))


class Highway(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.stem = nn.Linear(64, 8)
        self.changes = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = torch.tanh(self.stem(x.flatten(1)))
        for change, gate in zip(self.changes, self.gates, strict=True):
            share = gate(x).sigmoid()
            x = share * change(x).relu() + (1 - share) * x
        return self.fc(x)


class Experts(nn.Module):
    """A dense mixture of experts: all experts compute, and a gate weights their outputs."""

    def __init__(self):
        super().__init__()
        self.stem, self.gate = nn.Linear(64, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(3)
        )
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(torch.flatten(x, 1))
        shares = F.softmax(self.gate(x), dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts])
        return self.fc(torch.einsum("be,ebd->bd", shares, outputs))


class Tied(nn.Module):
    """An autoencoder with tied weights of encoder and decoder, before a classifier."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Parameter(torch.randn(8, 64) * 0.1)
        self.hidden = nn.Linear(64, 16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        code = torch.tanh(F.linear(x.flatten(1), self.encoder))
        decoded = F.linear(code, self.encoder.t())
        return self.fc(torch.relu(self.hidden(decoded)))


class Sines(nn.Module):
    """SIREN: sines as activations."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10)]
        )

    def forward(self, x):
        x = x.flatten(start_dim=1)
        # Tracing must follow a slice of a ModuleList.
        for layer in self.layers[:-1]:
            x = torch.sin(3.0 * layer(x))
        return self.layers[-1](x)


class Wide(nn.Module):
    """DLRM: embeddings of categories, and dot products of all pairs of embeddings."""

    def __init__(self):
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(TOKENS, 4) for _ in range(7))
        self.deep = nn.Sequential(
            nn.Linear(28, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8), nn.ReLU()
        )
        self.fc = nn.Linear(8 + 21, 10)

    def forward(self, x):
        embedded = torch.stack(
            [embed(x[:, index]) for index, embed in enumerate(self.embeds)], dim=1
        )
        products = torch.bmm(embedded, embedded.transpose(1, 2))
        # 7 embeddings have 21 pairs.
        rows, columns = torch.triu_indices(7, 7, offset=1)
        deep = self.deep(embedded.flatten(1))
        return self.fc(torch.cat([deep, products[:, rows, columns]], dim=1))


class Instance(nn.Module):
    """Normalisation over instances, groups, channels and batches, and of weights."""

    def __init__(self):
        super().__init__()
        convs = [nn.Conv2d(1, 4, 3, padding=1)]
        convs += [nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)]
        self.convs = nn.ModuleList(convs)
        norms = [
            nn.InstanceNorm2d(4, affine=True),
            nn.GroupNorm(2, 4),
            nn.LocalResponseNorm(2),
            nn.BatchNorm2d(4),
        ]
        self.norms = nn.ModuleList(norms)
        self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(4, 10))

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.leaky_relu(norm(conv(x)))
        return self.fc(F.normalize(x.mean((-2, -1))))


class Inplace(nn.Module):
    """Operations in index, and a part without gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.second = nn.Linear(16, 16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        # The values before these operations must not be sent to another unit.
        x.mul_(0.5).add_(1.0)
        with torch.no_grad():
            size = x.abs().mean(dim=1, keepdim=True)
        x = F.relu_(self.second(x / size))
        return self.fc(x)


class Answer(nn.Module):
    """Returns a dictionary, as models of `transformers` do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, x, labels=None):
        hidden = self.body(x)
        output = {"logits": self.head(hidden), "hidden_states": hidden}
        if labels is not None:
            output["loss"] = F.cross_entropy(output["logits"], labels)
        return output
