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
from value_numbers import CORNERS, F32, ODD, ORDINARY, is_ordinary, values
from value_writer import FREE, TailWriter, Text, substitute

from fx_fuser.graph.epilogue import Z
from fx_fuser.graph.match.pattern import Pattern
from fx_fuser.graph.match.trace import flatten
from fx_fuser.graph.read.canonical import Arg, Expr, Operand

inf, nan = math.inf, math.nan
# Several that stand for one.
FACTORS = ((2, 3), (1e30, 1e30), (1e-30, 1e30), (1e-30, 1e-30), (1e38, 10.0), (0.1, 10), (3, 1 / 3),
           (1e-40, 1e30), (inf, 0.0), (-0.0, -1), (0.1, 0.2), (1e20, 1e20))  # fmt: skip
TERMS = ((1e10, -1e10), (3e38, 3e38), (1.5 * 2.0**23, -1.5 * 2.0**23), (2.0**23, -(2.0**23)),
         (inf, -inf), (-0.0, 0.0), (1e-45, 1e-45), (0.1, 0.2), (1e30, -1e30), (16777216, 1),
         (65504.0, 65504.0))  # fmt: skip
NETS = ("float32", "float32", "float32", "bfloat16", "float16")
AFTER = {
    "": "",
    "squared": "\n".join(["y = y * y"] * 20),
    "doubled": "\n".join(["y = y + y"] * 20),
    "Fibonacci": "\n".join(["u = y", *["u, y = y, u + y"] * 14]),
}


@dataclass(frozen=True)
class Fused:
    """Which of a tail's calls are fused, `last` the last of them: negative where none is. dtype: of
    its result. count: of all calls."""

    calls: frozenset[int]
    last: int
    dtype: torch.dtype
    count: int


