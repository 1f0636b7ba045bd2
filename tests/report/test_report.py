"""The report as JSON, as a page, over several graphs; what is counted, and the modes of explain."""

from __future__ import annotations

import html
import json
import os
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import CONV, MUL_ADD, MUL_MUL, ThreePatterns, fresh, images  # noqa: F401
from helpers import conv_program, linear_program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fx_fuser
from fx_fuser import Report
from fx_fuser.report import traffic
from fx_fuser.report.contents import short_place
from fx_fuser.report.text import WIDTH


class Broken(nn.Module):
    """Two graphs with a site, near misses and another Linear each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x = F.silu(self.layers[0](x)) * y
        first = torch.sigmoid(self.layers[1](x)) < 0.5
        x = self.layers[2](x)
        torch._dynamo.graph_break()
        x = F.silu(self.layers[3](x)) + y
        second = torch.tanh(self.layers[4](x)) * y * "<&>".count("&")
        return self.layers[5](x), first, second.relu(), F.relu(self.layers[4](x)) * y


OPS = {"cpu_ops": True, "auto": False}  # the sites are those of a GPU, named patterns alone


@pytest.fixture(scope="module")
def report() -> Report:
    torch._dynamo.reset()
    return fx_fuser.explain(Broken(), torch.randn(3, 6), torch.randn(3, 6))


# ---- several graphs -----------------------------------------------------------------------------


def test_several_graphs(report: Report) -> None:
    assert [(s.pattern, s.graph) for s in report.fused] == [(MUL_MUL, 0), (MUL_ADD, 1)]
    assert {(s.missing, s.graph) for s in report.refused} == {(2, 0), (1, 1)}
    assert report.others == {"Linear": 2}
    assert len(report.graphs) == 2
    first, second = report.graphs
    assert first.ends.startswith("test_report.py:") and second.ends == ""


def test_nodes_are_those_of_the_graph(report: Report) -> None:
    for site in (*report.fused, *report.refused):
        names = {node.name for node in report.graphs[site.graph].nodes}
        assert site.nodes and names.issuperset(site.nodes)


def test_the_body_of_a_checkpoint_is_a_graph() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        inner = checkpoint(lambda t: F.silu(m.lin(t)) * y, x, use_reentrant=False)
        return inner + F.silu(m.bare(x)) * y

    report = fx_fuser.explain(linear_program(body), torch.randn(4, 8), torch.randn(4, 6))
    assert sorted(s.graph for s in report.fused) == [0, 1] and len(report.graphs) == 2


def test_equal_rows_of_the_table_are_one() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            y = F.silu(m.lin(x)) * y
        return y

    report = fx_fuser.explain(linear_program(body), torch.randn(4, 8), torch.randn(4, 6))
    assert len(report.fused) == 3
    rows = [line for line in str(report).splitlines() if line.startswith("match")]
    assert len(rows) == 1 and rows[0].startswith("match ×3 ")


# ---- the header, and what a CPU says ------------------------------------------------------------


def test_the_header(report: Report) -> None:
    header = report.header
    assert header is not None
    assert (header.devices, header.dtypes) == (["cpu"], ["float32"])
    assert (header.mode, header.grad, header.autocast) == ("train", True, "")
    assert (header.torch, header.fx_fuser) == (str(torch.__version__), fx_fuser.__version__)
    said, seen, precision, note = (
        str(report).partition("\n\n")[0].replace("\n    ", " ").split("\n")
    )
    assert said == f"fx_fuser {fx_fuser.__version__}, torch {torch.__version__}, on cpu"
    assert seen == "float32; train; gradients on"
    assert precision == (
        "TF32 by torch's settings: matmul off, convolutions on; option fp32='follow'"
    )
    assert note.startswith(
        "fx_fuser has no kernels for a CPU: Inductor compiles your model as it is."
    )


def partly_eval() -> nn.Module:
    model = ThreePatterns().train()
    model.bn.eval()
    return model


MODES: dict[str, tuple[Any, bool | None, str]] = {
    "eval": (ThreePatterns().eval(), None, "float32; eval; gradients on"),
    "train=False": (ThreePatterns().train(), False, "float32; eval; gradients off"),
    "partly": (partly_eval(), None, "float32; 5 modules in train, 1 in eval; gradients on"),
    "two dtypes": (lambda x: x.bfloat16() + x, None, "float32; gradients on"),
    "half": (nn.Conv2d(3, 3, 1).bfloat16(), False, "bfloat16; eval; gradients off"),
}


@pytest.mark.parametrize("model, train, said", MODES.values(), ids=MODES.keys())
def test_the_header_says_mode_grad_and_dtype(model: Any, train: bool | None, said: str) -> None:
    torch._dynamo.reset()
    x = images().to(torch.bfloat16 if "bfloat16" in said else torch.float32)
    assert str(fx_fuser.explain(model, x, train=train)).splitlines()[1] == said


def test_the_header_says_autocast_and_tf32() -> None:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    model, options = nn.Linear(6, 6).eval(), {"fp32": "ieee"}
    try:
        with torch.autocast("cpu", torch.bfloat16):
            report = fx_fuser.explain(model, torch.randn(3, 6), options=options)
    finally:
        matmul.fp32_precision = before
    lines = str(report).splitlines()
    assert lines[1] == "float32; autocast to bfloat16; eval; gradients on"
    assert lines[2] == "TF32 by torch's settings: matmul on, convolutions on; option fp32='ieee'"


def test_on_a_cpu_nothing_is_said_to_be_fused_or_saved(report: Report) -> None:
    """None of fx_fuser's kernels run there."""
    page = re.sub("<style>.*</style>", "", report.to_html(), flags=re.DOTALL)
    for text in (str(report), Page(page).text):
        allowed = "to see what is fused there|not fused|every site that could be fused"
        said = re.sub(allowed, "", " ".join(text.split()), flags=re.I)
        assert not re.search(r"\bfused\b", said)
        assert "saved" not in said.lower() and "launch" not in said
        assert "no kernels for a CPU" in said and "match" in said
    for site in report.fused:
        assert not site.native
        assert (site.bytes_saved, site.launches_saved, site.kept) == (None, None, None)


