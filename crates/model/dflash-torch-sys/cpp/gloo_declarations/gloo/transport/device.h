#pragma once

namespace gloo::transport {

// Made and used by libtorch, passed through our hands in a shared_ptr.
class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};

} // namespace gloo::transport
