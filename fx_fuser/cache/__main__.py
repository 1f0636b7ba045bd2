"""python -m fx_fuser.cache"""

from __future__ import annotations

import sys

from fx_fuser import cache

if __name__ == "__main__":
    sys.exit(cache.main())
