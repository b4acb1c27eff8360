#include "core/nibble_scan.h"

#include <algorithm>

#include "core/simd.h"

#ifdef SWARM_KV_HAS_X86
#include <immintrin.h>
#endif

namespace swarm_kv {
namespace {

// Rows scanned together: their sums stay in registers, and each code is unpacked once for all.
constexpr int64_t kRows = 4;

void scan_portable(const uint8_t* tables, int64_t rows, const NibbleCodes& codes, int64_t first,
                   int64_t count, uint16_t* sums, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* table = tables + r * codes.parts * 16;
    uint16_t* sum = sums + r * stride;
    std::fill(sum + first, sum + count, uint16_t{0});
    for (int64_t m = 0; m < codes.parts; m += 2) {
      const uint8_t* code = codes.data + m / 2 * codes.plane;
      const uint8_t* low = table + m * 16;
      for (int64_t n = first; n < count; ++n)
        sum[n] += low[code[n] & 15] + low[16 + (code[n] >> 4)];
    }
  }
}

#ifdef SWARM_KV_HAS_X86

// Both kernels add bytes as they lie, two neighbouring items in one 16-bit lane: `both` gathers
// item 2i + 256 * item 2i+1 (wrapping around), `odd` the latter alone; the former is the
// difference. The last vector of items repeats some where they are no whole number of vectors.

template <int kCount>
__attribute__((target("avx2"))) int64_t scan_avx2(const uint8_t* tables, const NibbleCodes& codes,
                                                  int64_t count, uint16_t* sums, int64_t stride) {
  const __m256i mask = _mm256_set1_epi8(15);
  if (count < 32) return 0;
  for (int64_t next = 0; next < count; next += 32) {
    const int64_t n = std::min(next, count - 32);
    __m256i both[kCount], odd[kCount];
    for (int r = 0; r < kCount; ++r) both[r] = odd[r] = _mm256_setzero_si256();
    for (int64_t m = 0; m < codes.parts; m += 2) {
      const uint8_t* source = codes.data + m / 2 * codes.plane + n;
      const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
      const __m256i low = _mm256_and_si256(code, mask);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(code, 4), mask);
      for (int r = 0; r < kCount; ++r) {
        const auto* table = reinterpret_cast<const __m128i*>(tables + (r * codes.parts + m) * 16);
        const __m256i low_table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table));
        const __m256i high_table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table + 1));
        const __m256i value = _mm256_add_epi8(_mm256_shuffle_epi8(low_table, low),
                                              _mm256_shuffle_epi8(high_table, high));
        both[r] = _mm256_add_epi16(both[r], value);
        odd[r] = _mm256_add_epi16(odd[r], _mm256_srli_epi16(value, 8));
      }
    }
    for (int r = 0; r < kCount; ++r) {
      const __m256i even = _mm256_sub_epi16(both[r], _mm256_slli_epi16(odd[r], 8));
      const __m256i first = _mm256_unpacklo_epi16(even, odd[r]);
      const __m256i second = _mm256_unpackhi_epi16(even, odd[r]);
      auto* target = reinterpret_cast<__m256i*>(sums + r * stride + n);
      _mm256_storeu_si256(target, _mm256_permute2x128_si256(first, second, 0x20));
      _mm256_storeu_si256(target + 1, _mm256_permute2x128_si256(first, second, 0x31));
    }
  }
  return count;
}

