"""Programs that were once described wrongly, or refused though they are attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from describing import assert_described, traced
from torch import Tensor

B, H, L, D = 2, 4, 4, 4
Attend = Callable[..., Any]


def qkv() -> list[Tensor]:
    return [torch.randn(B, H, L, D, requires_grad=True) for _ in range(3)]


def weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 0.5).softmax(-1)


def like_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.type_as(weights(q, k)) @ v


def to_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.to(weights(q, k)) @ v


@pytest.mark.parametrize("run", [like_weights, to_weights])
def test_a_cast_to_the_dtype_of_weights_reads_no_weights(run: Attend) -> None:
    assert not traced(run, *qkv()).sites


# A user's operators that have names of torch's views and copies, and change values.
NAMES = ("clone", "flatten", "expand")


@pytest.fixture(scope="module")
def doubling() -> Iterator[dict[str, Any]]:
    library = torch.library.Library("attention_faults", "DEF")
    for name in NAMES:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x * 2, "CompositeImplicitAutograd")
    yield {name: getattr(torch.ops.attention_faults, name) for name in NAMES}
    library._destroy()


@pytest.mark.parametrize("name", NAMES)
def test_a_users_operator_is_no_view_whatever_its_name(name: str, doubling: Any) -> None:
    f = doubling[name]
    assert not traced(lambda q, k, v: f(q @ k.mT).softmax(-1) @ v, *qkv()).sites
    assert not traced(lambda q, k, v: f(weights(q, k)) @ v, *qkv()).sites
    one = traced(lambda q, k, v: f(weights(q, f(k)) @ v), *qkv())
    assert len(one.sites) == 1 and not one.sites[0].views
    assert_described(one)


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DeepSeek-V3: k is put together in place."""
    c = k.new_empty(B, H, L, D)
    c[..., :2] = k[..., :2]
    c[..., 2:] = k[..., 2:]
    return (q @ c.transpose(2, 3)).softmax(-1) @ v


def filled_and_read_as_it_is(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    c = torch.zeros(B, H, L, D)
    c[..., :2] = v[..., :2]
    return weights(q, k) @ c


@pytest.mark.parametrize("run", [filled, filled_and_read_as_it_is])
def test_what_is_written_before_it_is_read_hides_nothing(run: Attend) -> None:
    one = traced(run, *qkv())
    assert one.sites
    assert_described(one)


def filled_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    c = k * 1
    s = q @ c.mT
    c[..., :2] = 0
    return s.softmax(-1) @ v + c


def copied_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    c = k * 1
    w = c.mT.contiguous()
    c[..., :2] = 0
    return (q @ w).softmax(-1) @ c


def of_each_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] * q[:, :, :, None])
    return s.softmax(-1) @ v


def test_what_is_written_between_still_does() -> None:
    assert not traced(filled_between, *qkv()).sites
    one = traced(copied_between, *qkv())
    assert one.sites  # k is the copy, made before
    assert_described(one)


def test_keys_of_each_query_are_told() -> None:
    (reason,) = traced(of_each_query, *qkv()).reasons
    assert "has keys of its own for each query" in reason
