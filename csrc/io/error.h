#pragma once

#include <stdexcept>
#include <string>

namespace swarm_kv {

// Decides which Python exception a failure becomes once it leaves C++ (see swarm_kv/errors.py).
enum class ErrorKind {
  kArgument,  // the caller passed a value outside its limits
  kStorage,   // a drive failed: I/O error, short transfer that did not progress, time-out, no space
  kCapacity,  // a memory budget or a bounded table is exhausted
  kState,     // the call does not fit the object's state: closed store, ticket used twice
};

// The only exception type thrown by csrc/io and csrc/core on purpose.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace swarm_kv
