#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/entry_source.h"
#include "io/error.h"

// What every operator needs at the border between torch and plain C++: checks, plain pointers,
// errors with their kind.
namespace swarm_kv::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The Python class (swarm_kv/errors.py) that an ErrorKind becomes.
const char* error_class(ErrorKind kind);

// Concatenates anything that can be streamed.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream stream;
  ((stream << parts), ...);
  return std::move(stream).str();
}

// Throws Error(kArgument) with the concatenated message unless `condition` holds.
template <typename... Parts>
void check(bool condition, const Parts&... message) {
  if (!condition) [[unlikely]] {
    throw Error(ErrorKind::kArgument, concat(message...));
  }
}

// Streams a tensor as "float32 [3, 6144, 64]". The text is only made when a message needs it.
struct Description {
  const Tensor& tensor;
};
inline Description describe(const Tensor& tensor) { return {tensor}; }
std::ostream& operator<<(std::ostream& stream, const Description& description);

// "float32", as Python spells it.
const char* dtype_name(ScalarType dtype);

bool is_floating(ScalarType dtype);

// Of a floating dtype.
Element element_of(ScalarType dtype);

// The dtype that sums over `dtype` are kept in: float64 for float64, float32 for the smaller ones.
ScalarType accumulation_dtype(ScalarType dtype);

// Checks of one argument; `op` and `name` go into the message.
struct Argument {
  const char* op;
  const char* name;
  const Tensor& tensor;

  const Argument& dim(int64_t expected) const;
  const Argument& size(int64_t axis, int64_t expected, const char* meaning) const;
  const Argument& dtype(ScalarType expected) const;
  const Argument& floating() const;
  const Argument& on_cpu() const;
};

struct Named {
  const char* name;
  const Tensor& tensor;
};

void check_on_cpu(const char* op, std::initializer_list<Named> arguments);

// All on the CUDA device of the first one.
void check_on_one_gpu(const char* op, std::initializer_list<Named> arguments);

// A contiguous tensor of `dtype` with the same values: the argument itself where it already is one.
Tensor as_contiguous(const Tensor& tensor, ScalarType dtype);
inline Tensor as_contiguous(const Tensor& tensor) {
  return as_contiguous(tensor, tensor.scalar_type());
}

// Uninitialised CPU tensor.
Tensor empty_cpu(std::initializer_list<int64_t> sizes, ScalarType dtype);

// CPU tensor [values.size()] int64 with a copy of `values`.
template <typename Container>
Tensor int64_tensor(const Container& values) {
  Tensor result = empty_cpu({static_cast<int64_t>(values.size())}, ScalarType::Long);
  std::copy(values.begin(), values.end(), static_cast<int64_t*>(result.mutable_data_ptr()));
  return result;
}

// The same with int32, for lists that are held in memory.
Tensor int32_tensor(const std::vector<int32_t>& values);

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Calls kFunction and turns Error into std::runtime_error("[swarm_kv.<Class>] message"): only the
// text of an exception crosses from an operator into Python, so the kind travels in it.
template <auto kFunction>
struct Guarded;

template <typename Result, typename... Args, Result (*kFunction)(Args...)>
struct Guarded<kFunction> {
  static Result call(Args... args) {
    try {
      return kFunction(std::forward<Args>(args)...);
    } catch (const Error& error) {
      throw std::runtime_error(concat("[swarm_kv.", error_class(error.kind()), "] ", error.what()));
    } catch (const std::bad_alloc&) {
      throw std::runtime_error(concat("[swarm_kv.", error_class(ErrorKind::kCapacity),
                                      "] out of memory while running a swarm_kv operator"));
    }
  }
};

}  // namespace swarm_kv::ops

// A kernel for StableLibrary::impl(): TORCH_BOX with errors that keep their kind.
#define SWARM_KV_BOX(function) TORCH_BOX((&swarm_kv::ops::Guarded<&function>::call))
