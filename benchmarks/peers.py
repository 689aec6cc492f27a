"""Us and the peers on the same work, in one process: time, peak memory, and the error of the result.

    benchmarks/setup_peers.sh /some/folder
    OMP_NUM_THREADS=1 /some/folder/bin/python benchmarks/peers.py --out results/bench

Reference (ours) and subject (a peer) are interleaved; a ratio is the median over pairs. Several peers are
fast because they compute something else: the error against one backward pass per example stands beside
every time. A peer that is not installed is named and left out.
"""

import argparse
import importlib
import importlib.metadata
import itertools
import json
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
from holdfast.bench import peak_bytes, ratio

SIZES = (784, 1024, 512, 256, 10)
BATCH = 100
T = 50


def network(sizes: tuple[int, ...] = SIZES) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def flat(pieces: object) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in pieces])


class Work:
    """A network, examples with structure, and the exact answers."""

    def __init__(self, n: int, trained: int = 60) -> None:
        self.model, self.n = network(), n
        draw = torch.Generator().manual_seed(1)
        centres = torch.rand(10, SIZES[0], generator=draw)
        self.y = torch.randint(10, (n,), generator=draw)
        noise = torch.randn(n, SIZES[0], generator=draw)
        self.x = (centres[self.y] + 0.5 * noise).clamp(0, 1)
        optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        for _ in range(trained):  # a network in training: gradients neither vanish nor agree
            pick = torch.randint(n, (BATCH,), generator=draw)
            optimizer.zero_grad()
            functional.cross_entropy(self.model(self.x[pick]), self.y[pick]).backward()
            optimizer.step()
        self.model.zero_grad()
        self.model.eval()
        self.twins: dict[str, nn.Module] = {}
        self.dataset = TensorDataset(self.x, self.y, torch.zeros(n, dtype=torch.int64))
        self.loader = DataLoader(TensorDataset(self.x, self.y), batch_size=BATCH)

    def twin(
        self, name: str, prepare: Callable[[nn.Module], nn.Module] = lambda m: m
    ) -> nn.Module:
        """The network again, for a peer that changes what it is given; made once, outside the timing."""
        if name not in self.twins:
            copy = network()
            copy.load_state_dict(self.model.state_dict())
            self.twins[name] = prepare(copy)
        return self.twins[name]

    def rows(self, loss: Callable[[Tensor, Tensor], Tensor]) -> "list[Tensor]":
        held = list(self.model.parameters())
        for x, y in zip(self.x, self.y, strict=True):
            value = loss(self.model(x.unsqueeze(0)), y.unsqueeze(0))
            yield flat(torch.autograd.grad(value, held))

    def mean(self, loss: Callable, of: Callable[[Tensor], Tensor]) -> Tensor:
        """The oracle: one backward pass per example, accumulated in float64."""
        total = torch.zeros(sum(p.numel() for p in self.model.parameters()), dtype=torch.float64)
        for row in self.rows(loss):
            total += of(row.double())
        return total / self.n


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, reduction="sum")


def squared_norm(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.square().sum()


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).square().sum() / truth.square().sum())


def shape_error(found: Tensor, truth: Tensor) -> float:
    """The error that is left with the best factor: what no tuning of λ can mend."""
    found = found.double()
    return float(1 - (found @ truth).square() / (found.square().sum() * truth.square().sum()))


# --------------------------------------------------------------------------- consolidation


def ours(work: Work, importance: hf.Importance, approximation: hf.Approximation) -> hf.Penalty:
    recipe = hf.Regularizer(importance, approximation)
    return recipe.consolidate(work.model, work.loader, seed=0, progress=False)


def loop(work: Work) -> Tensor:
    """Batch size one, as most repositories do it."""
    total = [torch.zeros_like(p) for p in work.model.parameters()]
    for x, y in zip(work.x, work.y, strict=True):
        work.model.zero_grad()
        functional.cross_entropy(work.model(x.unsqueeze(0)), y.unsqueeze(0)).backward()
        for t, p in zip(total, work.model.parameters(), strict=True):
            t += p.grad.square()
    work.model.zero_grad()
    return flat(total) / work.n


