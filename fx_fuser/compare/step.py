"""One step of a model: forward and, in training, backward. And what one leaves, as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from fx_fuser.arguments import shown
from fx_fuser.compare.untouched import Kept
from fx_fuser.errors import OptionError
from fx_fuser.verify.accuracy import Observed, same_random_state

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class Float64(TorchFunctionMode):
    """float64 where a model asks for a narrower dtype by name, as norms and losses do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        cotangents = (kwargs or {}).get("grad_tensors")
        if func is torch.autograd.backward and cotangents is not None:  # as `Step` calls it
            # torch turns a mode off inside its own handler, where checkpoints recompute.
            with self:
                return _engine_run_backward(
                    tuple(args[0]), tuple(cotangents), False, False, (),
                    allow_unreachable=True, accumulate_grad=True,
                )  # fmt: skip
        func = torch.Tensor.double if func in _CASTS else func
        wide = {k: _wide(v) for k, v in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    is_narrow = isinstance(value, torch.dtype) and value in _NARROW
    return torch.float64 if is_narrow else value


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a result: of dicts, lists, tuples and dataclasses, however deep."""
    if isinstance(value, Tensor):
        yield name or "0", value
        return
    parts: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        parts = iter(value.items())
    elif isinstance(value, (list, tuple)):
        parts = iter(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    for key, part in parts:
        yield from named_tensors(part, f"{name}.{key}" if name else str(key))


@dataclass
class Step:
    """args, kwargs: the inputs, copied. grad: gradients are on. backward: the step has one.
    loss: of the model's result, or None for random cotangents of all outputs. leaves: what receives
    a gradient, by name. cotangents: drawn once, for all columns.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    grad: bool
    backward: bool
    loss: Callable[[Any], Tensor] | None = None
    leaves: dict[str, Tensor] = field(default_factory=dict)
    cotangents: dict[str, Tensor] = field(default_factory=dict)

    def run(self, call: Callable[..., Any]) -> dict[str, Tensor]:
        """The part that is timed. Returns the outputs by name."""
        torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(self.grad):
            result = call(*self.args, **self.kwargs)
            outputs = dict(named_tensors(result))
            if self.backward:
                self._run_backward(result, outputs)
        return {name: output.detach() for name, output in outputs.items()}

    def fresh(self, call: Callable[..., Any]) -> None:
        """A step that does not add to earlier gradients."""
        self.drop_grads()
        self.run(call)

    def drop_grads(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def first(self, call: Callable[..., Any], names: Mapping[int, str], held: Kept) -> None:
        """The first step of the uncompiled model. It finds the tensors that receive a gradient,
        whoever holds them, and takes their gradients into `held`. names: of known ones, by id.
        """
        self.backward, wanted = False, self.backward
        with torch.set_grad_enabled(self.grad):
            result = call(*self.args, **self.kwargs)
            outputs = dict(named_tensors(result))
            ends = [*outputs.values(), *([self._loss(result)] if wanted and self.loss else [])]
            for index, leaf in enumerate(leaves_of(ends) if wanted else ()):
                self.leaves[names.get(id(leaf), f"leaf {index}")] = leaf
                held.take_grad(leaf)
            self.backward = bool(self.leaves)
            if self.backward:
                self._run_backward(result, outputs)

    def _run_backward(self, result: Any, outputs: Mapping[str, Tensor]) -> None:
        if self.loss is not None:
            loss = self._loss(result)
            torch.autograd.backward([loss], [torch.ones_like(loss)])
            return
        ends = {name: output for name, output in outputs.items() if output.requires_grad}
        cotangents = [self.cotangent(name, output) for name, output in ends.items()]
        torch.autograd.backward(list(ends.values()), cotangents)

    def _loss(self, result: Any) -> Tensor:
        assert self.loss is not None
        loss = self.loss(result)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = shown(loss)
            if isinstance(loss, Tensor):
                what = f"{tuple(loss.shape)}, requires_grad={loss.requires_grad}"
            raise OptionError(
                f"loss returned {what}; return one number, as a tensor that requires a gradient"
            )
        return loss

    def cotangent(self, name: str, output: Tensor) -> Tensor:
        """Normally distributed, and in float64 the same numbers as in the model's dtype."""
        if name not in self.cotangents:
            generator = torch.Generator(output.device).manual_seed(len(self.cotangents))
            self.cotangents[name] = torch.randn(
                output.shape, generator=generator, dtype=output.dtype, device=output.device
            )
        return self.cotangents[name].to(output.dtype)

    def observe(self, call: Callable[..., Any], root: Any) -> Observed:
        """All values of one step; the buffers are those of `root`, if that is a module. Strides of
        results are left out: Inductor's may differ from eager's.
        """
        self.drop_grads()
        with same_random_state():
            outputs = self.run(call)
        seen = Observed({name: _copied(output) for name, output in outputs.items()})
        for name, leaf in self.leaves.items():
            if leaf.grad is not None:
                seen.grads[name], leaf.grad = _copied(leaf.grad), None
        if isinstance(root, nn.Module):
            seen.state = {name: _copied(buffer) for name, buffer in root.named_buffers()}
        return seen


def leaves_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that receive gradients in a backward from these outputs."""
    found: dict[int, Tensor] = {}
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None]
    found |= {id(o): o for o in outputs if o.requires_grad and o.is_leaf}
    seen = set(pending)
    while pending:
        node = pending.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return list(found.values())


def _copied(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()  # an embedding's
    return dense.detach().clone(memory_format=torch.contiguous_format)