template <int kCount>
__attribute__((target("avx512bw"))) int64_t scan_avx512(const uint8_t* tables,
                                                        const NibbleCodes& codes, int64_t count,
                                                        uint16_t* sums, int64_t stride) {
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i first_lanes = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second_lanes = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  if (count < 64) return 0;
  for (int64_t next = 0; next < count; next += 64) {
    const int64_t n = std::min(next, count - 64);
    __m512i both[kCount], odd[kCount];
    for (int r = 0; r < kCount; ++r) both[r] = odd[r] = _mm512_setzero_si512();
    for (int64_t m = 0; m < codes.parts; m += 2) {
      const __m512i code = _mm512_loadu_si512(codes.data + m / 2 * codes.plane + n);
      const __m512i low = _mm512_and_si512(code, mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(code, 4), mask);
      for (int r = 0; r < kCount; ++r) {
        const auto* table = reinterpret_cast<const __m128i*>(tables + (r * codes.parts + m) * 16);
        const __m512i low_table = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(table));
        const __m512i high_table = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(table + 1));
        const __m512i value = _mm512_add_epi8(_mm512_shuffle_epi8(low_table, low),
                                              _mm512_shuffle_epi8(high_table, high));
        both[r] = _mm512_add_epi16(both[r], value);
        odd[r] = _mm512_add_epi16(odd[r], _mm512_srli_epi16(value, 8));
      }
    }
    for (int r = 0; r < kCount; ++r) {
      const __m512i even = _mm512_sub_epi16(both[r], _mm512_slli_epi16(odd[r], 8));
      const __m512i first = _mm512_unpacklo_epi16(even, odd[r]);
      const __m512i second = _mm512_unpackhi_epi16(even, odd[r]);
      uint16_t* target = sums + r * stride + n;
      _mm512_storeu_si512(target, _mm512_permutex2var_epi64(first, first_lanes, second));
      _mm512_storeu_si512(target + 32, _mm512_permutex2var_epi64(first, second_lanes, second));
    }
  }
  return count;
}

template <int kCount>
int64_t scan_rows(ScanLevel level, const uint8_t* tables, const NibbleCodes& codes, int64_t count,
                  uint16_t* sums, int64_t stride) {
  return level == ScanLevel::kAvx512 ? scan_avx512<kCount>(tables, codes, count, sums, stride)
                                     : scan_avx2<kCount>(tables, codes, count, sums, stride);
}

// Returns how many items it has scanned: all, unless they are fewer than a vector.
int64_t scan_vectors(ScanLevel level, const uint8_t* tables, int64_t rows, const NibbleCodes& codes,
                     int64_t count, uint16_t* sums, int64_t stride) {
  switch (rows) {
    case 1:
      return scan_rows<1>(level, tables, codes, count, sums, stride);
    case 2:
      return scan_rows<2>(level, tables, codes, count, sums, stride);
    case 3:
      return scan_rows<3>(level, tables, codes, count, sums, stride);
    default:
      return scan_rows<4>(level, tables, codes, count, sums, stride);
  }
}

#endif

}  // namespace

bool has_scan_level(ScanLevel level) {
#ifdef SWARM_KV_HAS_X86
  if (level == ScanLevel::kAvx512) return __builtin_cpu_supports("avx512bw");
  if (level == ScanLevel::kAvx2) return __builtin_cpu_supports("avx2");
#endif
  return level == ScanLevel::kPortable;
}

void scan_nibbles(ScanLevel level, const uint8_t* tables, int64_t rows, const NibbleCodes& codes,
                  int64_t count, uint16_t* sums, int64_t stride) {
  for (; rows > 0; rows -= kRows) {
    const int64_t some = std::min(rows, kRows);
    int64_t done = 0;
#ifdef SWARM_KV_HAS_X86
    if (level != ScanLevel::kPortable) {
      done = scan_vectors(level, tables, some, codes, count, sums, stride);
    }
#endif
    scan_portable(tables, some, codes, done, count, sums, stride);
    tables += kRows * codes.parts * 16;
    sums += kRows * stride;
  }
}

void scan_nibbles(const uint8_t* tables, int64_t rows, const NibbleCodes& codes, int64_t count,
                  uint16_t* sums, int64_t stride) {
  static const ScanLevel level = has_scan_level(ScanLevel::kAvx512) ? ScanLevel::kAvx512
                                 : has_scan_level(ScanLevel::kAvx2) ? ScanLevel::kAvx2
                                                                    : ScanLevel::kPortable;
  scan_nibbles(level, tables, rows, codes, count, sums, stride);
}

}  // namespace swarm_kv
