"""Training: carries a case out under its plans, and in one process with torch alone, and compares all numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import headway
from headway.collective.world import World
from headway.graph.record import record
from headway.planner.plan import Plan, shares
from headway.run.microbatch import Mean, Share, cut, join, num_samples, offsets
from headway.run.orders import Orders
from headway.run.parallel import ParallelModel
from headway.run.randomness import Chance, seeded
from headway.run.stage import Stage
from tests.soak.cases import Case, Way
from tests.soak.programs import Made, Recipe, batch_of, build, loss_of, recipe

TOLERANCE = 1e-9
SINGLE = 1e-5  # where something is computed in float32 on the way
MAX_NORM = 0.5


class Unfit(Exception):
    """A case that plain torch refuses, or that says nothing (numbers that are not finite)."""


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer; epsilons that leave what should be zero alone."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    if name == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=1e-3, eps=1e-4)
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4, foreach=name == "foreach")


def sizes_of(plan: Plan, samples: int) -> list[list[int]]:
    """Give the sizes of each copy's micro-batches of a global batch, in the order of its samples."""
    orders, share = Orders.of(plan, 0), Share(0, 0, samples)
    return [list(orders.sizes(share, mine)) for mine in shares(samples, plan.data)]


@dataclass
class Plain:
    """One process: the same micro-batches in order, with torch alone; random numbers as a single stage draws them."""

    made: Recipe
    case: Case
    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    optimizer: torch.optim.Optimizer
    stage: Stage | None = None
    seed: int = 0
    steps: int = 0
    evaluations: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def begin(made: Recipe, case: Case, seed: int) -> Plain:
        """Make the model and its optimizer."""
        model, loss = build(made), loss_of(made)
        stage = None
        if made.random:
            fixed = {"num_micro_batches": 1, "reduction": "mean"}
            plan = headway.plan(model, loss, batch_of(made, case.samples, 0), cluster="1xcpu:4GiB", fixed=fixed)
            assert plan.split is not None
            stage = Stage.of(plan.split, 0, model, loss, torch.device("cpu"))
        return Plain(made, case, model, loss, optimizer_of(case.optimizer, model.parameters()), stage, seed)

    def run(self, batch: Any, sizes: list[int], train: bool) -> float:
        """Give the loss over a global batch, and add up its gradients."""
        parts, metrics = [], {}
        total_samples = num_samples(batch)
        step = self.steps if train else f"{self.steps}, evaluation {self.evaluations}"
        for start, stop in offsets(sizes):
            piece = own(cut(batch, start, stop))  # a program may write what it is given
            if self.stage is not None:
                with seeded(0):
                    result = self.stage.run(piece, {}, {}, Chance(self.seed, step, start, stop - start)).output
            else:
                result = self.loss(self.model, piece)
            value, told = result if isinstance(result, tuple) else (result, {})
            parts.append(_counted(value, stop - start, self.made.loss))
            if train:  # the whole count is known only afterwards: gradients are scaled then
                parts[-1][0].backward()
            for name, metric in told.items():
                metrics.setdefault(name, []).append(_counted(metric, stop - start, "metric"))
        count = 1.0 if self.made.loss in ("sum", "constant") else sum(float(c) for _, c in parts)
        self.metrics = {
            name: sum(float(t) for t, _ in m) / sum(float(c) for _, c in m) if sum(float(c) for _, c in m) else 0.0
            for name, m in metrics.items()
        }
        self.last = count
        assert total_samples == sum(sizes)
        return float(sum(float(t.detach()) for t, _ in parts)) / count if count else float("nan")

    def tried(self, call: Callable[..., Any], *args: Any) -> Any:
        """Give what `call` does; Unfit when the program itself refuses, or gives nothing that can be compared."""
        try:
            return call(*args)
        except Exception as error:
            raise Unfit(repr(error)) from error

    def forward_backward(self, batch: Any, sizes: list[int]) -> float:
        """Add the gradients of the global loss to what there is."""
        before = {n: p.grad for n, p in self.model.named_parameters()}
        for parameter in self.model.parameters():
            parameter.grad = None
        value = self.run(batch, sizes, True)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                parameter.grad /= self.last or 1.0
                if before[name] is not None:
                    parameter.grad += before[name]
            else:
                parameter.grad = before[name]
        self.steps, self.evaluations = self.steps + 1, 0
        return value

    def evaluate(self, batch: Any, sizes: list[int]) -> float:
        """Give the loss in eval mode."""
        self.evaluations += 1
        with torch.no_grad(), _eval(self.model):
            return self.run(batch, sizes, False)

    def predict(self, batch: Any, sizes: list[int]) -> Any:
        """Give what the model returns, in eval mode, joined over micro-batches."""
        self.evaluations += 1
        found = []
        hook = self.model.register_forward_hook(lambda module, args, output: found.append(output))
        try:
            with torch.no_grad(), _eval(self.model):
                self.run(batch, sizes, False)
        finally:
            hook.remove()
        return join([vars(output) if isinstance(output, Made) else output for output in found], sizes)


