#include "core/codec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "core/numeric.h"
#include "core/simd.h"
#include "io/error.h"

namespace swarm_kv {
namespace {

constexpr float kLargestHalf = 65504.0f;

struct Range {
  float low;
  float high;
};

SWARM_KV_CLONES Range range_of(const float* values, int64_t count) {
  Range range{values[0], values[0]};
  for (int64_t i = 0; i < count; ++i) {
    range.low = values[i] < range.low ? values[i] : range.low;
    range.high = values[i] > range.high ? values[i] : range.high;
  }
  return range;
}

void check_entry(const std::string& name, const float* values, int64_t count) {
  const float largest = largest_magnitude(values, count);
  if (!std::isfinite(largest)) {
    throw Error(ErrorKind::kArgument,
                "codec \"" + name + "\": keys or values hold NaN or infinity; use codec \"none\"");
  }
  if (largest > kLargestHalf) {
    throw Error(ErrorKind::kArgument, "codec \"" + name + "\": a key or value is beyond " +
                                          std::to_string(static_cast<int>(kLargestHalf)) +
                                          ", which its scales cannot hold; use codec \"none\"");
  }
}

std::byte* put_half(std::byte* out, float value) {
  const fp16 half(value);
  std::memcpy(out, &half, sizeof(half));
  return out + sizeof(half);
}

const std::byte* get_half(const std::byte* in, float& value) {
  fp16 half;
  std::memcpy(&half, in, sizeof(half));
  value = half;
  return in + sizeof(half);
}

// Numbers of one half (K or V) and how they are typed.
struct Shape {
  Element element;
  int64_t heads;
  int64_t head_dim;

  int64_t half() const { return heads * head_dim; }
};

SWARM_KV_CLONES void round_to_bytes(const float* values, float inverse, int64_t count,
                                    std::byte* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float level = std::min(127.0f, std::max(-127.0f, values[i] * inverse));
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const float rounded = level + 0x1.8p23f;
    out[i] = static_cast<std::byte>(std::bit_cast<uint32_t>(rounded) & 0xffu);
  }
}

SWARM_KV_CLONES void scale_bytes(const std::byte* in, float scale, int64_t count, float* values) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(static_cast<int8_t>(in[i])) * scale;
  }
}

// Numbers as an entry holds them. Scales are rounded, so that what was stored at the end of
// float16's range may come back from beyond it.
void put_numbers(Element element, float* values, int64_t count, std::byte* entry) {
  if (element == Element::kFloat16) {
    for (int64_t i = 0; i < count; ++i) {  // NaN stays what it is
      values[i] = values[i] > kLargestHalf ? kLargestHalf : values[i];
      values[i] = values[i] < -kLargestHalf ? -kLargestHalf : values[i];
    }
  }
  from_float(element, values, entry, count);
}

class Int8 final : public Codec {
 public:
  explicit Int8(const Shape& shape) : shape_(shape), numbers_(2 * shape.half()) {}

  int64_t stored_bytes() const override {
    return 2 * shape_.heads * (static_cast<int64_t>(sizeof(fp16)) + shape_.head_dim);
  }
  uint64_t bytes() const override { return numbers_.size() * sizeof(float); }

  void encode(const std::byte* entry, std::byte* out) override {
    to_float(shape_.element, entry, numbers_.data(), 2 * shape_.half());
    check_entry("int8", numbers_.data(), 2 * shape_.half());
    for (int64_t row = 0; row < 2 * shape_.heads; ++row) {
      const float* values = numbers_.data() + row * shape_.head_dim;
      const float step = fp16(largest_magnitude(values, shape_.head_dim) / 127.0f);
      out = put_half(out, step);
      round_to_bytes(values, step > 0 ? 1.0f / step : 0.0f, shape_.head_dim, out);
      out += shape_.head_dim;
    }
  }

