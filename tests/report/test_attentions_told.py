"""What explain says of attention that is written by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fx_fuser
from fx_fuser.report.report import Report

FORMULA = "softmax(q·kᵀ * 0.5 + mask) · v"


class Layer(nn.Module):
    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.heads = nn.Linear(2, 2) if mixed else None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        p = (q @ k.mT * 0.5 + mask).softmax(-1)
        if self.heads is not None:
            p = self.heads(p.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (p @ v).transpose(1, 2).flatten(2)


class Two(nn.Module):
    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.layer = Layer(mixed)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(self.layer(x, mask), mask)


def explained(mixed: bool = False) -> Report:
    return fx_fuser.explain(Two(mixed), torch.randn(2, 5, 8), torch.zeros(5, 5))


def test_alike_attentions_share_a_line_with_their_formula() -> None:
    report = explained()
    assert len(report.attentions) == 2 and report.attentions[0].formula == FORMULA
    (line,) = report.attention.splitlines()
    assert line.startswith("The attention at test_attentions_told.py:")
    assert "×2 is written by hand, softmax(q·kᵀ * 0.5 + mask) · v; it runs as two" in line
    assert "written by hand" in str(report) and "written by hand" in report.to_html()
    assert Report.from_json(report.to_json()).attentions == report.attentions


def test_a_dropout_is_said() -> None:
    def attend(q: Tensor) -> Tensor:
        return torch.dropout((q @ q.mT).softmax(-1), 0.1, True) @ q

    (one,) = fx_fuser.explain(attend, torch.randn(2, 5, 4)).attentions
    assert one.formula == "dropout(softmax(q·kᵀ)) · v"


def test_why_a_softmax_is_no_attention() -> None:
    report = explained(mixed=True)
    (line,) = report.attention.splitlines()
    assert "×2 is not an attention that fx_fuser knows: " in line
    assert "mixes heads after the softmax" in line


def test_torchs_own_attention_is_not_written_by_hand() -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q = torch.randn(2, 2, 5, 4)
    assert not fx_fuser.explain(lambda q: sdpa(q, q, q), q).attentions