def test_ops_that_run_on_a_cpu_for_tests_are_told_apart() -> None:
    report = fx_fuser.explain(ThreePatterns().eval(), images(), options=OPS)
    assert all(site.native for site in report.fused) and report.saving
    assert report.header is not None and "'cpu_ops'" in report.header.note


def test_json_and_page_have_the_header(report: Report) -> None:
    assert report.header is not None
    assert json.loads(report.to_json())["header"]["devices"] == ["cpu"]
    text = Page(report.to_html()).text
    assert all(line in text for line in report.header.lines)
    other = {**json.loads(report.to_json()), "header": None}
    assert Report.from_json(json.dumps(other)).header is None


def long_line(m: Any, x: Tensor, some_rather_long_name_of_an_operand_that_is_added: Tensor) -> Any:
    z = F.silu(m.lin(x)) * some_rather_long_name_of_an_operand_that_is_added * some_rather_long_name_of_an_operand_that_is_added.sum()  # noqa: E501  # fmt: skip
    w = torch.tanh(m.bare(x)) * some_rather_long_name_of_an_operand_that_is_added * 2.0
    return z, w, F.gelu(m.bare(w @ m.lin.weight)), F.conv1d(x[None], m.lin.weight[:, :4, None]).relu().relu()  # noqa: E501  # fmt: skip


