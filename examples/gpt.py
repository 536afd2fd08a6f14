"""Train a byte-level GPT on the source text of Python's own standard library, on as many processes as there are.

    python examples/gpt.py                              one process
    headway run -n 2 examples/gpt.py                    two, on this machine
    torchrun --nproc-per-node 2 examples/gpt.py         the same, by torch's launcher

Written as for one device; the lines that name headway or call the parallel model are all there is to it.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import headway

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a two-layer network, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, context, width] to the same shape."""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, context, head width]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Decoder-only transformer over bytes; the token embedding is also the output layer (tied weights)."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's rule: what is added to the residual stream is smaller, the more layers add to it.
                narrow = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if narrow else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map bytes [batch, context] to logits of the next byte [batch, context, 256]."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


class Windows(Dataset):
    """Stretches of text, each with the same stretch one byte later as its target."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def read_text(limit: int = 8_000_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the standard library's source: bytes to train on (at most `limit`), and bytes held out, split by file."""
    root = Path(sysconfig.get_path("stdlib"))
    # Tests and installed packages differ between machines; encodings and pydoc_data are tables, not code.
    skipped = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data"}
    files = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    train, held_out = bytearray(), bytearray()
    for number, path in enumerate(files):
        (held_out if number % 20 == 7 else train).extend(path.read_bytes())
    return tuple(torch.frombuffer(part[:limit], dtype=torch.uint8) for part in (train, held_out))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy over every byte of the batch, in nats."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build_model(options: argparse.Namespace) -> GPT:
    """Make the model with weights that depend on the seed alone."""
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads, options.context)
    return model.to(getattr(torch, options.dtype))


def build_loaders(options: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Make loaders of global batches ([batch, context] bytes and targets): `steps` to train on, a few held out."""
    train, held_out = (Windows(text, options.context) for text in read_text())
    generator = torch.Generator().manual_seed(options.seed)
    sampler = RandomSampler(train, num_samples=options.steps * options.batch, generator=generator)
    spread = range(0, len(held_out), max(1, len(held_out) // (16 * options.batch)))
    held_out = torch.utils.data.Subset(held_out, list(spread)[: 16 * options.batch])
    return DataLoader(train, options.batch, sampler=sampler), DataLoader(held_out, options.batch)


def learning_rate(step: int, steps: int) -> float:
    """Warm up over the first tenth of the steps, then fall along a cosine to a tenth."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def sample(model: nn.Module, prompts: list[str], length: int, context: int, seed: int) -> list[str]:
    """Continue each prompt by `length` bytes. Every rank takes part and draws the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    texts = [list(prompt.encode()) for prompt in prompts]
    for _ in range(length):
        tails = [text[-context:] for text in texts]
        # Attention is causal, so what fills the row after the text changes nothing before it.
        window = torch.tensor([tail + [0] * (context - len(tail)) for tail in tails])
        logits = model.predict(window)
        for text, tail, row in zip(texts, tails, logits, strict=True):
            likely = torch.topk(row[len(tail) - 1].float().cpu() / 0.8, 40)
            choice = torch.multinomial(torch.softmax(likely.values, 0), 1, generator=generator)
            text.append(int(likely.indices[choice]))
    return [bytes(text).decode(errors="replace") for text in texts]


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=288)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees")
    parser.add_argument("--batch", type=int, default=8, help="global batch: samples of one step over all processes")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--sample", type=int, default=120, help="bytes to write at the end")
    return parser.parse_args(arguments)


def main() -> None:
    """Train, measure on held-out files, and let the model write."""
    options = parse_options()
    model = build_model(options)
    loader, held_out = build_loaders(options)

    plan = headway.plan(model, loss, next(iter(loader)))
    model = headway.parallelize(model, loss, plan)
    if model.is_main:
        print(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options.steps))

    losses = []
    for step, batch in enumerate(model.batches(loader)):
        optimizer.zero_grad()
        value = model.forward_backward(batch)
        model.clip_grad_norm(1.0)
        optimizer.step()
        schedule.step()
        model.log(step, loss=value)
        losses.append(float(value))

    model.eval()
    held_out_losses = [float(model.evaluate(batch)) for batch in model.batches(held_out)]
    texts = sample(model, ["def ", "class "], options.sample, options.context, options.seed)
    if model.is_main:
        bits = sum(held_out_losses) / len(held_out_losses) / math.log(2)
        print(f"loss {losses[0]:.3f} at the start, {losses[-1]:.3f} at the end; {bits:.3f} bits per held-out byte")
        for text in texts:
            print("", *text.rstrip().splitlines(), sep="\n  | ")
        if model.run_directory is not None:
            print(f"\nWhat happened is in {model.run_directory}; to look at it: headway show {model.run_directory}")


if __name__ == "__main__":
    main()
