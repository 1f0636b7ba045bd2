"""Machines as the doctor may find them; none of them was there."""

from __future__ import annotations

import dataclasses
from typing import Any

from fx_fuser.doctor import diagnosis, findings
from fx_fuser.doctor.facts import Cache, Facts, Gpu

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", (9, 0), "sm_90a", 132, 79.1, "wgmma")
A100 = Gpu(1, "NVIDIA A100-SXM4-80GB", (8, 0), "sm_80", 108, 79.2, "mma.sync")
T4 = Gpu(
    0, "Tesla T4", (7, 5), "sm_75", 40, 14.6, "mma.sync", "compute capability 7.5 is below 8.0"
)


def machine(**changes: Any) -> Facts:
    """One on which all is well, with these changes."""
    cache = Cache("/home/me/.cache/fx_fuser/fx_fuser-v1", "", "", 12, 1, 3, 4.5, 1024)
    well = Facts(
        fx_fuser="0.1.0",
        folder="/venv/fx_fuser",
        is_checkout=False,
        system="Linux x86_64, glibc 2.35",
        python="3.11.7",
        torch="2.15.0+cu132",
        cuda="13.2",
        hip=None,
        is_registered=True,
        is_installed=False,
        switch="",
        switch_fault="",
        driver="580.159.04",
        cuda_of_driver="13.2",
        gpus=(H100,),
        compiler="NVRTC, /venv/libnvrtc.so.13 (13.2)",
        compiler_fault="",
        brought={"sm_90a": 45, "sm_80": 32},
        launcher="prebuilt, from the wheel",
        launcher_fault="",
        split_loop="",
        split_loop_fault="",
        cache=cache,
        precision="TF32 by torch's settings: matmul off",
    )
    return dataclasses.replace(well, **changes)


def diagnosed(**changes: Any) -> diagnosis.Diagnosis:
    found = machine(**changes)
    return diagnosis.Diagnosis(found, findings.judged(found))
