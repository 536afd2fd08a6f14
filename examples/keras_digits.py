"""Train a small Keras 3 network, on Keras' torch backend, on scikit-learn's handwritten digits.

pip install keras
headway run -n 2 examples/keras_digits.py
"""

from __future__ import annotations

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import headway


def build_model(width: int, depth: int) -> keras.Model:
    """Make a residual network of convolutions and batch norm: images [batch, 8, 8, 1] to logits [batch, 10]."""
    images = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(width, 3, padding="same")(images)
    for _ in range(depth):
        y = keras.layers.BatchNormalization()(x)
        y = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(y)
        x = keras.layers.Add()([x, y])
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, keras.layers.Dense(10)(x))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy over the images of the batch, in nats."""
    images, digits = batch
    return F.cross_entropy(model(images, training=model.training), digits)


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Read scikit-learn's 1797 digits: images [n, 8, 8, 1] around zero and labels [n]; the last fifth is held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(-1) / 8 - 1
    labels = torch.tensor(data.target, dtype=torch.int64)
    held_out = len(labels) // 5
    return TensorDataset(images[:-held_out], labels[:-held_out]), TensorDataset(images[-held_out:], labels[-held_out:])


def main() -> None:
    """Train, then count the held-out digits that are read right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=96, help="global batch: images of one step over all processes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--stages", type=int, help="divide the model into so many stages")
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    model = build_model(options.width, options.depth)
    train, held_out = read_digits()
    loader = DataLoader(train, options.batch, shuffle=True, drop_last=True)

    fixed = {"pipeline": options.stages} if options.stages else None
    plan = headway.plan(model, loss, next(iter(loader)), fixed=fixed)
    model = headway.parallelize(model, loss, plan)
    if model.is_main:
        print(plan)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    step = 0
    for _ in range(options.epochs):
        for batch in model.batches(loader):
            optimizer.zero_grad()
            value = model.forward_backward(batch)
            optimizer.step()
            model.log(step, loss=value)
            step += 1

    images, digits = held_out.tensors
    read = model.predict(images).argmax(dim=1).cpu()
    if model.is_main:
        print(f"{(read == digits).float().mean():.1%} of {len(digits)} held-out digits read right")


if __name__ == "__main__":
    main()