def original_scheme(work: Work) -> Tensor:
    """From its description: one graph of the whole set, a dense t × n sketch, t backward passes."""
    draw = torch.Generator().manual_seed(2)
    losses = []
    for x, y in work.loader:
        losses.append(functional.cross_entropy(work.model(x), y, reduction="none"))
    rows = torch.zeros(T, work.n)
    rows[torch.randint(T, (work.n,), generator=draw), torch.arange(work.n)] = (
        2 * torch.randint(2, (work.n,), generator=draw).float() - 1
    )
    sums = rows @ torch.cat(losses)
    held, factor = list(work.model.parameters()), []
    for value in sums:
        factor.append(flat(torch.autograd.grad(value, held, retain_graph=True)))
    return torch.stack(factor) / work.n**0.5


def avalanche_ewc(work: Work) -> Tensor:
    from avalanche.training.plugins.ewc import EWCPlugin

    optimizer = torch.optim.SGD(work.model.parameters(), 0.1)
    found = EWCPlugin(1.0).compute_importances(
        work.model, nn.CrossEntropyLoss(), optimizer, work.dataset, "cpu", BATCH
    )
    work.model.eval()
    work.model.zero_grad()
    return flat(importance.data for importance in found.values())


def avalanche_mas(work: Work) -> Tensor:
    from avalanche.training.plugins.mas import MASPlugin

    strategy = SimpleNamespace(
        model=work.model,
        device="cpu",
        train_mb_size=BATCH,
        optimizer=torch.optim.SGD(work.model.parameters(), 0.1),
        experience=SimpleNamespace(dataset=work.dataset),
    )
    found = MASPlugin()._get_importance(strategy)
    work.model.eval()
    work.model.zero_grad()
    return flat(importance.data for importance in found.values())


def backpack(work: Work) -> Tensor:
    from backpack import backpack as extension
    from backpack import extend
    from backpack.extensions import SumGradSquared

    model = work.twin("BackPACK", extend)
    criterion = extend(nn.CrossEntropyLoss(reduction="sum"))
    total = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in work.loader:
        model.zero_grad()
        with extension(SumGradSquared()):
            criterion(model(x), y).backward()
        for t, p in zip(total, model.parameters(), strict=True):
            t += p.sum_grad_squared
    return flat(total) / work.n


def laplace_fit(work: Work) -> object:
    from laplace import Laplace
    from laplace.curvature.backpack import BackPackEF

    fit = Laplace(
        work.twin("laplace"),
        "classification",
        subset_of_weights="all",
        hessian_structure="diag",
        backend=BackPackEF,
    )
    fit.fit(work.loader)
    return fit


def laplace(work: Work) -> Tensor:
    return laplace_fit(work).H.detach() / work.n


def nngeometry(work: Work, kind: str) -> object:
    from nngeometry.backend import TorchHooksJacobianBackend
    from nngeometry.layercollection import LayerCollection
    from nngeometry.object import pspace

    def log_likelihood(*batch: Tensor) -> Tensor:
        return functional.log_softmax(work.model(batch[0]), 1).gather(1, batch[1].unsqueeze(1))

    generator = TorchHooksJacobianBackend(
        layer_collection=LayerCollection.from_model(work.model),
        model=work.model,
        function=log_likelihood,
    )
    return getattr(pspace, kind)(generator=generator, examples=work.loader)


# --------------------------------------------------------------------------- penalty step