@dataclass
class Program:
    """source: defines anchor(…), tail(z, …), after(y) and forward(…), which takes `inputs`.

    pattern: the one that is active. expected: how many sites of it must fuse, None for any number.
    operands: names of what the tail takes, beside z. compiled: Dynamo must read it. save: the
    option. z_exact: any order of the anchor's sum gives the same z. stays: inputs that are on the
    CPU beside CUDA ones. geometry: stride and padding of the convolution. crowd: all patterns are
    active, and any of them may fuse any part of it. auto: none is, and the tail is grown.
    extreme: some of its values are of magnitudes that nets do not have.
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
    extreme: bool = False
    fused: int = 0  # sites, when it was checked
    whole: bool = False  # one of them, grown, ends where the tail does
    acc: torch.dtype | None = None  # in which that computes
    apart: frozenset[str] = frozenset()  # operands that others read, beside what is grown
    bias: Tensor | None = (
        None  # what the tail added first: a term of the anchor's sum, in any order
    )
    varied: frozenset[str] = frozenset()  # results that torch rounds otherwise in other layouts
    part: Fused | None = None  # what is fused, where that is not all of the tail
    folded: bool = False  # into the convolution's weight
    uncompared: str = ""  # why nothing was compared


@dataclass
class Generator:
    """See `generate`."""

    shape: random.Random
    value: random.Random
    pattern: Pattern
    train: bool
    dtype: torch.dtype
    device: str
    extreme: bool = True
    more: random.Random = field(default_factory=random.Random)  # draws what is extreme
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

    def _values(
        self, shape: Sequence[int], dtype: torch.dtype, style: str = "", odd: bool = True
    ) -> Tensor:
        return values(self.value, shape, dtype, style, odd, self.extreme)

    def _small(self, *sizes: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.value.getrandbits(60))
        drawn = torch.randint(-2, 3, sizes, generator=generator).to(self.dtype)
        return drawn.requires_grad_(self.train)

    def _bias(self, size: int, weight: Tensor) -> Tensor:
        """Of corners; where the sum would be rounded, the weight is zero."""
        wild = self._values((size,), self.dtype, self.value.choice(("steps", "corners")))
        keep = torch.zeros(size, dtype=torch.bool)
        for i in range(size):
            keep[i] = self.value.randrange(3) == 0
        plain = torch.tensor([self.value.randrange(-12, 13) / 4 for _ in range(size)])
        with torch.no_grad():
            weight[~keep] = 0
        bias = self._dead(torch.where(keep, plain.to(self.dtype), wild))
        return bias.requires_grad_(self.train)

    def _is_sparse(self) -> bool:
        """May x have numbers of all magnitudes? On a GPU fp32 is multiplied in fp16 halves."""
        exact = self.device == "cpu" or self.dtype.itemsize == 2
        return exact and self.extreme and self.more.randrange(3) == 0

    def _far_apart(self, x: Tensor, weight: Tensor) -> None:
        """x to 1e37, and one weight for each result: their product is exact."""
        with torch.no_grad():
            far = self._values(x.shape, self.dtype, "mixed", odd=False)
            x.copy_(torch.where(far.abs() <= 1e37, far, far.sign() * 1e37))
            rows = weight.view(len(weight), -1)
            generator = torch.Generator().manual_seed(self.more.getrandbits(60))
            taps = torch.randint(rows.shape[1], (len(rows),), generator=generator)
            kept = torch.zeros_like(rows)
            sign = torch.randint(0, 2, (len(rows),), generator=generator) * 2 - 1
            kept[torch.arange(len(rows)), taps] = sign.to(self.dtype)
            rows.copy_(kept)

    def _dead(self, vector: Tensor) -> Tensor:
        """Some of its units so far below zero that they never fire."""
        if self.extreme and self.more.randrange(4) == 0:
            for i in range(0, len(vector), 2):
                far = min(10.0 ** self.more.randrange(1, 38), torch.finfo(vector.dtype).max)
                vector[i] = -far
        return vector

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
                x.copy_(self._values(x.shape, self.dtype, "mixed"))
                weight.copy_(self._values(weight.shape, self.dtype, "ordinary", odd=False))
        elif self._is_sparse():
            self._far_apart(x, weight)
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
        self.training_norm = bool(norm and self.train and self.shape.randrange(3))
        if not self.training_norm and self._is_sparse():
            self._far_apart(x, weight)
        if not norm:
            return [f"return F.conv2d(x, weight, {bias}, {stride}, {padding})"]
        generator = torch.Generator().manual_seed(self.value.getrandbits(60))
        ordinary = torch.rand(2, out, generator=generator)
        self.inputs["running_mean"] = (ordinary[0] * 4 - 2).to(self.dtype)
        var = ordinary[1] + 0.5
        if self.extreme and self.more.randrange(3) == 0:
            var = var * 10.0 ** -self.more.choice((2, 4, 10, 37))
        self.inputs["running_var"] = var.to(self.dtype)
        gamma = self._values((out,), self.dtype, "ordinary", odd=False)
        beta = self._dead(self._values((out,), self.dtype))
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
            return self._tensor(self._values((), dtype), "0-d")
        if kind == 1:
            return self._tensor(self._values((), torch.float64), "0-d float64", False)
        if kind == 2:
            held = self._tensor(self._values((), self.shape.choice((dtype, torch.float32))),
                                "0-d on the CPU", False)  # fmt: skip
            self.stays.append(held.name)
            return held
        if kind == 3:
            wide = self.shape.choice((full, vector))
            return self._tensor(self._values(wide, torch.float64), "float64")
        if kind == 4:
            other = torch.bfloat16 if dtype == torch.float32 else torch.float32
            wide = self.shape.choice((full, vector))
            return self._tensor(self._values(wide, other), str(other))
        if kind == 5:
            of = self.shape.choice((torch.int64, torch.int32, torch.uint8))
            table = torch.tensor([0, 1, 2, 255, 7, 3, 16777217 if of != torch.uint8 else 5])
            drawn = table[torch.randint(len(table), full, generator=generator)]
            return self._tensor(drawn.to(of), str(of))
        if kind == 6:
            return self._tensor(torch.rand(full, generator=generator) < 0.5, "bool")
        if kind in (7, 8):
            return self._tensor(self._values(vector, dtype), "vector")
        if kind == 9:
            return self._tensor(self._values((*full[:-1], 1), dtype), "column")
        if full[-1] == 1 and self.shape.randrange(2):  # a gate: the result has more columns
            full = (*full[:-1], 5)
        return self._tensor(self._laid_out(self._values(full, dtype)), "full")

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
            if not self.extreme:
                known = [g for g in known if all(map(is_ordinary, g))]
            if known and self.value.randrange(3):
                group = list(pick(known))
                self.value.shuffle(group)
                return [repr(n) for n in group]
            if count == 3 and role == "add" and self.extreme:
                group = [3e38, 3e38, -3e38]
                self.value.shuffle(group)
                return [repr(n) for n in group]
        found = []
        for _ in range(count):
            kind = self.value.randrange(20)
            kind = kind if self.extreme else 0
            n = pick(ORDINARY) if kind < 11 else pick(ODD) if kind == 19 else pick(CORNERS)
            # A bound of NaN is refused: torch's own kernels differ on it.
            if role == "bound" and not (abs(n) <= F32.max or math.isinf(n)):
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
            extreme=self.extreme,
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
    extreme: bool = True,
) -> Program:
    """The program of this structure with the values of this seed, all on the CPU.

    auto: its tail is that of several patterns, one behind the other, and none of them is active.
    extreme: with values of all magnitudes. Raises NothingToWrite.
    """
    shape, value = random.Random(f"shape {structure}"), random.Random(f"value {seed}")
    net = dtype or ("float64" if shape.randrange(25) == 0 else shape.choice(NETS))
    pattern = shape.choice(patterns)
    of, more = getattr(torch, net), random.Random(f"extreme {seed}")
    if not auto:
        return Generator(shape, value, pattern, train, of, device, extreme, more).program()
    tails = [shape.choice(patterns) for _ in range(shape.choice((1, 2, 2, 3, 4)))]
    chain = _chained(pattern, tails)
    program = Generator(shape, value, chain, train, of, device, extreme, more).program()
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
