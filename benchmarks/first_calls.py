"""First calls of unmodified nets in fp32 inference, with cold caches, compared with Inductor:

    python -m benchmarks.first_calls [--only NET …] [--rounds N] [--installed FOLDER]

Each first call is in its own process, which has compiled something else before, with empty
folders for Inductor's cache and fx_fuser's. Inductor and fx_fuser take turns, and nothing else
runs. `--installed`: where `pip install --target FOLDER` has put a wheel, whose fx_fuser and kernels
are then used instead of this checkout's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate

import fx_fuser
from benchmarks import conv_nets, net16
from benchmarks.nets16_models import NETS
from benchmarks.run import SYSTEMS

ROOT = Path(__file__).parent.parent
CASES = ("bert", "gpt2", "llama", "resnet50")
RIVALS = {s.name: s for s in SYSTEMS if s.name in ("inductor", "fx_fuser")}
MOST_S = 240.0  # of one process


def here(name: str, system: str) -> dict[str, Any]:
    """One first call, in this process. compiled: our kernels that no wheel brought."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    conv_nets.warm_up(device)
    net = replace(NETS[name], precisions={"eval": "fp32"})
    case = net16.case_of(net, "eval", device, small=device.type == "cpu")
    case.step(case.model)
    taken = net16.first_call(case, RIVALS[system])[1]
    compiled = len(list(Path(os.environ["FX_FUSER_CACHE_DIR"]).rglob("*.cubin")))
    return {
        "seconds": taken,
        "compiled": compiled,
        "package": str(Path(fx_fuser.__file__).parent),
        "config": net.config("eval", device.type == "cpu"),
    }


def spawn(name: str, system: str, installed: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [*([str(installed.resolve())] if installed else []), str(ROOT)]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        environment = os.environ | {
            "FX_FUSER_CACHE_DIR": f"{folder}/fx_fuser",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        # -P: the current folder does not come before these.
        command = [sys.executable, "-P", "-m", "benchmarks.first_calls", "--child", name, system]
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=MOST_S
        )
    if done.returncode:
        raise RuntimeError(f"{name}, {system}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if installed and not Path(found["package"]).is_relative_to(installed.resolve()):
        raise RuntimeError(f"{found['package']} ran, which is not in {installed}")
    return found


def table(names: Sequence[str], rounds: int, installed: Path | None) -> str:
    rows = []
    for name in names:
        found: dict[str, list[dict[str, Any]]] = {system: [] for system in RIVALS}
        try:
            for _ in range(rounds):
                for system in RIVALS:
                    found[system].append(spawn(name, system, installed))
                    print(name, system, found[system][-1], flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        theirs, ours = (median(one["seconds"] for one in found[s]) for s in RIVALS)
        last = found["fx_fuser"][-1]
        rows.append([name, last["config"], theirs, ours, ours - theirs, last["compiled"]])
    heads = ["net", "size", "Inductor, s", "fx_fuser, s", "more, s", "kernels compiled"]
    return tabulate(rows, heads, tablefmt="github", floatfmt=".2f")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_calls")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="NET")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--installed", type=Path, metavar="FOLDER")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(here(*given.child)))
        return 0
    print(table(given.only, given.rounds, given.installed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
