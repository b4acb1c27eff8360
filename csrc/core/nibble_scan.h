#pragma once

#include <cstdint>

namespace swarm_kv {

// Table look-ups by codes of four bits, the innermost loop of scoring. A table of sixteen bytes
// fits a vector register, where one shuffle looks up 16 to 64 codes.

// Greatest value in a table: two of them add up within a byte.
constexpr int kScanTableMax = 127;
// Greatest number of parts: so many values add up within 16 bits.
constexpr int64_t kScanMaxParts = 516;

// Codes of `parts` (even) parts of a run of items: plane p holds at data[p * plane + n] the code of
// part 2p of item n in the low half and that of part 2p + 1 in the high half of a byte.
struct NibbleCodes {
  const uint8_t* data;
  int64_t plane;  // bytes from one plane to the next
  int64_t parts;
};

// sums[r * stride + n] = sum over parts m of tables[(r * parts + m) * 16 + code(m, n)], for `rows`
// tables of `parts` parts and n < count. No value of a table exceeds kScanTableMax.
void scan_nibbles(const uint8_t* tables, int64_t rows, const NibbleCodes& codes, int64_t count,
                  uint16_t* sums, int64_t stride);

// The same by the instructions of one level; all give equal results. A level that the processor
// does not have must not be called.
enum class ScanLevel { kPortable, kAvx2, kAvx512 };
bool has_scan_level(ScanLevel level);
void scan_nibbles(ScanLevel level, const uint8_t* tables, int64_t rows, const NibbleCodes& codes,
                  int64_t count, uint16_t* sums, int64_t stride);

}  // namespace swarm_kv
