"""Random programs for `value_fuzz`: an anchor and a tail that one pattern must match.

What a program computes with are corners: numbers such as 1e30 and -0.0, several of them for one of
the pattern, operands and biases of the smallest and largest values there are, of other dtypes and
layouts. The anchor's product is exact, of small integers, so that z is the same to the bit whoever
multiplies; the corners get into z by the bias.

Two streams of random numbers: `shape` decides the text up to its numbers, dtypes and ranks, and so
which CUDA kernels there are; `value` all the rest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from value_writer import FREE, TailWriter, Text, substitute

from fx_fuser.graph.canonical import Arg, Expr, Operand
from fx_fuser.graph.epilogue import Z
from fx_fuser.graph.pattern import Pattern, flatten

inf, nan = math.inf, math.nan
_F32 = torch.finfo(torch.float32)
ORDINARY = (2.0, 0.5, 3, -1, -0.75, 1.7, -2, 0.1, 1, 10.0)
CORNERS = (
    0.0, -0.0, 1e-45, -1e-45, 1e-40, -3e-39, _F32.tiny, 1e-30, -1e-30, 1e30, -1e30, 1e38, -1e38,
    3e38, _F32.max, _F32.min, 2.0**23, 1.5 * 2.0**23, 2.0**24 - 1, 2.0**24 + 1, 16777217, 255, True,
    1e10, 1e-10, 1e-20, 1e20, 88.0, -104.0, 65504.0, 1e-7, 1e308, 5e-324,
)  # fmt: skip
ODD = (inf, -inf, nan)
# Several that stand for one.
FACTORS = ((2, 3), (1e30, 1e30), (1e-30, 1e30), (1e-30, 1e-30), (1e38, 10.0), (0.1, 10), (3, 1 / 3),
           (1e-40, 1e30), (inf, 0.0), (-0.0, -1), (0.1, 0.2), (1e20, 1e20))  # fmt: skip
TERMS = ((1e10, -1e10), (3e38, 3e38), (1.5 * 2.0**23, -1.5 * 2.0**23), (2.0**23, -(2.0**23)),
         (inf, -inf), (-0.0, 0.0), (1e-45, 1e-45), (0.1, 0.2), (1e30, -1e30), (16777216, 1),
         (65504.0, 65504.0))  # fmt: skip
# Where activations go subnormal, saturate, or have a corner.
STEPS = (-104.0, -100.0, -90.0, -88.5, -87.5, 88.5, 89.0, -20.0, 20.0, 20.5, -3.0, 3.0, 6.0, 1.0,
         -1.0, 0.0, -0.0, 0.5, -17.0, 9.0, 5.5)  # fmt: skip
NETS = ("float32", "float32", "float32", "bfloat16", "float16")
AFTER = {
    "": "",
    "squared": "\n".join(["y = y * y"] * 20),
    "doubled": "\n".join(["y = y + y"] * 20),
    "Fibonacci": "\n".join(["u = y", *["u, y = y, u + y"] * 14]),
}


def values(
    value: random.Random,
    shape: Sequence[int],
    dtype: torch.dtype,
    style: str = "",
    odd: bool = True,
) -> Tensor:
    """Of ordinary numbers and corners; odd: now and then of infinities and NaN too."""
    style = style or value.choice(("ordinary", "ordinary", "mixed", "mixed", "corners", "steps"))
    generator = torch.Generator().manual_seed(value.getrandbits(60))
    found = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    corners = [float(c) for c in (STEPS if style == "steps" else CORNERS)]
    corners = [c for c in corners if dtype == torch.float64 or abs(c) <= torch.finfo(dtype).max]
    if dtype == torch.float64:
        corners += [1e300, -1e300, 1e-310]
    ends = torch.finfo(dtype)
    corners += [ends.max, ends.min, ends.tiny, ends.tiny * ends.eps]
    if odd and value.randrange(8) == 0:
        corners += ODD
    table = torch.tensor(corners, dtype=torch.float64)
    chosen = table[torch.randint(len(corners), tuple(shape), generator=generator)]
    share = {"ordinary": 0.05, "mixed": 0.4}.get(style, 0.9)
    mask = torch.rand(tuple(shape), generator=generator) < share
    return torch.where(mask, chosen, found).to(dtype)


@dataclass
class Program:
    """source: defines anchor(…), tail(z, …), after(y) and forward(…), which takes `inputs`.

    pattern: the one that is active. expected: how many sites of it must fuse, None for any number.
    operands: names of what the tail takes, beside z. compiled: Dynamo must read it. save: the
    option. z_exact: any order of the anchor's sum gives the same z. stays: inputs that are on the
    CPU beside CUDA ones. geometry: stride and padding of the convolution. crowd: all patterns are
    active, and any of them may fuse any part of it. auto: none is, and the tail is grown.
    """

    source: str
    pattern: Pattern
    inputs: dict[str, Any]
    operands: list[str]
    expected: int | None
    train: bool
    dtype: torch.dtype
    label: str
    compiled: bool = False
    save: str = "auto"
    z_exact: bool = True
    training_norm: bool = False
    autocast: bool = False
    stays: list[str] = field(default_factory=list)
    geometry: tuple[int, int] = (1, 0)
    crowd: bool = False
    auto: bool = False
    fused: int = 0  # sites, when it was checked
    whole: bool = False  # one of them, grown, ends where the tail does
    acc: torch.dtype | None = None  # in which that computes
    apart: frozenset[str] = frozenset()  # operands that others read, beside what is grown
    has_bias: bool = False  # the tail began with it: a term of the anchor's sum, in any order


@dataclass
class Generator:
    """See `generate`."""

    shape: random.Random
    value: random.Random
    pattern: Pattern
    train: bool
    dtype: torch.dtype
    device: str
    inputs: dict[str, Any] = field(default_factory=dict)
    operands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plain: bool = True  # all floating operands of z's dtype
    training_norm: bool = False
    z_exact: bool = True
    z_shape: tuple[int, ...] = ()
    stays: list[str] = field(default_factory=list)
    geometry: tuple[int, int] = (1, 0)

    # -- the anchor ----------------------------------------------------------------------------

    def _small(self, *sizes: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.value.getrandbits(60))
        drawn = torch.randint(-2, 3, sizes, generator=generator).to(self.dtype)
        return drawn.requires_grad_(self.train)

    def _bias(self, size: int, weight: Tensor) -> Tensor:
        """Of corners; where the sum would be rounded, the weight is zero."""
        wild = values(self.value, (size,), self.dtype, self.value.choice(("steps", "corners")))
        keep = torch.zeros(size, dtype=torch.bool)
        for i in range(size):
            keep[i] = self.value.randrange(3) == 0
        plain = torch.tensor([self.value.randrange(-12, 13) / 4 for _ in range(size)])
        with torch.no_grad():
            weight[~keep] = 0
        return torch.where(keep, plain.to(self.dtype), wild).requires_grad_(self.train)

    def anchor(self) -> list[str]:
        """Its statements, the last of which returns z."""
        if self.pattern.kind in ("linear", "matmul"):
            return self._product()
        return self._convolution()

    def _product(self) -> list[str]:
        pick, of_linear = self.shape.choice, self.pattern.kind == "linear"
        lead = pick(((4,), (4,), (1,), (2, 3)))
        k, n = 3, pick((8, 8, 8, 1)) if of_linear else 8
        self.z_shape = (*lead, n)
        x, weight = self._small(*lead, k), self._small(n, k)
        bias = None
        if self.shape.randrange(4):
            bias = self._bias(n, weight)
        elif self.device == "cpu" and self.value.randrange(2):
            self.z_exact = False
            with torch.no_grad():
                x.copy_(values(self.value, x.shape, self.dtype, "mixed"))
                weight.copy_(values(self.value, weight.shape, self.dtype, "ordinary", odd=False))
        self.inputs["x"] = x
        if of_linear:
            self.inputs["weight"], w = weight, "weight.t()"
        else:
            turned = weight.detach().t().contiguous().requires_grad_(self.train)
            self.inputs["weight"], w = turned, "weight"
        forms = ["F.linear(x, weight)"] if of_linear else ["x @ weight", "torch.matmul(x, weight)"]
        forms += ["x @ weight.t()"] if of_linear else []
        if bias is not None:
            self.inputs["bias"] = bias
            forms = ["F.linear(x, weight, bias)"] if of_linear else []
            forms.append(f"torch.matmul(x, {w}) + bias")
            if len(lead) == 1:
                forms.append(f"torch.addmm(bias, x, {w})")
        return [f"return {pick(forms)}"]

    def _convolution(self) -> list[str]:
        pick, out = self.shape.choice, 6
        stride, padding = self.geometry = pick(((1, 1), (2, 0), (1, 0)))
        x, weight = self._small(2, 2, 5, 5), self._small(out, 2, 3, 3)
        if self.value.randrange(4) == 0:
            x = x.detach().to(memory_format=torch.channels_last).requires_grad_(self.train)
        self.inputs |= {"x": x, "weight": weight}
        bias = "None"
        norm = self.pattern.kind == "conv2d_batchnorm"
        if self.shape.randrange(2) or not norm:
            bias = "bias"
            self.inputs["bias"] = self._bias(out, weight) if not norm else self._small(out)
        with torch.no_grad():
            z = F.conv2d(x.float(), weight.float(), None, stride, padding)
        self.z_shape = tuple(z.shape)
        lines = [f"c = F.conv2d(x, weight, {bias}, {stride}, {padding})"]
        if not norm:
            return [f"return F.conv2d(x, weight, {bias}, {stride}, {padding})"]
        self.training_norm = bool(self.train and self.shape.randrange(3))
        generator = torch.Generator().manual_seed(self.value.getrandbits(60))
        ordinary = torch.rand(2, out, generator=generator)
        self.inputs["running_mean"] = (ordinary[0] * 4 - 2).to(self.dtype)
        self.inputs["running_var"] = (ordinary[1] + 0.5).to(self.dtype)
        gamma = values(self.value, (out,), self.dtype, "ordinary", odd=False)
        beta = values(self.value, (out,), self.dtype)
        self.inputs["gamma"] = gamma.requires_grad_(self.train)
        self.inputs["beta"] = beta.requires_grad_(self.train)
        norm_args = "running_mean, running_var, gamma, beta"
        return [*lines, f"return F.batch_norm(c, {norm_args}, {self.training_norm}, 0.1, 1e-5)"]

    # -- operands ------------------------------------------------------------------------------

    def _tensor(self, tensor: Tensor, note: str, grad: bool = True) -> Arg:
        name = f"t{len(self.operands)}"
        if tensor.is_floating_point():
            self.plain &= tensor.dtype == self.dtype and tensor.ndim > 0
            grad = bool(self.shape.randrange(4)) and self.train and grad
            tensor = tensor.detach().requires_grad_(grad)
        self.inputs[name] = tensor
        self.operands.append(name)
        self.notes.append(note)
        return Arg(name)

    def condition(self) -> Arg:
        kind = self.shape.randrange(2)
        full = self.z_shape if kind else self.z_shape[-1:]
        generator = torch.Generator().manual_seed(self.value.getrandbits(60))
        return self._tensor(torch.rand(full, generator=generator) < 0.5, "condition")

    def operand(self) -> Arg:
        """One that is new, or one there is already."""
        tensors = [n for n in self.operands if self.inputs[n].dtype != torch.bool]
        if tensors and self.shape.randrange(4) == 0:
            self.notes.append("again")
            return Arg(self.shape.choice(tensors))
        kind, dtype, full = self.shape.randrange(20), self.dtype, self.z_shape
        generator = torch.Generator().manual_seed(self.value.getrandbits(60))
        vector = (full[1], 1, 1) if len(full) == 4 else full[-1:]
        if kind == 0:
            return self._tensor(values(self.value, (), dtype), "0-d")
        if kind == 1:
            return self._tensor(values(self.value, (), torch.float64), "0-d float64", False)
        if kind == 2:
            held = self._tensor(values(self.value, (), self.shape.choice((dtype, torch.float32))),
                                "0-d on the CPU", False)  # fmt: skip
            self.stays.append(held.name)
            return held
        if kind == 3:
            wide = self.shape.choice((full, vector))
            return self._tensor(values(self.value, wide, torch.float64), "float64")
        if kind == 4:
            other = torch.bfloat16 if dtype == torch.float32 else torch.float32
            wide = self.shape.choice((full, vector))
            return self._tensor(values(self.value, wide, other), str(other))
        if kind == 5:
            of = self.shape.choice((torch.int64, torch.int32, torch.uint8))
            table = torch.tensor([0, 1, 2, 255, 7, 3, 16777217 if of != torch.uint8 else 5])
            drawn = table[torch.randint(len(table), full, generator=generator)]
            return self._tensor(drawn.to(of), str(of))
        if kind == 6:
            return self._tensor(torch.rand(full, generator=generator) < 0.5, "bool")
        if kind in (7, 8):
            return self._tensor(values(self.value, vector, dtype), "vector")
        if kind == 9:
            return self._tensor(values(self.value, (*full[:-1], 1), dtype), "column")
        if full[-1] == 1 and self.shape.randrange(2):  # a gate: the result has more columns
            full = (*full[:-1], 5)
        return self._tensor(self._laid_out(values(self.value, full, dtype)), "full")

    def _laid_out(self, tensor: Tensor) -> Tensor:
        """In rows, or another layout."""
        kind = self.value.randrange(10)
        if kind == 0:  # every second column
            return torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]
        if kind == 1:
            return tensor[..., :1].expand(tensor.shape)
        if kind == 2:
            return tensor[:1].expand(tensor.shape)
        if kind == 3:
            return tensor.mT.contiguous().mT
        if kind == 4:  # from the second element on
            return torch.cat((tensor.flatten()[:1], tensor.flatten()))[1:].view(tensor.shape)
        return tensor

    def number(self, role: str, count: int) -> list[str]:
        pick = self.value.choice
        if count > 1:
            known = [g for g in (FACTORS if role == "mul" else TERMS) if len(g) == count]
            if known and self.value.randrange(3):
                group = list(pick(known))
                self.value.shuffle(group)
                return [repr(n) for n in group]
            if count == 3 and role == "add":
                group = [3e38, 3e38, -3e38]
                self.value.shuffle(group)
                return [repr(n) for n in group]
        found = []
        for _ in range(count):
            kind = self.value.randrange(20)
            n = pick(ORDINARY) if kind < 11 else pick(ODD) if kind == 19 else pick(CORNERS)
            # A bound of NaN is refused: torch's own kernels differ on it.
            if role == "bound" and not (abs(n) <= _F32.max or math.isinf(n)):
                n = 6.0
            found.append(repr(n))
        return found

    def wildcard(self, name: str, bounds: bool) -> Operand:
        """bounds: the limits of this program are numbers."""
        if name.startswith("cond"):
            return self.condition()
        if name.startswith(("low", "high")):
            return FREE if bounds else self.operand()
        kind = self.shape.randrange(10)
        if kind == 0:
            return Z
        return FREE if kind < 5 and not name.startswith("t") else self.operand()

    # -- the program ---------------------------------------------------------------------------

    def program(self) -> Program:
        lines = self.anchor()
        bounds = bool(self.shape.randrange(3))
        found = {n: self.wildcard(n, bounds) for n in self.pattern.wildcards}
        itself = self._reads_itself(found)
        tail = substitute(self.pattern.epilogue, found)
        names = {"z": Text("z", wide=True)}
        for name in self.operands:
            tensor = self.inputs[name]
            names[name] = Text(name, wide=tensor.is_floating_point() and tensor.ndim > 0)
        in_place = self.shape.randrange(4) == 0
        writer = TailWriter(self.shape, self.number, names, self.plain, in_place)
        if itself is not None:
            names["self"] = Text("s", wide=True)
            writer.lines.append(f"s = {writer._render(itself).code}")
            writer.known.clear()
        writer.write(tail)
        autocast = (
            lines[0].startswith("return F.linear(")
            and self.dtype == torch.float32
            and not self.train
            and self.value.randrange(60) == 0
        )
        after = self.shape.choice(("", "", "", "", "", "", *AFTER))
        program = Program(
            self._source(lines, writer.lines, after, autocast),
            self.pattern,
            self.inputs,
            self.operands,
            0 if itself is not None else 1,
            self.train,
            self.dtype,
            f"{self.pattern.name}: {', '.join(self.notes)}; {after}",
            autocast,
            self.value.choice(("auto", "auto", "auto", "memory")),
            self.z_exact,
            self.training_norm,
            autocast,
            self.stays,
            self.geometry,
        )
        if "bias" in self.inputs and lines[-1].endswith("+ bias") and not self.pattern.size:
            program.expected = None  # the product alone may be taken, and then there is no bias
        if self.value.randrange(150) == 0:
            self._subclass(program)
        elif self.dtype == torch.float32 and self.value.randrange(8) == 0:
            fits = program.expected == 1 and self.pattern.kind != "conv2d_batchnorm"
            program.crowd = fits and not autocast
        return program

    def _reads_itself(self, found: dict[str, Operand]) -> Expr | None:
        """s * s, where s is computed from z inside the pattern: refused."""
        e = self.pattern.epilogue
        if self.shape.randrange(40) or not isinstance(e, Expr) or e.op not in ("mul", "add"):
            return None
        inner = [a for a in e.args if isinstance(a, Expr) and a.op in ("tanh", "sigmoid", "gelu")]
        free = [a.name for a in e.args if isinstance(a, Arg) and a != Z]
        if not inner or not free or not all(s == Z for s in inner[0].args):
            return None
        found[free[0]] = Arg("self")
        return inner[0]

    def _subclass(self, program: Program) -> None:
        """One of the operands of the user's own class: a refusal, and torch's own results."""
        name = self.value.choice([n for n in self.inputs if "running" not in n])
        own = self.inputs[name].detach().as_subclass(Named)
        self.inputs[name] = own.requires_grad_(self.inputs[name].requires_grad)
        program.expected = 0 if program.expected is not None else None
        if name in self.operands:  # what comes before it may fuse all the same
            program.expected, program.crowd = None, True
        program.label += f", {name} of a class of its own"

    def _source(
        self, anchor: Sequence[str], tail: Sequence[str], after: str, autocast: bool
    ) -> str:
        given = ", ".join(n for n in self.inputs if n not in self.operands)
        used = ", ".join(["z", *self.operands])
        later = (
            "y.detach()" if self.train else "y"
        )  # AOTAutograd would make 0 · inf of its gradient
        body = [f"z = anchor({given})", f"y = tail({used})", f"return y, after({later})"]
        if autocast:
            region = f'with torch.autocast("{self.device}", torch.bfloat16):'
            body = [region, *(f"    {line}" for line in body[:2]), body[2]]
        parts = [
            (f"anchor({given})", anchor),
            (f"tail({used})", tail),
            ("after(y)", [*AFTER[after].split("\n"), "return y"]),
            (f"forward({', '.join(self.inputs)})", body),
        ]
        text = (
            f"def {head}:\n" + "\n".join(f"    {s}" for s in lines if s) for head, lines in parts
        )
        return "\n\n\n".join(text) + "\n"


class Named(Tensor):
    """A class of the user's own."""


