export FX_FUSER_CACHE_DIR=/tmp/fxc PYTHONPATH=. PYTHONUNBUFFERED=1
timeout 60 python dbg.py acc 2>&1 | tail -40
timeout 40 python dbg.py input 2>&1 | tail -40
timeout 40 python dbg.py swap 2>&1 | tail -12
timeout 60 python -m benchmarks.conv_backward_sm90 --skip-checks 2>&1 | tail -30
timeout 70 python -m benchmarks.conv_backward_sm90 --skip-timing --cases 40 2>&1 | tail -80
