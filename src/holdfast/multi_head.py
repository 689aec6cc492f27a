"""One network, a head per task: the input says which head answers."""

from torch import Tensor, nn

__all__ = ["MultiHead"]


class MultiHead(nn.Module):
    """Reads the number of the task from the last input column and answers with that task's outputs.

    Args:
        body: A network with ``heads`` times as many outputs as a head has.
        heads: The number of heads.
    """

    def __init__(self, body: nn.Module, heads: int) -> None:
        super().__init__()
        self.body, self.heads = body, heads

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of one head per example, shape (batch, outputs of a head)."""
        outputs: Tensor = self.body(x[:, :-1]).unflatten(1, (self.heads, -1))
        head = x[:, -1].long().view(-1, 1, 1).expand(-1, 1, outputs.shape[2])
        return outputs.gather(1, head).squeeze(1)
