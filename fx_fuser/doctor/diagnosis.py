"""The whole diagnosis, in order: printed as it is found, and kept for a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch

from fx_fuser.doctor import facts as doctors_facts
from fx_fuser.doctor import findings, loops, selftest
from fx_fuser.doctor.cases import CASES, Case
from fx_fuser.doctor.facts import Facts, Gpu, without_home
from fx_fuser.doctor.findings import FAIL, WARN, Finding
from fx_fuser.doctor.loops import Access
from fx_fuser.doctor.selftest import Result, Times
from fx_fuser.installation import uninstall

SCHEMA = 1  # of the JSON; changes if a field changes its meaning
Say = Callable[[str], None]


@dataclass
class Diagnosis:
    """gets: by architecture, which main loops. tests, times: None if not requested."""

    facts: Facts
    found: list[Finding]
    gets: dict[str, list[Access]] = field(default_factory=dict)
    tests: list[Result] | None = None
    times: list[Times] | None = None

    @property
    def levels(self) -> list[str]:
        return [one.level for one in (*self.found, *(self.tests or ()))]

    @property
    def status(self) -> int:
        """The process's exit status."""
        return int(FAIL in self.levels)

    @property
    def verdict(self) -> str:
        failed, warned = self.levels.count(FAIL), self.levels.count(WARN)
        if failed:
            return f"FAIL: {failed} of the lines above; each names what to do or to report."
        works = "The backend works" if self.tests else "No fault was found (nothing was run)"
        warnings = f", with {warned} warning{'s' * (warned != 1)}" if warned else ""
        if not usable(self.facts):
            where = "this is a CPU" if not self.facts.gpus else "no GPU here has any"
            said = f"{works}{warnings}, but none of fx_fuser's kernels run: {where}."
            return f"{said} Inductor compiles your models as they are."
        if not self.tests:
            return f"{works}{warnings}."
        return f"Everything works{warnings}. Next: print(fx_fuser.compare(model, *inputs))"

    def to_json(self) -> str:
        """With the user's home shortened to ~, which may name them."""
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "facts": asdict(self.facts),
            "findings": [asdict(finding) for finding in self.found],
            "loops": {arch: [asdict(one) for one in of] for arch, of in self.gets.items()},
            "self_test": None if self.tests is None else [asdict(one) for one in self.tests],
            "times": None if self.times is None else [asdict(one) for one in self.times],
            "verdict": self.verdict,
            "status": self.status,
        }
        return json.dumps(_shortened(data), indent=1)


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return without_home(value)
    if isinstance(value, dict):
        return {key: _shortened(of_key) for key, of_key in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shortened(one) for one in value]
    return value


def usable(facts: Facts) -> list[Gpu]:
    """The GPUs that kernels can be made for, the first of each name."""
    return list({gpu.name: gpu for gpu in reversed(facts.gpus) if not gpu.unfit}.values())[::-1]


def diagnose(tests: bool, timed: bool, say: Say) -> Diagnosis:
    """say: gets each line as soon as it is known."""

    def told(line: object) -> None:
        say(without_home(str(line)))

    facts = doctors_facts.gather()
    uninstall()  # undo FX_FUSER=install: Inductor is to be timed by itself
    made = Diagnosis(facts, findings.judged(facts))
    for finding in made.found:
        told(finding)
    gpus = usable(facts)
    for gpu in gpus:
        if gpu.arch not in made.gets:
            made.gets[gpu.arch] = loops.loops_of(gpu)
            told(f"\nWhat {gpu.name} gets")
            for access in made.gets[gpu.arch]:
                told(access)
    if tests:
        made.tests = []
        cases = list(cases_of(gpus, made.gets))
        told(
            f"\nSelf-test of {len(cases)} small models (--no-test skips it): errors against "
            "float64, and eager's in brackets"
        )
        if gpus:
            told("The first time, each line waits until its kernels are compiled")
        else:
            told("On a CPU none of fx_fuser's kernels run: its ops are plain torch operations here")
        for case, device in cases:
            made.tests.append(selftest.run(case, device))
            told(made.tests[-1])
    if timed:
        made.times = []
        todo = [one for one in cases_of(gpus, made.gets) if one[1].type == "cuda"]
        told("\nGPU times in ms" if todo else "\nNo GPU to time on")
        for case, device in todo:
            made.times.append(selftest.timed(case, device))
            told(made.times[-1])
    told(f"\n{made.verdict}")
    return made


def cases_of(gpus: list[Gpu], gets: dict[str, list[Access]]) -> list[tuple[Case, torch.device]]:
    """The cases whose loop each GPU gets; without a GPU, those that an option can force."""
    if not gpus:
        return [(case, torch.device("cpu")) for case in CASES if not case.is_chosen]
    return [
        (case, torch.device("cuda", gpu.index))
        for gpu in gpus
        for case in CASES
        if any(access.gets for access in gets[gpu.arch] if access.loop == case.loop)
    ]
