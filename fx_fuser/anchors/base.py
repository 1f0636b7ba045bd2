"""What an anchor provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from fx_fuser.sites import Site
from fx_fuser.spell import Operand

Operands = Mapping[str, "Tensor | None"]
Config = Mapping[str, Any]


class Anchor(Protocol):
    """See the package's docstring for the vocabulary.

    kind: name in `fx_fuser.sites`. operands: names, in schema order, of its tensors.
    schema: operand and configuration arguments of its ops. products: names, `c` first.
    cast: operands that autocast brings to the compute dtype.
    """

    kind: str
    operands: tuple[str, ...]
    schema: str
    products: tuple[str, ...]
    cast: tuple[str, ...]

    def config(self, site: Site) -> dict[str, Any]:
        """The configuration arguments of the op call that replaces `site`."""
        ...

    def kernel_operands(self, operands: Operands, config: Config) -> list[Tensor | None]:
        """The operands, in order, without those that the kernel op does not read."""
        ...

    def product(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        """The main operation, by the library's own kernels: the products, real memory."""
        ...

    def product_like(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        """Products of right shape, stride and dtype, for fake tensors."""
        ...

    def empty_output(self, c: Tensor, shape: Sequence[int], dtype: Any) -> Tensor:
        """Memory for the result, in the memory format of c."""
        ...

    def z(self, operands: Operands, config: Config) -> Operand:
        """z as an expression over the names of `leaves`."""
        ...

    def leaves(
        self, operands: Operands, products: Sequence[Tensor], config: Config
    ) -> dict[str, Tensor | float]:
        """What z's expression reads, `c` first; vectors are per channel."""
        ...

    def spread(self, vector: Tensor) -> Tensor:
        """A per-channel leaf, shaped to broadcast against c."""
        ...

    def reference(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        """(z, statistics…) in the plain torch ops a user would write; differentiable."""
        ...

    def read_by_backward(self, needs: Mapping[str, bool]) -> tuple[str, ...]:
        """Operands of whose values, not only shapes, `leaves` or `backward` make use."""
        ...

    def outputs(
        self, y: Tensor, statistics: Sequence[Tensor], operands: Operands, config: Config
    ) -> list[Tensor]:
        """What the op returns to the graph: y, then the new running statistics if there are any."""
        ...

    def backward(
        self,
        operands: Operands,
        products: Sequence[Tensor],
        config: Config,
        dz: Tensor,
        needs: Mapping[str, bool],
    ) -> dict[str, Tensor]:
        """Gradients of the operands that need one; dz is in the accumulation dtype."""
        ...
