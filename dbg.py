import sys, torch, random
from dataclasses import replace
import benchmarks.conv_backward_sm90 as b
from benchmarks.measure import float32_settings
from fx_fuser import native
which=sys.argv[1]
if which=="swap":
    b.IDENTITY="#define FX_SWAP 1\n"+b.IDENTITY
native.prepare([b.IDENTITY,b.SCALED],"cuda")
def probs():
    g=torch.Generator("cuda").manual_seed(0)
    for (xs,ws,pad) in [((1,8,18,34),(64,8,3,3),b.NONE),((1,8,18,34),(64,8,1,1),b.NONE),((2,5,13,11),(16,5,3,3),b.NONE),((3,8,128,128),(64,8,3,3),b.NONE),((2,3,37,29),(70,3,3,3),(1,1,1,1)),((2,8,40,50),(64,8,4,5),(0,2,3,1)),((2,8,20,300),(64,8,3,3),b.NONE)]:
        x=torch.randn(xs,device="cuda",generator=g); w=torch.randn(ws,device="cuda",generator=g)*.1
        dy=torch.randn(b.convolve(x,w,pad).shape,device="cuda",generator=g)
        for mode in ("plain","training"):
            yield b.Problem(x,w,dy,mode,pad)
with float32_settings("fp32", cudnn_tf32=False):
    for p in probs():
        ex=p.in_torch(torch.float64)
        dx = which!="acc" and bool(native.conv_direct_backward_cut(p.x.shape,p.weight.shape,p.padding,True))
        f=b.ours(p,dx); torch.cuda.synchronize()
        print(which,tuple(p.x.shape),tuple(p.weight.shape),p.mode,["%.1e"%e for e in b.errors(f,ex)],["%.1e"%e for e in b.errors(p.in_torch(torch.float32),ex)],flush=True)
        if dx:
            d=(f[0].double()-ex[0]).abs()/ex[0].abs().mean()
            print("   per ci",["%.1e"%v for v in d.mean((0,2,3)).tolist()]," rows",["%.1e"%v for v in d.mean((0,1,3)).tolist()[:6]],"cols",["%.1e"%v for v in d.mean((0,1,2)).tolist()[:6]],flush=True)
