"""What `headway check` shows of a script: what it is made of, what stands in the way and on which line, its verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cli import main
from tests.screen.terminal import headway

HEAD = """
import sys, torch, headway
from torch import nn

"""
TAIL = """
def loss(model, batch):
    return model(batch["x"]).square().mean()

print("width", sys.argv[1:])
headway.plan(Net(), loss, {"x": torch.randn(6, 4), "scale": headway.Shared(torch.ones(2)), "name": "a"})
raise AssertionError("went on after the check")
"""
PLAIN = """
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(4, 4) for _ in range(5)))
"""
HARD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.cell = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 32, 2)
    def forward(self, x):
        if x.max() > 100:                                   # reads the batch
            x = x / 100
        x = self.norm(self.first(x))                        # changes buffers
        x = x + torch.randn(4)                              # one draw for all samples, the same under every plan
        x = x[torch.randperm(len(x))]                       # an order of the samples
        if x.mean() > 100:                                  # reads what depends on parameters
            x = x / 100
        return self.cell(x)[0]                              # cannot be cut
"""
WHOLE = """
from torch.utils.checkpoint import checkpoint
def loss(model, batch):
    return checkpoint(lambda x: model(x).square().mean(), batch["x"], use_reentrant=False)
"""


def script(folder: Path, net: str, tail: str = TAIL) -> list[str]:
    text = HEAD + net + tail
    (folder / "train.py").write_text(text)
    return text.splitlines()


def here(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run `headway check` in this process, which has torch already; gives the exit code and what was printed."""
    code = main(["check", str(folder / "train.py")])
    return code, capsys.readouterr().out


def test_a_plain_model(tmp_path: Path) -> None:
    script(tmp_path, PLAIN)
    screen = headway(tmp_path, "check", "train.py", "--width", "3", "--samples", "2", "--", "--samples", "9")
    assert screen.code == 0, screen.err
    lines = screen.out.splitlines()
    assert lines[0] == "width ['--width', '3', '--samples', '9']", "its own arguments reach the script"
    assert lines[1:4] == [
        "batch      batch['x']: float32 [6, 4]",
        "           batch['scale']: float32 [2], shared by all samples",
        "           batch['name']: str, given to every micro-batch",
    ]
    assert lines[4].startswith("program    2 samples, 7 torch calls in 6 module calls")
    assert "0 ... 4  Linear x 5, 1 call and 20 parameters each" in screen.out
    assert lines[-2].startswith("tried      2 stages against the undivided model, 2 samples: same to 1e-")
    assert lines[-1] == "verdict    can be split: a stage may begin at 6 places"
    assert not (tmp_path / "runs").exists()


def test_what_stands_in_the_way_is_told_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(tmp_path, HARD)

    def line(of: str) -> str:
        return f"train.py:{next(n for n, code in enumerate(text, 1) if of in code)}  "

    code, out = here(tmp_path, capsys)
    assert code == 0
    told = out[out.index("in the way") :]
    for place, words in (
        ("reads the batch", "bool reads a value of the batch"),
        ("reads what depends", "bool reads a value that depends on parameters"),
        ("an order of the samples", "randperm draws for a whole micro-batch"),
        ("changes buffers", "changes norm.num_batches_tracked, norm.running_mean and 1 more"),
        ("changes buffers", "1 place: a module changes its buffers here"),
        ("cannot be cut", "stays whole: cell (LSTM), 1 call with 100% of parameters"),
    ):
        assert line(place) + words in told
    assert "randn draws" not in told
    assert "the biggest boundary" in told


def test_one_that_cannot_be_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(tmp_path, PLAIN + WHOLE, TAIL[TAIL.index("print") :])
    code, out = here(tmp_path, capsys)
    assert code == 1 and "none of 6 places allowed" in out
    assert "backward computes a checkpointed region again" in out[out.index("in the way") :]
    assert out.splitlines()[-1].startswith("verdict    cannot be split into stages; copies")


def test_one_that_cannot_be_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_meta = TAIL.replace("Net(), loss", "net, loss").replace(
        "headway.plan(",
        """\
net = Net().to('meta')
net.huge = nn.Linear(1 << 20, 1 << 20, device='meta')  # 4 TiB: random weights do not fit
headway.plan(""",
    )
    text = script(tmp_path, HARD, on_meta)
    code, out = here(tmp_path, capsys)
    place = next(n for n, line in enumerate(text, 1) if "reads what depends" in line)
    assert code == 1 and "verdict    cannot be split: it could not be recorded" in out and f"train.py:{place}" in out
    script(tmp_path, PLAIN, TAIL.replace("headway.Shared(torch.ones(2))", "torch.ones(2)"))
    code, out = here(tmp_path, capsys)
    assert code == 1 and "batch['scale']" in out.split("verdict")[1]


def test_a_missing_script_is_refused(tmp_path: Path) -> None:
    screen = headway(tmp_path, "check", "nowhere.py")
    assert screen.code == 2 and "no such file" in screen.err and "headway check" in screen.err
