#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace swarm_kv {

// While it lives, its thread takes floating-point numbers that are too small for a whole mantissa
// for 0. Weights of a softmax hold many, and some processors take a hundred times as long for each.
class FlushDenormals {
 public:
#if defined(__SSE__)
  FlushDenormals() { _mm_setcsr(before_ | kOperands | kResults); }
  ~FlushDenormals() { _mm_setcsr(before_); }
#else
  FlushDenormals() {}
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

#if defined(__SSE__)
 private:
  static constexpr unsigned kOperands = 1 << 6, kResults = 1 << 15;
  const unsigned before_ = _mm_getcsr();
#endif
};

}  // namespace swarm_kv