  void decode(const std::byte* code, std::byte* entry) const override {
    std::vector<float> values(shape_.head_dim);
    for (int64_t row = 0; row < 2 * shape_.heads; ++row) {
      float step;
      code = get_half(code, step);
      scale_bytes(code, step, shape_.head_dim, values.data());
      code += shape_.head_dim;
      put_numbers(shape_.element, values.data(), shape_.head_dim, entry);
      entry += shape_.head_dim * size_of(shape_.element);
    }
  }

 private:
  Shape shape_;
  std::vector<float> numbers_;  // one entry, while it is encoded
};

constexpr int64_t kGroup = 32;  // numbers that share a scale

// 16 bytes: number i in the low four bits of byte i, number i + 16 in the high ones.
SWARM_KV_CLONES void pack_group(const float* values, float low, float inverse, std::byte* out) {
  uint32_t level[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const float rounded = std::min(15.0f, std::max(0.0f, (values[i] - low) * inverse)) + 0x1.8p23f;
    level[i] = std::bit_cast<uint32_t>(rounded) & 0xfu;
  }
  for (int i = 0; i < kGroup / 2; ++i) {
    out[i] = static_cast<std::byte>(level[i] | level[i + kGroup / 2] << 4);
  }
}

SWARM_KV_CLONES void unpack_group(const std::byte* in, float low, float step, float* values) {
  for (int i = 0; i < kGroup / 2; ++i) {
    const uint32_t byte = static_cast<uint8_t>(in[i]);
    values[i] = low + step * static_cast<float>(byte & 0xfu);
    values[i + kGroup / 2] = low + step * static_cast<float>(byte >> 4);
  }
}

SWARM_KV_CLONES void normalise(float* values, const float* mean, const float* inverse,
                               int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = (values[i] - mean[i]) * inverse[i];
}

SWARM_KV_CLONES void denormalise(float* values, const float* mean, const float* deviation,
                                 int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] * deviation[i] + mean[i];
}

class Kivi4 final : public Codec {
 public:
  Kivi4(const Shape& shape, std::vector<float> channels)
      : shape_(shape),
        groups_((shape.half() + kGroup - 1) / kGroup),
        numbers_(2 * groups_ * kGroup),
        channels_(std::move(channels)) {
    for (int64_t i = shape.half(); i < 2 * shape.half(); ++i) {
      inverse_.push_back(channels_[i] > 0 ? 1.0f / channels_[i] : 0.0f);
    }
  }

  // Mean and deviation of each key channel.
  static std::vector<float> fit(const Shape& shape, const EntrySource& source, int64_t entries) {
    const int64_t half = shape.half();
    std::vector<double> sum(half, 0.0);
    std::vector<double> square(half, 0.0);
    std::vector<std::byte> entry(source.entry_bytes());
    std::vector<float> keys(half);
    for (int64_t n = 0; n < entries; ++n) {
      source.assemble(n, entry.data());
      to_float(shape.element, entry.data(), keys.data(), half);
      check_entry("kivi4", keys.data(), half);
      for (int64_t i = 0; i < half; ++i) {
        sum[i] += keys[i];
        square[i] += static_cast<double>(keys[i]) * keys[i];
      }
    }
    const double count = static_cast<double>(std::max<int64_t>(entries, 1));
    std::vector<float> channels(2 * half);
    for (int64_t i = 0; i < half; ++i) {
      const double mean = sum[i] / count;
      const double deviation = std::sqrt(std::max(square[i] / count - mean * mean, 0.0));
      channels[i] = static_cast<float>(mean);
      // A channel that never changes is held by its mean alone.
      channels[half + i] = deviation > 1e-30 ? static_cast<float>(deviation) : 0.0f;
    }
    return channels;
  }

  int64_t stored_bytes() const override { return 2 * groups_ * kGroupBytes; }
  uint64_t bytes() const override {
    return (numbers_.size() + channels_.size() + inverse_.size()) * sizeof(float);
  }
  std::span<const float> channels() const override { return channels_; }

