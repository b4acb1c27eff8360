#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/entry_source.h"

namespace swarm_kv {

// How an entry's numbers are written on the drives. One codec object belongs to one segment, since
// it may hold what it learned from the segment's entries. In fast memory entries are always plain:
// they are decoded when they arrive.
class Codec {
 public:
  virtual ~Codec() = default;

  // Bytes of one entry on the drives.
  virtual int64_t stored_bytes() const = 0;
  // Fast memory that the codec itself holds, in bytes.
  virtual uint64_t bytes() const = 0;

  // `entry` is [K | V] as EntrySource::assemble writes it; `out` has stored_bytes(). Throws
  // Error(kArgument) for NaN, infinity, or a magnitude that the code cannot hold.
  virtual void encode(const std::byte* entry, std::byte* out) = 0;
  virtual void decode(const std::byte* code, std::byte* entry) const = 0;

  // What decoding needs beside the code: with kivi4 the mean of each key channel, then the
  // deviation of each.
  virtual std::span<const float> channels() const { return {}; }
};

// A codec for `entries` entries of `source`, or null for "none": as is.
//
//   int8   one byte per number and one scale per head's K and V: relative to the largest number
//   kivi4  four bits per number, in groups of 32 with a scale and a least value each. Keys are
//          normalised per channel before, because a few channels are large in every token (KIVI,
//          arXiv 2402.02750), by the channel's mean and deviation over the segment: entries must
//          be readable one by one, so that tokens cannot share a group.
//
// Throws Error(kArgument) listing the names.
std::unique_ptr<Codec> make_codec(const std::string& name, const EntrySource& source,
                                  int64_t entries);

// The codec again, for entries of `heads` heads of `head_dim` numbers, from the channels() of one
// that encoded entries, of any element. Throws Error(kArgument) listing the names, or for another
// number of channels.
std::unique_ptr<Codec> make_codec(const std::string& name, Element element, int64_t heads,
                                  int64_t head_dim, std::span<const float> channels);
}  // namespace swarm_kv