def avalanche_step(work: Work) -> Callable[[], object]:
    from avalanche.training.plugins.ewc import EWCPlugin
    from avalanche.training.utils import copy_params_dict, zerolike_params_dict

    plugin = EWCPlugin(1.0, mode="online", decay_factor=0.9)
    importance = zerolike_params_dict(work.model)
    for value in importance.values():
        value.data += 1
    plugin.importances[0], plugin.saved_params[0] = importance, copy_params_dict(work.model)
    zero = torch.zeros(())

    def step() -> None:
        strategy = SimpleNamespace(
            clock=SimpleNamespace(train_exp_counter=1),
            model=work.model,
            device="cpu",
            loss=zero + 0,
        )
        plugin.before_backward(strategy)
        strategy.loss.backward()

    return step


def nngeometry_step(work: Work, kind: str) -> Callable[[], object]:
    """As its own documentation shows for EWC."""
    from nngeometry.object import PVector

    matrix, anchor = nngeometry(work, kind), PVector.from_model(work.model).clone().detach()

    def step() -> None:
        matrix.vTMv(PVector.from_model(work.model) - anchor).backward()

    return step


def laplace_step(work: Work) -> Callable[[], object]:
    fit = laplace_fit(work)
    parameters = list(fit.model.parameters())
    return lambda: fit.log_prob(flat_graph(parameters), normalized=False).backward()


def loop_step(work: Work) -> Callable[[], object]:
    """A weighted square per parameter, by autograd."""
    held = [(p, p.detach().clone(), torch.ones_like(p)) for p in work.model.parameters()]
    return lambda: sum((w * (p - a).square()).sum() for p, a, w in held).backward()


def original_step(work: Work) -> Callable[[], object]:
    """‖F (θ − θ*)‖² of the flattened parameters, by autograd."""
    factor, parameters = original_scheme(work), list(work.model.parameters())
    anchor = flat(parameters)
    return lambda: (factor @ (flat_graph(parameters) - anchor)).square().sum().backward()


def flat_graph(pieces: object) -> Tensor:
    return torch.cat([p.reshape(-1) for p in pieces])


def our_step(work: Work, approximation: hf.Approximation) -> Callable[[], object]:
    penalty = ours(work, hf.EWC(), approximation)
    return lambda: penalty.add_grad_(work.model)


class Prepared:
    """A step that is made ready when it is first taken."""

    def __init__(self, prepare: Callable[[], Callable[[], object]]) -> None:
        self._prepare, self._step = prepare, None

    def __call__(self) -> None:
        self.ready()
        self._step()

    def ready(self) -> None:
        self._step = self._step or self._prepare()


# --------------------------------------------------------------------------- the run


@dataclass
class Line:
    """One comparison; times are medians in seconds, peaks rises of the process's memory."""

    what: str
    peer: str
    version: str
    slower: float
    low: float
    high: float
    our_seconds: float
    seconds: float
    our_peak_mb: float
    peak_mb: float
    our_error: float | None
    error: float | None
    shape_error: float | None
    pairs: int


def version(package: str) -> str:
    return importlib.metadata.version(package)


