// Converts exceptions of libtorch calls to error messages.
#pragma once

#include <cstring>
#include <exception>
#include <string>

#include <c10/util/Exception.h>

// A malloc'ed copy, which the caller frees.
inline char* duplicate(const std::string& text) {
  return ::strdup(text.c_str());
}

// Runs `body`; returns null, or the exception's message, malloc'ed.
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