def test_no_line_is_wider_than_a_terminal() -> None:
    torch._dynamo.reset()
    report = fx_fuser.explain(linear_program(long_line), torch.randn(4, 8), torch.randn(4, 6))
    assert report.fused and report.refused and report.left
    site = report.fused[0]
    object.__setattr__(site, "kernel", "library 1.234 ms, split by wgmma 0.567 ms; " * 3)
    object.__setattr__(site, "code", "x" * 300)
    object.__setattr__(site, "where", f"/a/{'folder/' * 20}modeling.py:1234")
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= WIDTH == 100
    assert any("modeling.py:1234" in line for line in lines)
    assert any("weight[6, 8]" in line for line in lines)  # an operand stays whole


# ---- JSON and HTML ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where, said",
    [
        ("/tmp/net.py:7", "/tmp/net.py:7"),
        ("{cwd}/models/net.py:7", "models/net.py:7"),
        ("/the/folder/with/a/name/that/is/long/net.py:7", "…/with/a/name/that/is/long/net.py:7"),
        ("/x/" + 50 * "n" + ".py:7", "…/" + 50 * "n" + ".py:7"),
        ("unknown", "unknown"),
    ],
)
def test_a_place_keeps_its_files_name_whole(where: str, said: str) -> None:
    assert short_place(where.format(cwd=os.getcwd())) == said


def test_json_round_trip(report: Report) -> None:
    text = report.to_json()
    assert Report.from_json(text) == report
    assert Report.from_json(text).to_html() == report.to_html()
    data = json.loads(text)
    assert [s["where"] for s in data["fused"]] == [s.where for s in report.fused]
    assert data["others"] == {"Linear": 2}


VOID = {"meta", "br"}


