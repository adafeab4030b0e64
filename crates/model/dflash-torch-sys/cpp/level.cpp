// The instructions that libtorch and MKL have chosen in this process; `src/level.rs` declares the same
// functions. oneDNN hides its own answer in libtorch.
#include <ATen/Version.h>
#include <dlfcn.h>

#include "guarded.h"

extern "C" {

// `DEFAULT`, `AVX2`, `AVX512` or another architecture's, from malloc.
char* dflash_libtorch_level(char** level) {
  return guarded([&] { *level = duplicate(at::get_cpu_capability()); });
}

// The branch of code that MKL takes (mkl_cbwr_get_auto_branch, by the name that its header gives it);
// 0 without an MKL that tells.
int32_t dflash_mkl_branch() {
  const auto branch =
      reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "mkl_serv_cbwr_get_auto_branch"));
  return branch == nullptr ? 0 : branch();
}
}
