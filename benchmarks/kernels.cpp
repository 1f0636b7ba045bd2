// The library of kernels.h. It is loaded next to the shim, and gets the driver in the same way.
#include "kernels.h"

namespace fx_fuser {

STABLE_TORCH_LIBRARY_FRAGMENT(fx_fuser_bench, m) {
  m.def("use_driver(int get_proc_address) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fx_fuser_bench, CompositeExplicitAutograd, m) {
  m.impl("use_driver", TORCH_BOX(&use_driver));
}

}  // namespace fx_fuser
