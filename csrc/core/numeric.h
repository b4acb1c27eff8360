#pragma once

#include <bit>
#include <cstdint>

namespace swarm_kv {

// IEEE 754 half precision storage. Conversion from float rounds to nearest even; beyond the range
// it gives infinity.
struct fp16 {
  uint16_t bits = 0;

  fp16() = default;
  explicit fp16(float value) : bits(encode(value)) {}
  static fp16 from_bits(uint16_t bits) {
    fp16 result;
    result.bits = bits;
    return result;
  }
  operator float() const { return decode(bits); }

  static float decode(uint16_t half) {
    const int32_t sign = static_cast<int32_t>(half & 0x8000u) << 16;
    const int32_t shifted = static_cast<int32_t>(half & 0x7fffu) << 13;
    // Rebias the exponent by 112; infinity and NaN need another 112 to stay all ones.
    const int32_t normal = shifted + kRebias + (shifted >= kHalfInfinity ? kRebias : 0);
    // A subnormal half gets a hidden bit that is then subtracted: exact, and safe where
    // denormals are flushed.
    const float subnormal = std::bit_cast<float>(shifted + kRebias + (1 << 23)) - kSmallestNormal;
    // All ones for a subnormal; a mask, since a conditional would keep loops from vectorising.
    const int32_t mask = (shifted - (1 << 23)) >> 31;
    return std::bit_cast<float>(sign | (std::bit_cast<int32_t>(subnormal) & mask) |
                                (normal & ~mask));
  }

  static uint16_t encode(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (word >> 16) & 0x8000u;
    const uint32_t magnitude = word & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u;  // quiet NaN
    } else if (magnitude >= 0x47800000u) {
      half = 0x7c00u;  // 65536 and more
    } else if (magnitude < 0x38800000u) {
      // Below 2^-14: adding 0.5 aligns the last half bit with the last float bit, and the adder
      // rounds.
      half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    } else {
      const uint32_t odd = (magnitude >> 13) & 1u;
      half = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
    }
    return static_cast<uint16_t>(sign | half);
  }

 private:
  static constexpr int32_t kHalfInfinity = 0x7c00 << 13;
  static constexpr int32_t kRebias = 112 << 23;
  static constexpr float kSmallestNormal = 0x1p-14f;
};

// bfloat16 storage: the upper half of a float. Conversion from float rounds to nearest even.
struct bf16 {
  uint16_t bits = 0;

  bf16() = default;
  explicit bf16(float value) : bits(encode(value)) {}
  static bf16 from_bits(uint16_t bits) {
    bf16 result;
    result.bits = bits;
    return result;
  }
  operator float() const { return decode(bits); }

  static float decode(uint16_t half) {
    return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
  }

  static uint16_t encode(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((word >> 16) | 0x40u);
    return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
};

// Converts `count` values; source and destination must not overlap.
void to_float(const fp16* source, float* destination, int64_t count);
void to_float(const bf16* source, float* destination, int64_t count);
void to_float(const float* source, float* destination, int64_t count);
void to_float(const double* source, float* destination, int64_t count);

// Converts rows of `count` values, of which row r begins at source + starts[r], into dense rows.
void to_float_rows(const fp16* source, const int64_t* starts, int64_t rows, float* destination,
                   int64_t count);
void from_float(const float* source, fp16* destination, int64_t count);
void from_float(const float* source, bf16* destination, int64_t count);
void from_float(const float* source, float* destination, int64_t count);
void from_float(const float* source, double* destination, int64_t count);

// The largest |value|, 0 for no values; NaN or infinity when there is one.
float largest_magnitude(const float* values, int64_t count);

}  // namespace swarm_kv
