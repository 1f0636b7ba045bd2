// float4 and the like are built into NVRTC.
#pragma once
