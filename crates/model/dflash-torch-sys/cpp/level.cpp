// The CPU instruction sets that libtorch and MKL use in this process; declared in `src/level.rs`.
// oneDNN does not report its own from within libtorch.
#include <ATen/Version.h>
#include <dlfcn.h>

#include "guarded.h"

extern "C" {

// `DEFAULT`, `AVX2`, `AVX512` or another architecture's name, malloc'ed.
char* dflash_libtorch_level(char** level) {
  return guarded([&] { *level = duplicate(at::get_cpu_capability()); });
}

// MKL's code branch (mkl_cbwr_get_auto_branch under the name in its header); 0 if MKL is missing or
// does not report it.
int32_t dflash_mkl_branch() {
  const auto branch =
      reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "mkl_serv_cbwr_get_auto_branch"));
  return branch == nullptr ? 0 : branch();
}
}
