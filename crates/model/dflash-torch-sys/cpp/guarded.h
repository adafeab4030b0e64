// How a call into libtorch ends: no exception leaves it.
#pragma once

#include <cstring>
#include <exception>
#include <string>

#include <c10/util/Exception.h>

// A copy from malloc, which the caller frees.
inline char* duplicate(const std::string& text) {
  return ::strdup(text.c_str());
}

// Null, or the message of what was thrown, from malloc.
template <typename Body>
char* guarded(Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& caught) {
    return duplicate(caught.what_without_backtrace());
  } catch (const std::exception& caught) {
    return duplicate(caught.what());
  } catch (...) {
    return duplicate("an exception that is not a std::exception");
  }
}