  void encode(const std::byte* entry, std::byte* out) override {
    const int64_t half = shape_.half();
    for (int part = 0; part < 2; ++part) {
      float* values = numbers_.data() + part * groups_ * kGroup;
      to_float(shape_.element, entry + part * half * size_of(shape_.element), values, half);
      check_entry("kivi4", values, half);
      if (part == 0) normalise(values, channels_.data(), inverse_.data(), half);
      // An incomplete group is filled up with a number that it holds already.
      std::fill(values + half, values + groups_ * kGroup, values[half - 1]);
    }
    for (int64_t group = 0; group < 2 * groups_; ++group) {
      const float* values = numbers_.data() + group * kGroup;
      const Range range = range_of(values, kGroup);
      const float low = fp16(range.low);
      const float step = fp16((range.high - low) / 15.0f);
      out = put_half(put_half(out, low), step);
      pack_group(values, low, step > 0 ? 1.0f / step : 0.0f, out);
      out += kGroup / 2;
    }
  }

  void decode(const std::byte* code, std::byte* entry) const override {
    const int64_t half = shape_.half();
    std::vector<float> values(groups_ * kGroup);
    for (int part = 0; part < 2; ++part) {
      for (int64_t group = 0; group < groups_; ++group) {
        float low;
        float step;
        code = get_half(get_half(code, low), step);
        unpack_group(code, low, step, values.data() + group * kGroup);
        code += kGroup / 2;
      }
      if (part == 0) denormalise(values.data(), channels_.data(), channels_.data() + half, half);
      put_numbers(shape_.element, values.data(), half, entry);
      entry += half * size_of(shape_.element);
    }
  }

 private:
  static constexpr int64_t kGroupBytes = 2 * sizeof(fp16) + kGroup / 2;

  Shape shape_;
  int64_t groups_;              // per half
  std::vector<float> numbers_;  // one entry, while it is encoded
  std::vector<float> channels_;
  std::vector<float> inverse_;  // of each key channel's deviation
};

struct Kind {
  std::string name;
  // Its channels, from a segment's entries; null for a codec that needs none.
  std::vector<float> (*fit)(const Shape&, const EntrySource&, int64_t entries);
  std::unique_ptr<Codec> (*make)(const Shape&, std::vector<float> channels);
};

const std::vector<Kind> kCodecs = {
    {"none", nullptr, [](const Shape&, std::vector<float>) { return std::unique_ptr<Codec>(); }},
    {"int8", nullptr,
     [](const Shape& shape, std::vector<float>) -> std::unique_ptr<Codec> {
       return std::make_unique<Int8>(shape);
     }},
    {"kivi4", Kivi4::fit,
     [](const Shape& shape, std::vector<float> channels) -> std::unique_ptr<Codec> {
       return std::make_unique<Kivi4>(shape, std::move(channels));
     }},
};

const Kind& kind_of(const std::string& name) {
  std::string known;
  for (const Kind& kind : kCodecs) {
    if (kind.name == name) return kind;
    known += (known.empty() ? "" : ", ") + kind.name;
  }
  throw Error(ErrorKind::kArgument, "unknown `codec` \"" + name + "\"; choose one of: " + known);
}

}  // namespace

std::unique_ptr<Codec> make_codec(const std::string& name, const EntrySource& source,
                                  int64_t entries) {
  const Kind& kind = kind_of(name);
  const Shape shape{source.element, source.heads, source.head_dim()};
  return kind.make(shape, kind.fit ? kind.fit(shape, source, entries) : std::vector<float>());
}

std::unique_ptr<Codec> make_codec(const std::string& name, Element element, int64_t heads,
                                  int64_t head_dim, std::span<const float> channels) {
  const Kind& kind = kind_of(name);
  const Shape shape{element, heads, head_dim};
  const size_t needed = kind.fit ? static_cast<size_t>(2 * shape.half()) : 0;
  if (channels.size() != needed) {
    throw Error(ErrorKind::kArgument, "codec \"" + name + "\": needs " + std::to_string(needed) +
                                          " channels, got " + std::to_string(channels.size()));
  }
  return kind.make(shape, {channels.begin(), channels.end()});
}

}  // namespace swarm_kv
