export FX_FUSER_CACHE_DIR=/tmp/fxc PYTHONPATH=. PYTHONUNBUFFERED=1
timeout 60 python -m benchmarks.conv_backward_sm90 --cases 60 2>&1 | tail -75
timeout 40 python -m benchmarks.conv_sm90 --skip-timing --cases 20 2>&1 | tail -8
timeout 60 ncu --clock-control none --kernel-name regex:"fx_fuser_conv_direct_(sums|weight|input)" --launch-skip 3 --launch-count 3 --section SourceCounters --section SpeedOfLight --section WarpStateStats -f -o /tmp/prof python prof.py > /tmp/ncu.log 2>&1 || tail -5 /tmp/ncu.log
timeout 30 ncu --import /tmp/prof.ncu-rep --page details 2>/dev/null | grep -E "fx_fuser|Duration|Elapsed Cycles|DRAM Through|Memory Through|Compute|Issue Active|L1/TEX|Warp Cycles" | cut -c1-120
timeout 30 ncu --import /tmp/prof.ncu-rep --page source --csv > $OUT/src.csv 2>/dev/null; ls -la $OUT
