import sys; sys.path[:0]=[".spike","."]
from gen import text, SHAPES_OF
from fx_fuser.native import binaries
for m in range(5):
  for s in SHAPES_OF[m]:
    try: binaries.cubins([text(m,[s])],"sm_90a")
    except Exception as e: print(m,s,str(e)[:450])
print("compiled")
