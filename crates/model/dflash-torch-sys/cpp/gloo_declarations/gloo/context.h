#pragma once

#include <chrono>

namespace gloo {

// Held by shared_ptr only: its layout never matters to us. `setTimeout` is named by
// an inline virtual of ProcessGroupGloo, whose code is libtorch's.
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

} // namespace gloo
