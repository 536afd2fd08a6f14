"""Train a small residual network with batch norm on scikit-learn's handwritten digits.

python examples/digits.py
headway run -n 2 examples/digits.py
torchrun --nproc-per-node 2 examples/digits.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import headway


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, added to the input; the first may halve the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network for 8x8 images in grey: three resolutions, then the mean over the image."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks, inputs = [], width
        for level in range(3):
            for number in range(depth):
                outputs = width * 2**level
                blocks.append(Residual(inputs, outputs, 2 if level and number == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images [batch, 1, 8, 8] to logits [batch, 10]."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy over the images of the batch, in nats."""
    images, digits = batch
    return F.cross_entropy(model(images), digits)


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Read scikit-learn's 1797 digits: images [n, 1, 8, 8] around zero and labels [n]; a fifth is held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.get_default_dtype()).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target, dtype=torch.int64)
    train, held_out = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def build_model(options: argparse.Namespace) -> ResNet:
    """Make the network with weights that depend on the seed alone."""
    torch.manual_seed(options.seed)
    return ResNet(options.width, options.depth)


def build_loader(train: TensorDataset, options: argparse.Namespace) -> DataLoader:
    """Make a loader of global batches (images, digits), in an order that depends on the seed alone."""
    generator = torch.Generator().manual_seed(options.seed)
    return DataLoader(train, options.batch, shuffle=True, drop_last=True, generator=generator)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=32, help="channels of the first resolution")
    parser.add_argument("--depth", type=int, default=2, help="residual blocks of each resolution")
    parser.add_argument("--batch", type=int, default=96, help="global batch: images of one step over all processes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    """Train, then count the held-out digits that are read right."""
    options = parse_options()
    model = build_model(options)
    train, held_out = read_digits()
    loader = build_loader(train, options)

    plan = headway.plan(model, loss, next(iter(loader)), optimizer=torch.optim.SGD)
    model = headway.parallelize(model, loss, plan)
    if model.is_main:
        print(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.epochs * len(loader))

    step = 0
    for _ in range(options.epochs):
        for batch in model.batches(loader):
            optimizer.zero_grad()
            value = model.forward_backward(batch)
            model.clip_grad_norm(1.0)
            optimizer.step()
            schedule.step()
            model.log(step, loss=value)
            step += 1

    model.eval()
    images, digits = held_out.tensors
    read = model.predict(images).argmax(dim=1).cpu()
    if model.is_main:
        print(f"{(read == digits).float().mean():.1%} of {len(digits)} held-out digits read right")
        if model.run_directory is not None:
            print(f"What happened is in {model.run_directory}; to look at it: headway show {model.run_directory}")


if __name__ == "__main__":
    main()
