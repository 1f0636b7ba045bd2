import torch
import benchmarks.conv_backward_sm90 as b
from fx_fuser import native
native.prepare([b.IDENTITY],"cuda")
x=torch.rand(128,8,128,128,device="cuda"); w=(torch.rand(64,8,3,3,device="cuda")*2-1)/72**.5
dy=torch.randn(128,64,126,126,device="cuda")
p=b.Problem(x,w,dy)
st=(torch.full((64,),.1,device="cuda"),torch.full((64,),.1,device="cuda"))
dx,dw=torch.empty_like(x),torch.empty_like(w)
for _ in range(2): b.run(p,dx,dw,st)
torch.cuda.synchronize()