def generate(
    structure: int | str,
    seed: int,
    patterns: Sequence[Pattern],
    train: bool,
    dtype: str = "",
    device: str = "cpu",
    auto: bool = False,
) -> Program:
    """The program of this structure with the values of this seed, all on the CPU.

    auto: its tail is that of several patterns, one behind the other, and none of them is active.
    Raises NothingToWrite.
    """
    shape, value = random.Random(f"shape {structure}"), random.Random(f"value {seed}")
    net = dtype or ("float64" if shape.randrange(25) == 0 else shape.choice(NETS))
    pattern = shape.choice(patterns)
    of = getattr(torch, net)
    if not auto:
        return Generator(shape, value, pattern, train, of, device).program()
    tails = [shape.choice(patterns) for _ in range(shape.choice((1, 2, 2, 3, 4)))]
    program = Generator(shape, value, _chained(pattern, tails), train, of, device).program()
    program.auto, program.crowd = True, False
    own = any(type(v) is Named for v in program.inputs.values())
    program.expected = None if own or device != "cpu" else 1
    return program


def _chained(first: Pattern, tails: Sequence[Pattern]) -> Pattern:
    """The tails one behind the other, behind the first one's anchor."""
    epilogue: Operand = Z
    wildcards: list[str] = []
    for i, pattern in enumerate(tails):
        named = {n: f"{n}_{i}" for n in pattern.wildcards}
        values: dict[str, Operand] = {n: Arg(new) for n, new in named.items()}
        epilogue = substitute(pattern.epilogue, {**values, Z.name: epilogue})
        wildcards += named.values()
    name = "+".join(p.name.removeprefix("value_") for p in tails)
    return Pattern(name, first.kind, flatten(epilogue), tuple(wildcards), None)
