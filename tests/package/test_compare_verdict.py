"""The verdict, text, JSON and page of a comparison, from made figures: no one measured these."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from fx_fuser import Comparison, OptionError
from fx_fuser.compare.column import Column
from fx_fuser.compare.kernels import Cliff
from fx_fuser.compare.verdict import judge, speed_up, spread
from fx_fuser.report.header import Header

ROUNDS = 9
OOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"
FUSED = {"fused": {"auto_linear": 12}}


def made(
    title: str, wall: float, gpu: float | None = None, noise: float = 0.01, **of: Any
) -> Column:
    """wall: ms of the middle one of ROUNDS, which spread by `noise` of it to either side."""
    steps = (i / (ROUNDS - 1) * 2 - 1 for i in range(ROUNDS))
    own: dict[str, Any] = {"steady_ms": wall, **of}
    return Column(title, wall=[wall * (1 + noise * s) for s in steps], gpu_ms=gpu, **own)


def starved(title: str) -> Column:
    return Column(title, failed=OOM, out_of_memory=True)


def net(inductor: float, fx_fuser: float, gpu: float, **of: Any) -> dict[str, Column]:
    mine: dict[str, Any] = {"sites": FUSED, "faults": [], **of}
    return {
        "eager": made("eager", 1.1 * inductor, inductor),
        "inductor": made("Inductor", inductor, inductor),
        "fx_fuser": made("fx_fuser", fx_fuser, gpu, **mine),
    }


def test_a_gain_is_to_be_used() -> None:
    columns = net(87.0, 37.0, 35.0, peak_mib=101.0, output_error=1e-7, first_s=30.0)
    columns["inductor"].peak_mib, columns["inductor"].output_error = 100.0, 2e-7
    columns["inductor"].first_s = 26.0
    verdict = judge(columns, "cuda")
    assert (verdict.word, verdict.use, verdict.launch_bound) == ("USE IT", True, False)
    assert verdict.sentences == [
        "2.35 times as fast as Inductor in wall time, 1% more memory, error below Inductor's.",
        'Use torch.compile(model, backend="fx_fuser").',
        "Pays off after 80 steps: 4.0 s more to compile, 50 ms saved each.",
        "The GPU is busy 95% of the time: mode='reduce-overhead' would not help.",
    ]


def test_tf32_that_is_faster_still_is_named() -> None:
    columns = net(87.0, 37.0, 35.0) | {"inductor_tf32": made("Inductor, TF32", 28.0, 26.0)}
    assert "set_float32_matmul_precision('high')" in judge(columns, "cuda").sentences[-1]
    columns["inductor_tf32"] = made("Inductor, TF32", 40.0, 38.0)
    assert "set_float32" not in str(judge(columns, "cuda"))


def test_no_gain_says_where_the_time_is() -> None:
    columns = net(10.0, 9.9, 9.5, kinds={"gemm": 8.93, "Triton": 0.57})
    verdict = judge(columns, "cuda")
    assert (verdict.word, verdict.use) == ("NO GAIN", False)
    said = "94% of the GPU's time is in the library's gemms; keep torch.compile(model)."
    assert verdict.sentences[0].endswith(said)


@pytest.mark.parametrize(
    ("fx_fuser", "noise", "sites", "said"),
    [
        (20.0, 0.01, FUSED, "slower, 0.50 times as fast as Inductor in wall time"),
        (9.0, 0.4, FUSED, "1.11 times as fast as Inductor, but within the spread of the rounds"),
        (10.0, 0.01, {}, "1.00 times as fast as Inductor in wall time, and nothing was fused"),
    ],
)  # fmt: skip
def test_no_gain_says_why(fx_fuser: float, noise: float, sites: Any, said: str) -> None:
    columns = net(10.0, fx_fuser, fx_fuser, sites=sites)
    columns["fx_fuser"].wall = made("", fx_fuser, noise=noise).wall
    verdict = judge(columns, "cuda")
    assert verdict.word == "NO GAIN" and verdict.sentences[0].startswith(said)


def test_launch_bound_says_what_to_try() -> None:
    verdict = judge(net(2.42, 2.46, 0.957), "cuda")
    assert (verdict.word, verdict.use, verdict.launch_bound) == ("LAUNCH-BOUND", False, True)
    assert (
        "steps run back to back take 2.46 ms each, of which the GPU is busy for 0.957 ms"
        in verdict.sentences[0]
    )
    assert "compare(…, reduce_overhead=True)" in verdict.sentences[0]


@pytest.mark.parametrize(
    ("own", "theirs", "use", "said"),
    [
        (made("fx_fuser, reduce-overhead", 1.0), made("Inductor, reduce-overhead", 1.96), True,
         "1.96 times as fast as Inductor, reduce-overhead (1.96 ms): use torch.compile(model, "),
        (made("fx_fuser, reduce-overhead", 1.0), made("Inductor, reduce-overhead", 1.0), False,
         "no gain over torch.compile in that mode"),
        (Column("fx_fuser, …", failed="RuntimeError: no graphs"), Column("…", failed="no"), False,
         "mode='reduce-overhead' fails: RuntimeError: no graphs"),
        (made("fx_fuser, reduce-overhead", 1.0), Column("…", failed="no"), True,
         "2.42 times as fast as Inductor (2.42 ms): use torch.compile"),
    ],
)  # fmt: skip
def test_launch_bound_with_graphs_measured(
    own: Column, theirs: Column, use: bool, said: str
) -> None:
    graphs = {"inductor_reduce_overhead": theirs, "fx_fuser_reduce_overhead": own}
    verdict = judge(net(2.42, 2.46, 0.957) | graphs, "cuda")
    assert (verdict.word, verdict.use, verdict.launch_bound) == ("LAUNCH-BOUND", use, True)
    assert said in verdict.sentences[0]


def test_launch_bound_in_the_users_own_mode_names_it() -> None:
    verdict = judge(net(2.42, 2.46, 0.957, mode="max-autotune"), "cuda")
    assert verdict.word == "LAUNCH-BOUND" and "with mode='max-autotune'" in verdict.sentences[0]
    assert "reduce" not in verdict.sentences[0]


def test_a_step_alone_may_wait_for_its_host() -> None:
    """A loop of them need not."""
    columns = net(1.06, 1.06, 0.78) | {"fx_fuser": made("fx_fuser", 1.06, 0.78, steady_ms=0.81)}
    verdict = judge(columns, "cuda")
    assert (verdict.word, verdict.launch_bound) == ("NO GAIN", False)
    assert any("busy 96% of the time" in sentence for sentence in verdict.sentences)


def test_a_gain_of_a_launch_bound_net_is_a_gain() -> None:
    verdict = judge(net(3.0, 2.0, 0.9), "cuda")
    assert (verdict.word, verdict.use, verdict.launch_bound) == ("USE IT", True, True)


def test_a_wrong_value_forbids_use_however_fast() -> None:
    columns = net(87.0, 37.0, 35.0, faults=["output 1: error 1 of 2", "gradient of w: …"])
    for device in ("cuda", "cpu"):
        verdict = judge(columns, device)
        assert (verdict.word, verdict.use) == ("DO NOT USE", False)
        assert "2 values are further" in str(verdict) and "output 1: error 1 of 2" in str(verdict)


def test_a_failure_of_fx_fuser_forbids_use() -> None:
    columns = net(10.0, 5.0, 5.0) | {"fx_fuser": Column("fx_fuser", failed="BuildError: no nvcc")}
    verdict = judge(columns, "cuda")
    assert (verdict.word, verdict.use) == ("DO NOT USE", False)
    assert "BuildError: no nvcc" in str(verdict) and "report" in str(verdict)


def test_out_of_memory_in_fx_fuser_alone() -> None:
    columns = net(10.0, 5.0, 5.0) | {"fx_fuser": starved("fx_fuser")}
    verdict = judge(columns, "cuda")
    assert verdict.word == "DO NOT USE"
    assert verdict.sentences[0] == "fx_fuser runs out of memory, where eager or Inductor fits."


def test_out_of_memory_in_eager_mode_alone_changes_nothing() -> None:
    columns = net(87.0, 37.0, 35.0)
    before = judge(columns, "cuda")
    assert judge(columns | {"eager": starved("eager")}, "cuda") == before


def test_out_of_memory_in_inductor_compares_with_eager() -> None:
    columns = net(87.0, 37.0, 35.0) | {"inductor": starved("Inductor")}
    verdict = judge(columns, "cuda")
    assert verdict.word == "USE IT" and "times as fast as eager" in verdict.sentences[0]
    assert f"Inductor has no figures: {OOM}." in verdict.sentences


def test_out_of_memory_everywhere() -> None:
    columns = {name: starved(name) for name in ("eager", "inductor", "fx_fuser")}
    assert judge(columns, "cuda").word == "OUT OF MEMORY"


def test_eager_mode_is_the_rival_where_it_beats_inductor() -> None:
    columns = net(1.51, 1.4, 1.4) | {"eager": made("eager", 0.69, 0.69)}
    verdict = judge(columns, "cuda")
    assert (verdict.word, verdict.use) == ("NO GAIN", False)
    assert verdict.sentences[0].startswith("slower, 0.49 times as fast as eager in wall time")
    assert "Inductor is slower than eager." in verdict.sentences


def test_only_fx_fuser_runs() -> None:
    columns = net(87.0, 37.0, 35.0)
    columns |= {name: starved(name) for name in ("eager", "inductor")}
    verdict = judge(columns, "cuda")
    assert verdict.word == "USE IT" and verdict.sentences[0] == "nothing else runs."


def test_on_a_cpu_no_kernel_runs() -> None:
    verdict = judge(net(2.0, 1.0, 1.0), "cpu")
    assert (verdict.word, verdict.use) == ("NO GPU", False)
    assert "fx_fuser has no kernels for a CPU" in verdict.sentences[0]


def test_a_column_left_out_is_not_compared() -> None:
    columns = net(2.0, 1.0, 1.0)
    assert judge({"eager": columns["eager"]}, "cuda").word == "NOT COMPARED"
    assert judge({"fx_fuser": columns["fx_fuser"]}, "cuda").word == "NOT COMPARED"


def test_values_not_compared_are_said_so() -> None:
    assert "Values were not compared" in str(judge(net(9.0, 3.0, 3.0, faults=None), "cuda"))


def test_speed_up_is_sure_where_three_quarters_of_the_rounds_agree() -> None:
    theirs = Column("", wall=[2.0] * 8)
    assert speed_up(theirs, Column("", wall=[1.0] * 7 + [9.0])) == (2.0, True)
    assert not speed_up(theirs, Column("", wall=[1.0] * 5 + [9.0] * 3))[1]
    assert spread(theirs, Column("", wall=[1.0] * 8)) == 0


# ---- as text, JSON and a page -------------------------------------------------------------------


def comparison(**of: Any) -> Comparison:
    header = Header(
        devices=["cuda:0, NVIDIA <Test>"],
        dtypes=["float32"],
        mode="train",
        grad=True,
        autocast="",
        precision="torch's settings: …",
        torch="2.11.0",
        fx_fuser="0.1.0",
    )
    columns = net(
        87.0, 37.0, 35.0, peak_mib=4796.0, first_s=30.4, output_error=6.4e-7, grad_error=1e-6,
        kinds={"fx_fuser": 20.0, "Triton": 10.0, "copies": 5.0},
        cliffs=[Cliff("a <slow> kernel", 4.28, "cutlass_75_align1")],
    )  # fmt: skip
    columns["fx_fuser"].sites = FUSED | {"left": {"a": 2}, "warnings": ["fx_fuser: & more"]}
    columns["eager"] = starved("eager")
    given: dict[str, Any] = {"device": "cuda", "columns": columns, "notes": ["<note>"]} | of
    return Comparison("Net<T>", "training step", ["[32, 3] float32"], header=header, **given)


def test_text_has_the_table_and_the_verdict() -> None:
    text = str(comparison())
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    figures = ["", "wall time", "GPU time", "peak memory", "first call", "output", "gradient"]
    assert figures in rows and ["", "ms", "ms", "MiB", "s", "error", "error"] in rows
    assert ["fx_fuser", "37", "35", "4796", "30.4", "6.4e-07", "1.0e-06"] in rows
    assert ["eager", "out of memory"] in rows
    assert f"eager failed: {OOM}" in text
    assert ["GPU time, ms", "fx_fuser", "pointwise (Triton)", "copies"] in rows
    assert ["fx_fuser", "20", "10", "5"] in rows
    assert "4.28 ms: a <slow> kernel (cutlass_75_align1)" in text
    assert "\n12 sites fused, 2 left to Inductor, where fusing gains nothing; " in text
    assert "fx_fuser warned: fx_fuser: & more" in text
    assert "\nUSE IT: 2.35 times as fast as Inductor" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_text_leaves_out_figures_that_nothing_has() -> None:
    columns = {"eager": made("eager", 2.0), "inductor": made("Inductor", 1.0, first_s=0.31)}
    text = str(comparison(device="cpu", columns=columns))
    assert "GPU time" not in text and "peak" not in text and "error" not in text
    assert ["", "wall time", "first call"] in [re.split(r"\s{2,}", x) for x in text.splitlines()]


def test_json_returns_and_has_a_schema() -> None:
    found = comparison()
    written = found.to_json()
    assert Comparison.from_json(written) == found
    data = json.loads(written)
    assert data["schema"] == 1
    assert data["verdict"]["word"] == "USE IT" and data["verdict"]["use"] is True
    assert data["columns"]["fx_fuser"]["cliffs"][0]["ms"] == 4.28
    assert data["columns"]["eager"]["out_of_memory"] is True


@pytest.mark.parametrize("written", ["{}", "[]", '{"schema": 2}'])
def test_json_of_another_schema_is_refused(written: str) -> None:
    with pytest.raises(OptionError, match=r"schema is .*; this fx_fuser reads 1: give what"):
        Comparison.from_json(written)


def test_page_is_well_formed_and_needs_no_other_file() -> None:
    page = comparison().to_html()
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))  # fails where a tag is not closed
    said = "".join(root.itertext())
    for text in ("Net<T>", "NVIDIA <Test>", "USE IT", "a <slow> kernel", "<note>", "37", OOM):
        assert text in said
    assert not re.search(r"https?:|src=|href=|@import|url\(|<script", page)