def define_vision_operators() -> None:
    """The CPU build of torch lacks what torchvision registers; it only needs the names."""
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--examples", type=int, default=3000)
    parser.add_argument(
        "--slow-examples",
        type=int,
        default=1000,
        help="for the loop, MAS and a second diagonal",
    )
    parser.add_argument("--row-examples", type=int, default=200, help="where all rows are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    define_vision_operators()
    lines: list[Line] = []
    missing: dict[str, str] = {}

    def compare(
        what: str,
        peer: str,
        package: str | None,
        reference: Callable[[], object],
        subject: Callable[[], object],
        check: Callable[[object], Tensor | float] | None = None,
        truth: Tensor | None = None,
        our_check: Callable[[object], Tensor | float] | None = None,
        pairs: int = options.pairs,
    ) -> None:
        try:
            label = version(package) if package else "as described"
            for step in (reference, subject):
                if isinstance(step, Prepared):
                    step.ready()
                    step()  # gradients that stay are no part of a step's memory
            found, peak = peak_bytes(subject)
        except (ImportError, importlib.metadata.PackageNotFoundError) as problem:
            missing[peer] = str(problem)
            print(f"{what}: {peer} left out: {problem}", flush=True)
            return
        mine, our_peak = peak_bytes(reference)

        def judge(result: object, how: Callable | None) -> tuple[float | None, float | None]:
            if how is None:
                return None, None
            value = how(result)
            if isinstance(value, float):
                return value, None
            assert truth is not None
            return error(value, truth), shape_error(value, truth)

        theirs, shape = judge(found, check)
        us, _ = judge(mine, our_check)
        del found, mine
        measured = ratio(reference, subject, pairs)
        line = Line(
            what, peer, label, measured.median, measured.low, measured.high,
            measured.reference_seconds, measured.subject_seconds, our_peak / 1e6, peak / 1e6,
            us, theirs, shape, pairs,
        )  # fmt: skip
        lines.append(line)
        print(
            f"{what:28} {peer:28} {label:12} {line.slower:7.2f} × our time, peak {line.peak_mb:7.0f} MB "
            f"(ours {line.our_peak_mb:.0f}), error {theirs if theirs is None else f'{theirs:.2g}'} "
            f"(ours {us if us is None else f'{us:.2g}'})",
            flush=True,
        )
        write(options.out, lines, missing, options)

    read = lambda penalty: penalty.matrix.diagonal()  # noqa: E731
    same = lambda found: found  # noqa: E731
    for size in (options.slow_examples, options.examples):
        work = Work(size)
        truth = work.mean(cross_entropy, torch.square)
        diagonal = lambda work=work: ours(work, hf.EWC(), hf.Diagonal())  # noqa: E731
        for peer, package, run in (
            ("Avalanche EWC", "avalanche-lib", avalanche_ewc),
            ("BackPACK SumGradSquared", "backpack-for-pytorch", backpack),
            ("laplace-torch diag", "laplace-torch", laplace),
            ("nngeometry PMatDiag", "nngeometry", lambda work: nngeometry(work, "PMatDiag")),
        ):
            check = (lambda matrix: matrix.get_diag()) if package == "nngeometry" else same
            compare(
                f"EWC diagonal, n = {size}",
                peer,
                package,
                diagonal,
                lambda run=run, work=work: run(work),
                check,
                truth,
                read,
            )
    compare(
        f"EWC Kronecker, n = {size}",
        "nngeometry PMatKFAC",
        "nngeometry",
        lambda: ours(work, hf.EWC(), hf.Kronecker()),
        lambda: nngeometry(work, "PMatKFAC"),
        lambda matrix: matrix.get_diag(),
        truth,
        read,
    )
    few = Work(options.row_examples)
    probe = torch.randn(len(truth), generator=torch.Generator().manual_seed(3))
    form = sum(float(row.double() @ probe.double()) ** 2 for row in few.rows(cross_entropy))
    form /= few.n

    def nngeometry_form(matrix: object) -> float:
        rows = matrix.data.reshape(-1, matrix.data.shape[-1])
        return (float((rows @ probe).double().square().sum()) / form - 1) ** 2

    compare(
        f"all {few.n} rows",
        "nngeometry PMatLowRank",
        "nngeometry",
        lambda: ours(few, hf.EWC(), hf.LowRank(few.n)),
        lambda: nngeometry(few, "PMatLowRank"),
        nngeometry_form,
        None,
        lambda penalty: (float(penalty.matrix.quadratic(probe)) / form - 1) ** 2,
    )
    slow = Work(options.slow_examples)
    compare(
        f"EWC diagonal, n = {slow.n}",
        "batch-size-1 loop",
        None,
        lambda: ours(slow, hf.EWC(), hf.Diagonal()),
        lambda: loop(slow),
        same,
        slow.mean(cross_entropy, torch.square),
        read,
        max(3, options.pairs // 5),
    )
    mas_truth = slow.mean(squared_norm, torch.abs)
    compare(
        f"MAS diagonal, n = {slow.n}",
        "Avalanche MAS",
        "avalanche-lib",
        lambda: ours(slow, hf.MAS(), hf.Diagonal()),
        lambda: avalanche_mas(slow),
        same,
        mas_truth,
    )
    for what, approximation, steps in (
        (
            "penalty step, diagonal",
            hf.Diagonal(),
            (
                ("Avalanche EWC", "avalanche-lib", avalanche_step),
                ("laplace-torch diag", "laplace-torch", laplace_step),
                ("nngeometry PMatDiag", "nngeometry", lambda w: nngeometry_step(w, "PMatDiag")),
                ("batch-size-1 loop", None, loop_step),
            ),
        ),
        (
            "penalty step, Kronecker",
            hf.Kronecker(),
            (("nngeometry PMatKFAC", "nngeometry", lambda w: nngeometry_step(w, "PMatKFAC")),),
        ),
        (
            f"penalty step, {few.n} rows",
            hf.LowRank(few.n),
            (
                (
                    "nngeometry PMatLowRank",
                    "nngeometry",
                    lambda w: nngeometry_step(w, "PMatLowRank"),
                ),
            ),
        ),
        (
            f"penalty step, t = {T}",
            hf.CountSketch(T),
            (("the original scheme", None, original_step),),
        ),
    ):
        mine = Prepared(lambda a=approximation: our_step(few, a))
        for peer, package, prepare in steps:
            compare(what, peer, package, mine, Prepared(lambda p=prepare: p(few)))
        few.model.zero_grad()
    compare(
        f"CountSketch, t = {T}, n = {work.n}",
        "the original scheme",
        None,
        lambda: ours(work, hf.EWC(), hf.CountSketch(T)),
        lambda: original_scheme(work),
        pairs=max(3, options.pairs // 3),
    )
    write(options.out, lines, missing, options)


def write(
    out: Path, lines: list[Line], missing: dict[str, str], options: argparse.Namespace
) -> None:
    """JSON and a Markdown table, after every comparison: a run that is cut short has its results."""
    out.mkdir(parents=True, exist_ok=True)
    meta = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/peers.py"
        f" --pairs {options.pairs} --examples {options.examples}"
        f" --slow-examples {options.slow_examples} --row-examples {options.row_examples}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "network": list(SIZES),
    }
    body = {"meta": meta, "lines": [asdict(line) for line in lines], "missing": missing}
    (out / "peers.json").write_text(json.dumps(body, indent=2) + "\n")
    show = lambda v: "–" if v is None else f"{v:.2g}"  # noqa: E731
    rows = [
        "| work | peer | version | its time / ours | quartiles | peak MB (ours) | error² (ours) "
        "| error², best factor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for x in lines:
        rows.append(
            f"| {x.what} | {x.peer} | {x.version} | **{x.slower:.2f}** | {x.low:.2f}–{x.high:.2f} "
            f"| {x.peak_mb:.0f} ({x.our_peak_mb:.0f}) | {show(x.error)} ({show(x.our_error)}) "
            f"| {show(x.shape_error)} |"
        )
    note = [
        "# Against the peers",
        "",
        f"`{meta['command']}`: perceptron {SIZES}, batches of {BATCH}, "
        f"torch {meta['torch']}, one thread, {meta['machine']}, "
        f"median of {options.pairs} interleaved pairs ({max(3, options.pairs // 5)} for the loop, "
        f"{max(3, options.pairs // 3)} for the original scheme). "
        "Errors are ‖Ω̂ − Ω‖²/‖Ω‖² of the diagonal against one "
        "backward pass per example in float64 (where all rows are kept: of the quadratic form along one "
        "random direction); “best factor” is what is left after the best rescaling. MAS of Avalanche "
        "is judged by its own definition, the mean |gradient| per example.",
        "",
        *rows,
        "",
    ]
    if missing:
        note += [f"Left out, not installed: {', '.join(missing)}.", ""]
    (out / "peers.md").write_text("\n".join(note))


if __name__ == "__main__":
    main()