def _counted(value: Any, samples: int, kind: str) -> tuple[Any, Any]:
    if isinstance(value, Mean):
        return value.total, value.count
    return (value, 1.0) if kind == "sum" else (value * samples, float(samples))


def own(batch: Any) -> Any:
    """Copy a batch, strides too."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)


def leaves(output: Any) -> list[Any]:
    """List what a model returned."""
    return tree_leaves([vars(leaf) if isinstance(leaf, Made) else leaf for leaf in tree_leaves(output)])


@contextmanager
def _eval(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def plan_for(way: Way, made: Recipe, case: Case) -> Plan:
    """Plan a case one way. Raises what `headway.plan` refuses with."""
    model, loss, batch = build(made), loss_of(made), batch_of(made, case.samples, 0)
    fixed = dict(way.fixed)
    if made.mixing or made.random:
        fixed["reduction"] = "sum" if made.loss in ("sum", "constant") else "mean"
    if way.places is not None and way.stages > 1:
        largest = -(-case.samples // way.data)
        piece = cut(batch, 0, -(-largest // fixed["num_micro_batches"]))
        names = [c.name for c in record(model, loss, piece).cuts]
        chosen = sorted({int(place * len(names)) for place in way.places})
        if len(chosen) == way.stages - 1:
            fixed["cuts"] = [names[i] for i in chosen]
    plan = headway.plan(model, loss, batch, cluster=f"{case.size}xcpu:4GiB", fixed=fixed)
    return plan if way.bucket_bytes is None else replace(plan, bucket_bytes=way.bucket_bytes)


class Differs(Exception):
    """Numbers that are not those of one process."""


@dataclass
class Compared:
    """Collects the differences of one case on one rank."""

    limit: float
    found: list[str] = field(default_factory=list)
    worst: float = 0.0
    zeros: list[str] = field(default_factory=list)

    def number(self, what: str, got: Any, want: Any) -> None:
        """Compare two numbers; both may be nan."""
        got, want = float(got), float(want)
        if got != got and want != want:
            return
        apart = abs(got - want) / max(1.0, abs(want))
        self.note(what, apart, f"{got!r}, not {want!r}")

    def tensors(self, what: str, got: Any, want: Any) -> None:
        """Compare two tensors, or the lack of one."""
        if want is None and got is not None and not got.any():
            self.zeros.append(what)
            return
        if (got is None) != (want is None):
            has, should = ("none" if value is None else "some" for value in (got, want))
            self.found.append(f"{what}: {has}, one process has {should}")
            return
        if got is None:
            return
        if got.shape != want.shape or got.dtype != want.dtype:
            self.found.append(f"{what}: {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}")
            return
        if got.numel():
            a, b = got.detach().double(), want.detach().double()
            self.note(what, float(((a - b).abs() / b.abs().clamp(min=1.0)).max()), "")

    def note(self, what: str, apart: float, text: str) -> None:
        """Keep what is too far apart."""
        self.worst = max(self.worst, apart)
        if not apart <= self.limit:
            self.found.append(f"{what}: {apart:.1e} apart {text}")


def carry_out(world: World, case: Case, folder: Path) -> tuple[str, str]:
    """Carry a case out; returns ("same" | "refused" | "unfit" | "differs", words)."""
    made = recipe(case.seed)
    if "moving" in made.names and any(way.data > 1 for way in case.ways):
        return "unfit", "a moving average without a rule is that of copy 0"
    if made.seed % 4 == 0 and any(dict(way.fixed).get("shard") == "parameters" for way in case.ways):
        return "refused", "a scalar parameter cannot be sliced"
    verdict = _together(world, lambda: _prepare(made, case))
    if isinstance(verdict, tuple):
        return verdict
    plans = verdict
    plain = Plain.begin(made, case, seed=case.seed + 5)
    compared = Compared(limit=SINGLE if "single" in made.names else TOLERANCE)
    try:
        Course(world, made, case, plans, plain, compared, folder).go()
    except Unfit as refusal:
        return "unfit", str(refusal)
    everywhere = enumerate(world.gather_objects(compared.found))
    found = [f"rank {rank}: {text}" for rank, texts in everywhere for text in texts]
    if found:
        return "differs", "\n".join(found[:12])
    zeros = [text for texts in world.gather_objects(compared.zeros) for text in texts]
    if zeros:
        return "zeros", f"{len(zeros)}: {zeros[0]}"
    return "same", f"{max(world.gather_objects(compared.worst)):.1e}"


def _prepare(made: Recipe, case: Case) -> list[Plan] | tuple[str, str]:
    """Try the program in one process, and plan it; all ranks come to the same."""
    plain = Plain.begin(made, case, 1) if not made.random else None
    if plain is not None:
        try:
            batch = batch_of(made, case.samples, 0)
            value = plain.forward_backward(batch, [case.samples])
        except Exception as error:
            return "unfit", repr(error)
        if not abs(value) < 1e6:
            return "unfit", f"loss {value}"
    else:
        try:
            model = build(made)
            result = loss_of(made)(model, own(cut(batch_of(made, case.samples, 0), 0, case.samples)))
            value = result[0] if isinstance(result, tuple) else result
            (value.total if isinstance(value, Mean) else value).backward()
        except Exception as error:
            return "unfit", repr(error)
    try:
        moves = any(action[0] == "move" for action in case.actions)
        return [plan_for(way, made, case) for way in case.ways[: 2 if moves else 1]]
    except headway.HeadwayError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except ValueError as error:
        if "Expected more than 1 value per channel" in str(error):
            return "unfit", repr(error)
        raise


def _together(world: World, prepare: Callable[[], Any]) -> Any:
    """Prepare on all ranks; what one raises, all hear of."""
    result, error = None, None
    try:
        result = prepare()
    except Exception as caught:
        error = caught
    said = world.gather_objects(None if error is None else repr(error))
    if error is not None:
        raise error
    if any(said):
        raise RuntimeError(f"another rank could not prepare: {said}")
    return result


@dataclass
class Course:
    """One case on its way."""

    world: World
    made: Recipe
    case: Case
    plans: list[Plan]
    plain: Plain
    compared: Compared
    folder: Path
    turn: int = 0

    def start(self, seed: int | None) -> None:
        """Put a fresh model under the plan of this turn."""
        model, loss = build(self.made, seed), loss_of(self.made)
        torch.manual_seed(self.case.seed + 5)
        self.parallel = ParallelModel(model, loss, self.plans[self.turn % len(self.plans)], self.world)
        self.optimizer = optimizer_of(self.case.optimizer, self.parallel.parameters())

    def go(self) -> None:
        """Do all actions, and compare what they give."""
        self.start(None)
        for number, (name, count, samples, time) in enumerate(self.case.actions):
            before = len(self.compared.found)
            try:
                getattr(self, f"act_{name}")(number, count, samples, time)
            except Exception as error:
                error.add_note(f"action {number} {name}")
                raise
            for index in range(before, len(self.compared.found)):
                self.compared.found[index] = f"action {number} {name}: {self.compared.found[index]}"
            if any(self.world.gather_objects(bool(self.compared.found))):
                return
        self.act_state(len(self.case.actions), 1, 0, None)

    def sizes(self, samples: int) -> list[int]:
        """Say what one process sees at once."""
        if not self.made.mixing and not self.case.same_pieces:
            return [samples]
        return [size for copy in sizes_of(self.parallel.plan, samples) for size in copy]

    def act_step(self, number: int, count: int, samples: int, time: int | None) -> None:
        """Add up `count` batches, clip, and step."""
        self.optimizer.zero_grad(set_to_none=number % 3 != 2)
        self.plain.optimizer.zero_grad(set_to_none=number % 3 != 2)
        for turn in range(count):
            batch = batch_of(self.made, samples + turn, 10 * number + turn, time)
            want = self.plain.tried(self.plain.forward_backward, batch, self.sizes(samples + turn))
            got = self.parallel.forward_backward(self.parallel.share(batch))
            self.compared.number("loss", got, want)
            self.metrics()
        if self.parallel.plan.shard == "none":
            wanted = dict(self.plain.model.named_parameters())
            for name, parameter in self.parallel.named_parameters():
                self.compared.tensors(f"gradient {name}", parameter.grad, wanted[name].grad)
        if number % 4 != 3:
            got = self.parallel.clip_grad_norm(MAX_NORM)
            want = torch.nn.utils.clip_grad_norm_(self.plain.model.parameters(), MAX_NORM)
            self.compared.number("norm", got, want)
        self.optimizer.step()
        self.plain.optimizer.step()

    def metrics(self) -> None:
        """Compare the metrics of what was done last."""
        for name, want in self.plain.metrics.items():
            self.compared.number(f"metric {name}", self.parallel.metrics[name], want)

    def act_evaluate(self, number: int, count: int, samples: int, time: int | None) -> None:
        """Compare the loss in eval mode."""
        batch = batch_of(self.made, samples, 10 * number, time)
        want = self.plain.tried(self.plain.evaluate, batch, self.sizes(samples))
        self.compared.number("loss", self.parallel.evaluate(self.parallel.share(batch) if count == 1 else batch), want)
        self.metrics()

    def act_predict(self, number: int, count: int, samples: int, time: int | None) -> None:
        """Compare what the model returns."""
        batch = batch_of(self.made, samples, 10 * number, time)
        want = leaves(self.plain.tried(self.plain.predict, batch, self.sizes(samples)))
        got = leaves(self.parallel.predict(batch if count == 1 else self.parallel.share(batch)))
        self.compared.number("number of outputs", len(got), len(want))
        for index, (a, b) in enumerate(zip(got, want, strict=False)):
            self.compared.tensors(f"output {index}", a, b)

    def act_move(self, number: int, count: int, samples: int, time: int | None) -> None:
        """Save, and go on under the other plan with what was saved."""
        path = self.folder / f"{self.case.seed}-{self.case.size}-{number}"
        headway.save(path, self.parallel, self.optimizer, step=number)
        self.turn += 1
        self.start(self.case.seed + 77)
        extra = headway.load(path, self.parallel, self.optimizer)
        self.plain.optimizer.zero_grad()  # nobody saves gradients
        self.compared.number("step", extra["step"], number)

    def act_eval_mode(self, number: int, count: int, samples: int, time: int | None) -> None:
        """Train one step in eval mode."""
        self.parallel.eval()
        self.plain.model.eval()
        self.act_step(number, count, samples, time)
        self.parallel.train()
        self.plain.model.train()

    def act_freeze(self, number: int, count: int, samples: int, time: int | None) -> None:
        """Freeze some layers for one step."""
        kept = []
        sliced = self.parallel.plan.shard == "parameters"  # which does not allow it
        for model in () if sliced else (self.parallel, self.plain.model):
            for name, parameter in model.named_parameters():
                if ".layers." in name or "body.own.1." in name:
                    kept.append((parameter, parameter.requires_grad))
                    parameter.requires_grad_(False)
        self.act_step(number, count, samples, time)
        for parameter, flag in kept:
            parameter.requires_grad_(flag)

    def act_state(self, number: int, count: int, samples: int, time: int | None) -> None:
        """Compare all parameters and buffers."""
        got, want = self.parallel.state_dict(), self.plain.model.state_dict()
        if list(got) != list(want):
            self.compared.found.append(f"names {sorted(set(got) ^ set(want))}, or their order")
            return
        for name, tensor in got.items():
            self.compared.tensors(name, tensor, want[name])
