"""Mixed precision, gradient accumulation and clipping: where ``add_grad_`` belongs.

Once per optimiser step, after the last backward pass (and after unscaling), before clipping. The
result is the same as adding ``penalty(model)`` to the loss once per step; only cheaper.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast as hf


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))


def task(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(512, 8, generator=g)
    return x, (x @ torch.randn(8, 4, generator=g)).argmax(1)


def train(
    model: nn.Module, x: Tensor, y: Tensor, penalty: hf.Penalty | None, *, in_loss: bool = False
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu")  # on a GPU: "cuda", and autocast with float16
    micro = 4  # micro-batches per optimiser step
    for batch_x, batch_y in zip(x.split(128), y.split(128), strict=True):
        for i, (mx, my) in enumerate(zip(batch_x.chunk(micro), batch_y.chunk(micro), strict=True)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(mx), my) / micro
                if penalty is not None and in_loss and i == micro - 1:
                    loss = loss + penalty(model)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if penalty is not None and not in_loss:
            penalty.add_grad_(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def main() -> None:
    regularizer = hf.Regularizer(hf.EWC(), hf.CountSketch(size=20), strength=10)
    first, second = task(1), task(2)
    weights = {}
    for in_loss in (False, True):
        model = network()
        train(model, *first, None)
        data = list(zip(first[0].split(64), first[1].split(64), strict=True))
        penalty = regularizer.consolidate(model, data, seed=0)
        train(model, *second, penalty, in_loss=in_loss)
        weights[in_loss] = nn.utils.parameters_to_vector(model.parameters()).detach()
    gap = (weights[True] - weights[False]).abs().max().item()
    print(f"largest difference between add_grad_ and penalty(model) in the loss: {gap:.1e}")


if __name__ == "__main__":
    main()
