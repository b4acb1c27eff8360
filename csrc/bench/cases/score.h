#pragma once

#include <cstdint>
#include <vector>

#include "bench/cases/data.h"
#include "core/nibble_scan.h"
#include "ops/cpu/scoring.h"

namespace swarm_kv::bench {

// A decoding step's query, 32 heads of 128 features over 8 KV heads.
class Query {
 public:
  static constexpr int64_t kKvHeads = 8, kGroup = 4, kDim = 128;

  explicit Query(Random& random) : numbers_(random.numbers<float>(kKvHeads * kGroup * kDim)) {}
  ScoreQueries view() const { return {numbers_.data(), kKvHeads, kGroup, kDim}; }

 private:
  std::vector<float> numbers_;
};

inline constexpr float kScale = 0.0883883f;  // 1 / sqrt(128)

// Softmax scores of all entries from packed codes, two of four bits for every eight features.
class ScoreCodes {
 public:
  static constexpr int64_t kParts = Query::kDim / 4;

  explicit ScoreCodes(int64_t entries)
      : codebooks_(random_.numbers<float>(Query::kKvHeads * 16 * Query::kDim)),
        codes_(random_.bytes(Query::kKvHeads * kParts / 2 * entries)),
        scores_(entries) {}

  void run() {
    cpu::score_packed_codes(query_.view(), codebooks_.data(), kParts, codes_.data(), items(),
                            kScale, scores_.data());
  }
  int64_t items() const { return static_cast<int64_t>(scores_.size()); }
  int64_t bytes() const { return static_cast<int64_t>(codes_.size()) + 4 * items(); }

 private:
  Random random_{3};
  Query query_{random_};
  std::vector<float> codebooks_;
  std::vector<uint8_t> codes_;
  std::vector<float> scores_;
};

// The innermost loop of ScoreCodes alone: four rows of tables over one KV head's codes.
class ScanNibbles {
 public:
  explicit ScanNibbles(int64_t entries)
      : tables_(Query::kGroup * ScoreCodes::kParts * 16),
        codes_(random_.bytes(ScoreCodes::kParts / 2 * entries)),
        sums_(Query::kGroup * entries) {
    for (uint8_t& value : tables_) value = static_cast<uint8_t>(random_.below(kScanTableMax + 1));
  }

  void run() {
    scan_nibbles(tables_.data(), Query::kGroup, {codes_.data(), items(), ScoreCodes::kParts},
                 items(), sums_.data(), items());
  }
  int64_t items() const { return static_cast<int64_t>(sums_.size()) / Query::kGroup; }
  int64_t bytes() const {
    return static_cast<int64_t>(codes_.size() + sums_.size() * sizeof(sums_[0]));
  }

 private:
  Random random_{4};
  std::vector<uint8_t> tables_, codes_;
  std::vector<uint16_t> sums_;
};

// Softmax scores of cluster medoids, which are keys in 16 bits.
class ScoreMedoids {
 public:
  explicit ScoreMedoids(int64_t medoids)
      : keys_(random_.numbers<fp16>(Query::kKvHeads * medoids * Query::kDim)), scores_(medoids) {}

  void run() { cpu::score_keys(query_.view(), keys_.data(), items(), kScale, scores_.data()); }
  int64_t items() const { return static_cast<int64_t>(scores_.size()); }
  int64_t bytes() const { return static_cast<int64_t>(keys_.size() * sizeof(fp16)) + 4 * items(); }

 private:
  Random random_{5};
  Query query_{random_};
  std::vector<fp16> keys_;
  std::vector<float> scores_;
};

// The same with medoids of four bits.
class ScoreCodedMedoids {
 public:
  explicit ScoreCodedMedoids(int64_t medoids)
      : keys_(random_.bytes(Query::kKvHeads * medoids * Query::kDim / 2)),
        scales_(Query::kKvHeads * Query::kDim, 0.1f),
        scores_(medoids) {}

  void run() {
    cpu::score_coded_keys(query_.view(), keys_.data(), scales_.data(), items(), kScale,
                          scores_.data());
  }
  int64_t items() const { return static_cast<int64_t>(scores_.size()); }
  int64_t bytes() const { return static_cast<int64_t>(keys_.size()) + 4 * items(); }

 private:
  Random random_{6};
  Query query_{random_};
  std::vector<uint8_t> keys_;
  std::vector<float> scales_, scores_;
};

}  // namespace swarm_kv::bench