class Page(HTMLParser):
    """Balanced tags; what is shown, what is linked to, and what a browser would have to fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.classes: list[str] = []
        self.text = ""
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.seen.append(tag)
        self.classes.append(f"{tag}.{given.get('class', '')}")
        if "id" in given:
            assert given["id"] not in self.ids
            self.ids.add(str(given["id"]))
        self.links |= {str(given[k]) for k in ("href", "src") if k in given}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page(report: Report) -> None:
    page = Page(report.to_html())
    for site in (*report.fused, *report.refused):
        for said in (
            site.pattern,
            site.where.rpartition("/")[2],
            site.code,
            site.reason,
            site.help,
        ):
            assert said.replace("`", "") in page.text
    assert report.summary in page.text and report.saving in page.text
    assert page.seen.count("svg") == 2 and page.seen.count("details") == 2
    count = len(report.fused) + len(report.refused)
    assert page.ids == {f"site-{n}" for n in range(1, count + 1)}
    assert page.links == {f"#site-{n}" for n in range(1, count + 1)}
    assert not {"script", "link", "img", "iframe"} & set(page.seen)
    assert "@import" not in page.text and "url(" not in page.text


def test_sites_are_coloured(report: Report) -> None:
    page = Page(report.to_html())
    for verdict, sites in (("fused", report.fused), ("near", report.refused)):
        nodes = sum(len(site.nodes) for site in sites)
        assert page.classes.count(f"g.{verdict}") == nodes
        assert page.classes.count(f"g.region {verdict}") == len(sites)


def test_no_box_stands_on_another(report: Report) -> None:
    for picture in re.findall("<svg.*?</svg>", report.to_html(), re.DOTALL):
        width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)[0])
        boxes = re.findall(r'</title><rect x="(\d+)" y="(\d+)"', picture)
        assert len(set(boxes)) == len(boxes) > 5
        assert all(int(x) < width and int(y) < height for x, y in boxes)


def test_hovering_tells_the_reason(report: Report) -> None:
    titles = re.findall("<title>(.*?)</title>", report.to_html(), re.DOTALL)
    for site in report.refused:
        assert any(html.escape(site.reason) in title for title in titles)


def test_of_a_large_graph_what_is_near_the_sites_is_drawn() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(100):
            x = x.cos()
        return F.silu(m.lin(x)) * y

    report = fx_fuser.explain(linear_program(body), torch.randn(4, 8), torch.randn(4, 6))
    text = Page(report.to_html()).text
    assert "7 of 106 nodes drawn" in text


def test_an_empty_page() -> None:
    page = Page(fx_fuser.explain(nn.ReLU(), torch.ones(3)).to_html())
    assert "Nothing found that fx_fuser could fuse." in page.text and "table" not in page.seen


# ---- what is saved ------------------------------------------------------------------------------


def test_bytes_and_launches_of_a_swish() -> None:
    def swish(x: Tensor, weight: Tensor) -> Tensor:
        z = F.linear(x, weight)
        return z * torch.sigmoid(z) * 2.0

    inputs = torch.randn(4, 8), torch.randn(6, 8)
    (site,) = fx_fuser.explain(swish, *inputs, options=OPS).fused
    tensor = 4 * 6 * 4
    # 4 results written; z, z and the sigmoid, and the product read. Fused: z and y written, z read.
    assert site.bytes_saved == (4 + 4) * tensor - 3 * tensor
    assert site.launches_saved == 4 - 2


def test_an_operand_is_read_once_in_any_case() -> None:
    def gate(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return F.silu(F.linear(x, weight)) * y

    inputs = torch.randn(4, 8), torch.randn(6, 8), torch.randn(4, 6)
    (site,) = fx_fuser.explain(gate, *inputs, options=OPS).fused
    # linear, silu, mul; the result of silu is neither written nor read.
    assert (site.bytes_saved, site.launches_saved) == (2 * 4 * 6 * 4, 1)


@pytest.mark.parametrize("train, launches", [(False, 1), (True, 0)])
def test_a_convolution(train: bool, launches: int) -> None:
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    (site,) = fx_fuser.explain(model, torch.randn(3, 4, 8, 9), train=train, options=OPS).fused
    # z is neither written nor read; of three launches the statistics keep one.
    assert (site.bytes_saved, site.launches_saved) == (2 * 3 * 6 * 6 * 7 * 4, launches)


def test_sizes_that_are_not_known() -> None:
    report = fx_fuser.explain(ThreePatterns().eval(), images(), options=OPS)
    report = Report.from_json(report.to_json())
    assert report.saving.startswith("Saved in a forward pass, compared with eager mode: ")
    object.__setattr__(report.fused[0], "bytes_saved", None)
    assert report.saving == "" and "launches" in report.to_html()


@pytest.mark.parametrize("count, text", [(0, "0 bytes"), (999, "999 bytes"), (2.5e6, "2.5 MB")])
def test_bytes_for_people(count: int, text: str) -> None:
    assert traffic.text_of(count) == text
    assert str(traffic.Saved(count, 1)) == f"{text}, 1 launch"


# ---- the modes of explain -----------------------------------------------------------------------


class Moded(ThreePatterns):
    def forward(self, x: Tensor) -> Any:
        seen.append((self.training, torch.is_grad_enabled()))
        return super().forward(x)


seen: list[tuple[bool, bool]] = []


@pytest.mark.parametrize("train", [None, True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_train(mode: bool, train: bool | None) -> None:
    model = Moded()
    model.train(mode)
    model.bn.train(not mode)
    seen.clear()
    with torch.set_grad_enabled(mode):
        report = fx_fuser.explain(model, images(), train=train)
        assert torch.is_grad_enabled() is mode
    assert set(seen) == {(mode, mode) if train is None else (train, train)}
    assert [m.training for m in (model, model.bn, model.conv)] == [mode, not mode, mode]
    assert CONV in {s.pattern for s in report.fused}


def test_train_of_a_function() -> None:
    def body(x: Tensor, weight: Tensor) -> Tensor:
        z = F.linear(x, weight)
        return z * torch.sigmoid(z) * (2.0 if torch.is_grad_enabled() else z)

    inputs = torch.randn(4, 8), torch.randn(6, 8)
    (trained,) = fx_fuser.explain(body, *inputs, train=True).fused
    (evaluated,) = fx_fuser.explain(body, *inputs, train=False).fused
    assert (trained.operands["b"], evaluated.operands["b"]) == ("2.0", "z")
