#include "core/popcount.h"

#include <algorithm>
#include <bit>

#include "core/simd.h"

#if defined(__GNUC__) && defined(__x86_64__)
#define SWARM_KV_X86_KERNELS
#include <immintrin.h>
#endif

namespace swarm_kv {
namespace {

SWARM_KV_CLONES void count_common_portable(const uint64_t* row, const uint64_t* blocks,
                                           int64_t num_blocks, int64_t words, int32_t* common) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint64_t* block = blocks + b * words * kLanes;
    uint64_t sum[kLanes] = {};
    for (int64_t w = 0; w < words; ++w) {
      for (int l = 0; l < kLanes; ++l) {
        sum[l] += static_cast<uint64_t>(std::popcount(row[w] & block[w * kLanes + l]));
      }
    }
    for (int l = 0; l < kLanes; ++l) common[b * kLanes + l] = static_cast<int32_t>(sum[l]);
  }
}

#ifdef SWARM_KV_X86_KERNELS
// Compilers vectorise the loop above across words, with more shuffles than counts; and the
// extension that counts bits in vectors has no level that target_clones could name.
__attribute__((target("avx512f,avx512vl,avx512vpopcntdq"))) void count_common_avx512(
    const uint64_t* row, const uint64_t* blocks, int64_t num_blocks, int64_t words,
    int32_t* common) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint64_t* block = blocks + b * words * kLanes;
    __m512i sum = _mm512_setzero_si512();
    for (int64_t w = 0; w < words; ++w) {
      const __m512i shared = _mm512_and_si512(_mm512_set1_epi64(static_cast<int64_t>(row[w])),
                                              _mm512_loadu_si512(block + w * kLanes));
      sum = _mm512_add_epi64(sum, _mm512_popcnt_epi64(shared));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(common + b * kLanes),
                        _mm512_maskz_cvtepi64_epi32(0xff, sum));
  }
}

// Bits per byte, by a table of nibbles.
__attribute__((target("avx2"))) inline __m256i byte_counts(__m256i bits) {
  const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,  //
                                         0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
  const __m256i nibble = _mm256_set1_epi8(0xf);
  const __m256i low = _mm256_and_si256(bits, nibble);
  const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bits, 4), nibble);
  return _mm256_add_epi8(_mm256_shuffle_epi8(table, low), _mm256_shuffle_epi8(table, high));
}

__attribute__((target("avx2"))) void count_common_avx2(const uint64_t* row, const uint64_t* blocks,
                                                       int64_t num_blocks, int64_t words,
                                                       int32_t* common) {
  constexpr int64_t kByteWords = 31;  // a byte holds the counts of this many words
  const __m256i zero = _mm256_setzero_si256();
  for (int64_t b = 0; b < num_blocks; ++b) {
    const auto* block = reinterpret_cast<const __m256i*>(blocks + b * words * kLanes);
    __m256i sum[2] = {zero, zero};
    for (int64_t first = 0; first < words; first += kByteWords) {
      __m256i bytes[2] = {zero, zero};
      for (int64_t w = first; w < std::min(first + kByteWords, words); ++w) {
        const __m256i word = _mm256_set1_epi64x(static_cast<int64_t>(row[w]));
        for (int half = 0; half < 2; ++half) {
          const __m256i lanes = _mm256_loadu_si256(block + 2 * w + half);
          bytes[half] = _mm256_add_epi8(bytes[half], byte_counts(_mm256_and_si256(word, lanes)));
        }
      }
      for (int half = 0; half < 2; ++half) {
        sum[half] = _mm256_add_epi64(sum[half], _mm256_sad_epu8(bytes[half], zero));
      }
    }
    uint64_t counts[kLanes];
    for (int half = 0; half < 2; ++half) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(counts) + half, sum[half]);
    }
    for (int l = 0; l < kLanes; ++l) common[b * kLanes + l] = static_cast<int32_t>(counts[l]);
  }
}
#endif

}  // namespace

const std::vector<PopcountKernel>& popcount_kernels() {
  static const std::vector<PopcountKernel> kKernels = [] {
    std::vector<PopcountKernel> kernels;
#ifdef SWARM_KV_X86_KERNELS
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vpopcntdq")) {
      kernels.push_back({"avx512", count_common_avx512});
    }
    if (__builtin_cpu_supports("avx2")) kernels.push_back({"avx2", count_common_avx2});
#endif
    kernels.push_back({"portable", count_common_portable});
    return kernels;
  }();
  return kKernels;
}

void count_common(const uint64_t* row, const uint64_t* blocks, int64_t num_blocks, int64_t words,
                  int32_t* common) {
  static CountCommon* const kFastest = popcount_kernels().front().count_common;
  kFastest(row, blocks, num_blocks, words, common);
}

}  // namespace swarm_kv
